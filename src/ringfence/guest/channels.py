"""Descriptors over a byte stream: each one that the host sends with a request becomes a channel.

Between a host and a guest with a machine of its own there is one serial line, and no descriptor crosses
it. So each side has a carrier. The host's takes requests with their descriptors from a socket; the guest's
makes pipes and sockets like them, and hands the request on with those. What goes into one end of a
channel comes out at the other, and an end that closes closes the other: see `launcher.link.channels`.
"""

from __future__ import annotations

import _struct as struct
import os
import socket
import time

from ..launcher import wire
from ..launcher.link.channel import BLOB, BYTES, PACKETS, READ, WRITE, Channel
from ..launcher.link.channels import LineEnd
from ..launcher.link.line import CONTROL, DATA, END, MESSAGE, PIECE, LineError, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_OPENED = struct.Struct("<IcI")  # channel, what it is, bytes of it that come along
_SEEK_END = 2
CLOCK, QUIESCE, RELAY, MOUNTS = b"T", b"Z", b"N", b"A"
# Guest's answers to REST: nothing is under way; nothing more was to come; so many channels are
# open.
QUIESCED, RESTED, BUSY = b"QUIESCED", b"RESTED", b"BUSY"
_SETTLING_S = 5.0
_LOOK_S = 0.05


def request(data: bytes) -> tuple[bytes, bytes] | None:
    """As `split`, but what comes before the first request is nobody's any more."""
    while (found := split(data)) and data[:1] != MESSAGE:
        data = found[1]
    return found


