"""Descriptors over a stream of bytes: what the host sends along with a request becomes a channel.

Between a host and a guest with a machine of its own there is one serial line, and no descriptor crosses
it. So each side has a carrier. The host's takes requests with their descriptors from a socket; the guest's
makes pipes and sockets like them, and hands the request on with those. What goes into one end of a
channel comes out at the other, and an end that closes closes the other. Both sides run the same
code; what the guest's says is checked here as anything that comes from a guest: at worst its own
sandbox ends.

A frame is a kind, a channel and a length, then so many bytes. A side may send so much on a channel as
the other has room for, and gets more room as what came is passed on: one stalled reader stops nobody else.
"""

from __future__ import annotations

import _struct as struct
import errno
import os
import select
import socket

from ..launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = struct.Struct("<cII")
_OPENED = struct.Struct("<IcI")  # channel, what it is, bytes of it that come along
_PIECE = 1 << 15
_WINDOW = 1 << 18
_MOST_BYTES = 1 << 16  # of a frame from a guest
_SEEK_END = 2

MESSAGE, DATA, END, STOP, ROOM, CLOCK = b"M", b"D", b"E", b"S", b"R", b"T"
CONTROL = 0  # the channel of answers that belong to no request

# What a descriptor is, seen by the host.
_PACKETS, _BYTES, _READ, _WRITE, _BLOB = b"p", b"b", b"r", b"w", b"f"


def frame(kind: bytes, number: int, data: bytes) -> bytes:
    """One frame, as it is on the line."""
    return _HEADER.pack(kind, number, len(data)) + data


def split(data: bytes) -> tuple[bytes, bytes] | None:
    """What the first frame says, a request without descriptors, and what follows; None: more must come."""
    if len(data) < _HEADER.size:
        return None
    kind, _number, size = _HEADER.unpack_from(data)
    end = _HEADER.size + size
    if len(data) < end:
        return None
    return data[_HEADER.size + (2 if kind == MESSAGE else 0) : end], data[end:]


class LineError(Exception):
    """The other side broke the rules: nothing that it says is believed any more."""


class Channel:
    """One descriptor of ours that the other side has the likes of.

    Attributes:
        source, sink: What we read and send; where we write what comes. -1: it goes the other way only.
        room: So many bytes may be sent.
    """

    def __init__(self, number: int, kind: bytes, *, source: int = -1, sink: int = -1) -> None:
        self.number, self.kind = number, kind
        self.source, self.sink = source, sink
        self.room = self.allowed = _WINDOW
        self.waiting = bytearray()
        self.packets: list[bytes] = []
        self.ends = False  # the other side has said all
        self.beside: list[Channel] = []  # blobs that go back before the first answer

    @property
    def has_waiting(self) -> bool:
        return bool(self.packets or self.waiting)