class Carrier(LineEnd):
    """Side of the serial link. `run` returns at the end of the link or of the socket of
    requests.

    Args:
        control: Source of the host's requests; in the guest, their destination.
        is_host: Only the host opens channels.
        on_clock: Called in the guest with the host's time, in ns since the epoch: a request that begins
            with `CLOCK`.
        on_relay: Called when another process is to relay connections: `RELAY` and a token.
        on_mounts: Called when more is to be mounted: `MOUNTS`. Its result is the answer.

    Attributes:
        rests: In the guest: `run` has returned because the machine will be saved. The host sent `QUIESCE`,
            received `QUIESCED`, and sent it once more, after which nothing comes.
    """

    def __init__(
        self,
        line: int,
        control: wire.Socket,
        *,
        is_host: bool,
        on_clock: Callable[[int], None] | None = None,
        on_relay: Callable[[bytes], None] | None = None,
        on_mounts: Callable[[bytes], bytes] | None = None,
    ) -> None:
        super().__init__(line, is_host=is_host)
        self.control, self.on_clock, self.on_relay = control, on_clock, on_relay
        self.on_mounts = on_mounts
        self.is_quiesced, self._settles_until = False, 0.0
        self._handle(control.fileno(), self._read_control)

    def _take_control(self, kind: bytes, data: bytes) -> None:
        if kind == DATA and self.is_host:
            wire.send_raw(self.control, data)
        elif kind == MESSAGE and not self.is_host:
            self._take_message(data)
        elif kind == CLOCK and self.on_clock is not None:
            self.on_clock(int(data))
        elif kind == RELAY and self.on_relay is not None:
            self.on_relay(data)
        elif kind == MOUNTS and self.on_mounts is not None:
            self._put(DATA, CONTROL, self.on_mounts(data))
        elif kind == QUIESCE and not self.is_host:
            self._over = self.is_quiesced
            self._settles_until = time.monotonic() + _SETTLING_S
            self.pause_s = _LOOK_S
        else:
            raise LineError("an unknown kind of frame")

    def _between(self) -> None:
        """Asked to rest, say whether nothing is under way, once it is so, or has not come to be in time."""
        super()._between()
        if self.pause_s is None or self._over:
            return
        self.is_quiesced = not self._channels
        if self.is_quiesced:
            self._put(DATA, CONTROL, QUIESCED)
        elif time.monotonic() > self._settles_until:
            self._put(DATA, CONTROL, BUSY + b" %d" % len(self._channels))
        else:
            return
        self.pause_s = None

    # -- requests, on the host ----------------------------------------------------------------

    def _read_control(self) -> None:
        data, fds = wire.receive_raw(self.control)
        if not data:
            self._over = True
        elif data[:1] in (CLOCK, QUIESCE, RELAY, MOUNTS):
            self._put(data[:1], CONTROL, data[1:])
        elif self.is_host:
            self._send_message(data, fds)
        else:
            self._put(DATA, CONTROL, data)

    def _send_message(self, data: bytes, fds: list[int]) -> None:
        heads, blobs = b"", b""
        opened: list[Channel] = []
        for fd in fds:
            channel, blob = self._opened(self._last + 1 + len(opened), fd)
            heads += _OPENED.pack(channel.number, channel.kind, len(blob))
            blobs += blob
            opened.append(channel)
        self._put(MESSAGE, CONTROL, struct.pack("<H", len(fds)) + heads + blobs + data)
        for channel in opened:
            self._add(channel)
        _order(opened)

    def _opened(self, number: int, fd: int) -> tuple[Channel, bytes]:
        """Choose the channel for a descriptor of the host by its type in the kernel."""
        kind = os.fstat(fd).st_mode & 0o170000
        if kind == 0o100000:
            size = os.lseek(fd, 0, _SEEK_END)
            os.lseek(fd, 0, 0)
            return Channel(number, BLOB, sink=fd), os.pread(fd, size, 0)
        if kind == 0o140000:
            sock = socket.socket(fileno=fd)
            is_stream = sock.type == socket.SOCK_STREAM
            sock.detach()
            return Channel(number, BYTES if is_stream else PACKETS, source=fd, sink=fd), b""
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            return Channel(number, WRITE, sink=fd), b""
        return Channel(number, READ, source=fd), b""

    # -- requests, in the guest ---------------------------------------------------------------

    def _take_message(self, data: bytes) -> None:
        count = struct.unpack_from("<H", data)[0]
        at, body = 2, 2 + count * _OPENED.size
        theirs: list[int] = []
        opened: list[Channel] = []
        for _ in range(count):
            number, kind, size = _OPENED.unpack_from(data, at)
            at += _OPENED.size
            channel, fd = _likeness(number, kind, data[body : body + size])
            body += size
            opened.append(channel)
            theirs.append(fd)
        blobs = [channel for channel in opened if channel.kind == BLOB]
        reply = next((channel for channel in opened if channel.kind == PACKETS), None)
        if reply is not None:
            reply.beside = blobs
        for channel in opened:
            self._add(channel)
        _order(opened)
        wire.send_raw(self.control, data[body:], theirs)
        for fd in theirs:
            os.close(fd)

    def _send_back(self, blob: Channel) -> None:
        at, size = blob.room, os.lseek(blob.sink, 0, _SEEK_END)
        while at < size:
            piece = os.pread(blob.sink, PIECE, at)
            self._put(DATA, blob.number, piece)
            at += len(piece)
        self._put(END, blob.number, b"")
        self._close(blob)


def _order(opened: list[Channel]) -> None:
    """Deliver each answer after the output that was written before it."""
    for reply in opened:
        if reply.kind == PACKETS:
            reply.outputs = [each for each in opened if each.kind in (WRITE, BYTES)]


def _likeness(number: int, kind: bytes, blob: bytes) -> tuple[Channel, int]:
    """Our end of a channel, and a descriptor for whom the request is for."""
    if kind == BLOB:
        fd = os.memfd_create("request", os.MFD_CLOEXEC)
        os.write(fd, blob)
        os.lseek(fd, 0, 0)
        channel = Channel(number, kind, sink=os.dup(fd))
        channel.room = len(blob)  # what is beyond is the guest's
        return channel, fd
    if kind in (PACKETS, BYTES):
        how = socket.SOCK_SEQPACKET if kind == PACKETS else socket.SOCK_STREAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, how | socket.SOCK_CLOEXEC)
        fd = ours.detach()
        return Channel(number, kind, source=fd, sink=fd), theirs.detach()
    read, write = os.pipe2(os.O_CLOEXEC)
    # So that the program, whoever it is, may open it anew as /dev/stdout. Both ends are one inode.
    os.fchmod(read, 0o666)
    if kind == READ:
        return Channel(number, kind, sink=write), read
    return Channel(number, kind, source=read), write