class Carrier:
    """One side of the line. `run` returns when it, or the socket of requests, has ended.

    Args:
        line: A stream, read and written.
        control: Where the host's requests come from; in the guest, where they go.
        is_host: Who opens channels.
        on_clock: What the guest does when the host tells the time, in ns since the epoch: a request that
            begins with `CLOCK`.
    """

    def __init__(
        self,
        line: int,
        control: wire.Socket,
        *,
        is_host: bool,
        on_clock: Callable[[int], None] | None = None,
    ) -> None:
        self.line, self.control, self.is_host = line, control, is_host
        self.on_clock = on_clock
        self._epoll = select.epoll()
        self._events: dict[int, int] = {}
        self._channels: dict[int, Channel] = {}
        self._by_fd: dict[int, Channel] = {}
        self._out, self._in = bytearray(), bytearray()
        self._last = CONTROL
        self._over = False
        os.set_blocking(line, False)
        for fd in (line, control.fileno()):
            self._want(fd, select.EPOLLIN)

    def run(self) -> None:
        """Carry until one end is gone; then close everything but what was given to us."""
        try:
            while not self._over:
                self._flush()
                for fd, events in self._epoll.poll():
                    self._ready(fd, events)
        except (LineError, OSError, ValueError):
            pass  # nobody is left who could be told: both ends find their sockets closed
        finally:
            for channel in list(self._channels.values()):
                self._close(channel)
            self._epoll.close()

    def feed(self, data: bytes) -> None:
        """What was read from the line before `run`."""
        self._in += data

    # -- waiting ------------------------------------------------------------------------------

    def _want(self, fd: int, events: int) -> None:
        """Wait for these; -1: not even for its end, which the kernel tells whether asked or not."""
        before = self._events.get(fd, -1)
        if before == events:
            return
        if events < 0:
            del self._events[fd]
            self._epoll.unregister(fd)
            return
        (self._epoll.register if before < 0 else self._epoll.modify)(fd, events)
        self._events[fd] = events

    def _watch(self, channel: Channel) -> None:
        for fd in {channel.source, channel.sink} - {-1}:
            events = 0
            if fd == channel.source and channel.room > 0:
                events |= select.EPOLLIN
            if fd == channel.sink and channel.has_waiting:
                events |= select.EPOLLOUT
            # A source that may not be read would go on saying that it has ended.
            self._want(fd, -1 if not events and fd == channel.source else events)

    def _ready(self, fd: int, events: int) -> None:
        if fd == self.line:
            self._read_line(events)
        elif fd == self.control.fileno():
            self._read_control()
        elif fd in self._by_fd:
            channel = self._by_fd[fd]
            gone = events & (select.EPOLLERR | select.EPOLLHUP)
            if fd == channel.sink and (events & select.EPOLLOUT or gone):
                self._drain(channel, failed=bool(gone))
            if fd == channel.source and events & (select.EPOLLIN | select.EPOLLHUP):
                self._read_source(channel)

    # -- the line -----------------------------------------------------------------------------

    def _put(self, kind: bytes, number: int, data: bytes) -> None:
        self._out += frame(kind, number, data)

    def _flush(self) -> None:
        while self._out:
            try:
                count = os.write(self.line, memoryview(self._out)[:_PIECE])
            except BlockingIOError:
                self._want(self.line, select.EPOLLIN | select.EPOLLOUT)
                return
            del self._out[:count]
        self._want(self.line, select.EPOLLIN)

    def _read_line(self, events: int) -> None:
        if events & select.EPOLLIN:
            try:
                data = os.read(self.line, _PIECE)
            except BlockingIOError:
                return
            if not data:
                self._over = True
                return
            self._in += data
            self._take_frames()
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._over = True

    def _take_frames(self) -> None:
        at = 0
        while len(self._in) - at >= _HEADER.size:
            kind, number, size = _HEADER.unpack_from(self._in, at)
            if self.is_host and size > _MOST_BYTES:
                raise LineError("a frame is too long")
            if len(self._in) - at - _HEADER.size < size:
                break
            at += _HEADER.size
            data = bytes(memoryview(self._in)[at : at + size])
            at += size
            self._take(kind, number, data)
        del self._in[:at]

    def _take(self, kind: bytes, number: int, data: bytes) -> None:
        if number == CONTROL:
            self._take_control(kind, data)
            return
        channel = self._channels.get(number)
        if channel is None:
            if number > self._last:
                raise LineError("a channel that never was")
            return  # it has ended here, and the other side could not know yet
        if kind == DATA:
            self._take_data(channel, data)
        elif kind == END:
            channel.ends = True
            self._drain(channel)
        elif kind == STOP:
            self._stop_reading(channel)
        elif kind == ROOM:
            channel.room += int(data)
            if channel.room > _WINDOW:
                raise LineError("more room than there is")
            self._watch(channel)
        else:
            raise LineError("an unknown kind of frame")

    def _take_control(self, kind: bytes, data: bytes) -> None:
        if kind == DATA and self.is_host:
            wire.send_raw(self.control, data)
        elif kind == MESSAGE and not self.is_host:
            self._take_message(data)
        elif kind == CLOCK and self.on_clock is not None:
            self.on_clock(int(data))
        else:
            raise LineError("an unknown kind of frame")

    def _take_data(self, channel: Channel, data: bytes) -> None:
        if channel.kind == _BLOB:
            os.write(channel.sink, data)
            return
        channel.allowed -= len(data)
        if channel.allowed < 0 or (channel.kind == _PACKETS and not data):
            raise LineError("more than there is room for")
        if channel.sink < 0:
            self._give_room(channel, len(data))
        elif channel.kind == _PACKETS:
            channel.packets.append(data)
            self._drain(channel)
        else:
            channel.waiting += data
            self._drain(channel)

    def _give_room(self, channel: Channel, count: int) -> None:
        channel.allowed += count
        if not channel.ends:
            self._put(ROOM, channel.number, b"%d" % count)

    # -- channels -----------------------------------------------------------------------------

    def _add(self, channel: Channel) -> None:
        self._channels[channel.number] = channel
        self._last = max(self._last, channel.number)
        if channel.kind == _BLOB:
            return
        for fd in {channel.source, channel.sink} - {-1}:
            os.set_blocking(fd, False)
            self._by_fd[fd] = channel
        self._watch(channel)

    def _read_source(self, channel: Channel) -> None:
        try:
            data = os.read(channel.source, min(_PIECE, max(1, channel.room)))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal whose last user is gone, a connection that was reset
        if not data:
            self._put(END, channel.number, b"")
            self._let_go_of_source(channel)
            return
        for blob in channel.beside:
            self._send_back(blob)
        channel.beside.clear()
        channel.room -= len(data)
        self._put(DATA, channel.number, data)
        self._watch(channel)

    def _drain(self, channel: Channel, *, failed: bool = False) -> None:
        """Pass on what came; when that was all, or nobody wants it, close."""
        if channel.kind == _BLOB:
            self._close(channel)
            return
        if channel.sink < 0:
            return
        count = 0
        try:
            if failed and channel.sink != channel.source:
                raise BrokenPipeError(errno.EPIPE, "nobody reads")
            while channel.packets:
                os.write(channel.sink, channel.packets[0])
                count += len(channel.packets.pop(0))
            while channel.waiting:
                written = os.write(channel.sink, channel.waiting)
                del channel.waiting[:written]
                count += written
        except BlockingIOError:
            pass
        except OSError:
            self._put(STOP, channel.number, b"")
            self._let_go_of_sink(channel)
            return
        if count:
            self._give_room(channel, count)
        if channel.ends and not channel.has_waiting:
            self._let_go_of_sink(channel)
        else:
            self._watch(channel)

    def _stop_reading(self, channel: Channel) -> None:
        if channel.source >= 0 and channel.kind != _BLOB:
            self._let_go_of_source(channel)

    def _let_go_of_source(self, channel: Channel) -> None:
        if channel.kind == _PACKETS or channel.sink < 0:
            self._close(channel)
            return
        channel.source = -1
        self._watch(channel)

    def _let_go_of_sink(self, channel: Channel) -> None:
        if channel.kind == _PACKETS or channel.source < 0:
            self._close(channel)
            return
        sock = wire.adopt(channel.sink)
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already
        sock.detach()
        channel.waiting.clear()
        channel.sink = -1
        self._watch(channel)

    def _close(self, channel: Channel) -> None:
        self._channels.pop(channel.number, None)
        for fd in {channel.source, channel.sink} - {-1}:
            if channel.kind != _BLOB:
                self._by_fd.pop(fd, None)
                self._want(fd, -1) if fd in self._events else None
            os.close(fd)
        channel.source = channel.sink = -1

    # -- requests, on the host ----------------------------------------------------------------

    def _read_control(self) -> None:
        data, fds = wire.receive_raw(self.control)
        if not data:
            self._over = True
        elif data[:1] == CLOCK:
            self._put(CLOCK, CONTROL, data[1:])
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

    def _opened(self, number: int, fd: int) -> tuple[Channel, bytes]:
        """What a descriptor of the host's is, by what the kernel says of it."""
        kind = os.fstat(fd).st_mode & 0o170000
        if kind == 0o100000:
            size = os.lseek(fd, 0, _SEEK_END)
            os.lseek(fd, 0, 0)
            return Channel(number, _BLOB, sink=fd), os.pread(fd, size, 0)
        if kind == 0o140000:
            sock = socket.socket(fileno=fd)
            is_stream = sock.type == socket.SOCK_STREAM
            sock.detach()
            return Channel(number, _BYTES if is_stream else _PACKETS, source=fd, sink=fd), b""
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            return Channel(number, _WRITE, sink=fd), b""
        return Channel(number, _READ, source=fd), b""

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
        blobs = [channel for channel in opened if channel.kind == _BLOB]
        reply = next((channel for channel in opened if channel.kind == _PACKETS), None)
        if reply is not None:
            reply.beside = blobs
        for channel in opened:
            self._add(channel)
        wire.send_raw(self.control, data[body:], theirs)
        for fd in theirs:
            os.close(fd)

    def _send_back(self, blob: Channel) -> None:
        """What was written into the likeness of a file, before anybody is told that it was."""
        at, size = blob.room, os.lseek(blob.sink, 0, _SEEK_END)
        while at < size:
            piece = os.pread(blob.sink, _PIECE, at)
            self._put(DATA, blob.number, piece)
            at += len(piece)
        self._put(END, blob.number, b"")
        self._close(blob)


def _likeness(number: int, kind: bytes, blob: bytes) -> tuple[Channel, int]:
    """Our end of a channel, and a descriptor for whom the request is for."""
    if kind == _BLOB:
        fd = os.memfd_create("request", os.MFD_CLOEXEC)
        os.write(fd, blob)
        os.lseek(fd, 0, 0)
        channel = Channel(number, kind, sink=os.dup(fd))
        channel.room = len(blob)  # what is beyond is the guest's
        return channel, fd
    if kind in (_PACKETS, _BYTES):
        how = socket.SOCK_SEQPACKET if kind == _PACKETS else socket.SOCK_STREAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, how | socket.SOCK_CLOEXEC)
        fd = ours.detach()
        return Channel(number, kind, source=fd, sink=fd), theirs.detach()
    read, write = os.pipe2(os.O_CLOEXEC)
    if kind == _READ:
        return Channel(number, kind, sink=write), read
    return Channel(number, kind, source=read), write
