"""Many channels over one serial link: data from one end of a channel comes out at the other.

A side may send so much on a channel as the other has room for, and gets more room as what came is
passed on: one stalled reader stops nobody else.
"""

from __future__ import annotations

import _struct as struct
import errno
import os
import select
import socket

from .. import wire
from .channel import BLOB, PACKETS, WINDOW, WRITE, Channel, Held
from .line import CONTROL, DATA, END, LAST, PIECE, ROOM, STOP, Line, LineError

_FIONREAD = 0x541B  # termios is not in every interpreter of ours
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # include/uapi/linux/fcntl.h
_MOST_IN_PIPE = 1 << 20  # bytes, and what an ordinary user may have: /proc/sys/fs/pipe-max-size
_SLACK = 1 << 16  # a page of a pipe that was read in part holds less


class LineEnd(Line):
    """Side of a serial link with channels; see `Line`."""

    def __init__(self, line: int, *, is_host: bool) -> None:
        super().__init__(line, is_host=is_host)
        self._channels: dict[int, Channel] = {}
        self._by_fd: dict[int, Channel] = {}
        self._last = CONTROL
        self._held: dict[Channel, Held] = {}

    def _between(self) -> None:
        for channel in [channel for channel, held in self._held.items() if held.is_over()]:
            del self._held[channel]
            if channel.packets or channel.ends:
                self._drain(channel)
            else:
                self._pass_on(channel)

    def _close_all(self) -> None:
        for channel in list(self._channels.values()):
            self._close(channel)

    def _watch(self, channel: Channel) -> None:
        is_free = channel not in self._held
        for fd in {channel.source, channel.sink} - {-1}:
            events = 0
            if fd == channel.source and channel.room > 0 and is_free:
                events |= select.EPOLLIN
            if fd == channel.sink and channel.has_waiting and is_free:
                events |= select.EPOLLOUT
            # A source that may not be read would go on saying that it has ended.
            self._want(fd, -1 if not events and fd == channel.source else events)

    def _ready_other(self, fd: int, events: int) -> None:
        channel = self._by_fd.get(fd)
        if channel is None:
            return
        gone = events & (select.EPOLLERR | select.EPOLLHUP)
        if fd == channel.sink and (events & select.EPOLLOUT or gone):
            self._drain(channel, failed=bool(gone))
        if fd == channel.source and events & (select.EPOLLIN | select.EPOLLHUP):
            self._read_source(channel)

    # -- what comes ---------------------------------------------------------------------------

    def _take(self, kind: bytes, number: int, data: bytes) -> None:
        if number == CONTROL:
            self._take_control(kind, data)
            return
        channel = self._channels.get(number)
        if channel is None:
            self._take_unknown(kind, number, data)
            return
        if kind == DATA:
            self._take_data(channel, data)
        elif kind == END:
            channel.ends = True
            self._drain(channel)
        elif kind == STOP:
            self._stop_reading(channel)
        elif kind == LAST and self.is_host:
            self._make_room(channel, int(data))
        elif kind == ROOM:
            channel.room += int(data)
            if channel.room > WINDOW:
                raise LineError("more room than there is")
            self._watch(channel)
        else:
            self._take_other(channel, kind)

    def _take_control(self, kind: bytes, data: bytes) -> None:
        raise NotImplementedError

    def _take_unknown(self, kind: bytes, number: int, data: bytes) -> None:
        del kind, data
        if number > self._last:
            raise LineError("a channel that never was")
        # It has ended here, and the other side could not know yet.

    def _take_other(self, channel: Channel, kind: bytes) -> None:
        raise LineError(f"an unknown kind of frame on channel {channel.number}: {kind!r}")

    def _take_data(self, channel: Channel, data: bytes) -> None:
        if channel.kind == BLOB:
            os.write(channel.sink, data)
            return
        channel.allowed -= len(data)
        if channel.allowed < 0 or (channel.kind == PACKETS and not data):
            raise LineError("more than there is room for")
        if channel.sink < 0:
            self._give_room(channel, len(data))
        elif channel.kind == PACKETS:
            channel.packets.append(data)
            for out in channel.outputs:
                if out.waiting:
                    self._make_room(out, 0)
            self._hold(channel, [(out, out.passed + len(out.waiting)) for out in channel.outputs])
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
        if channel.kind == BLOB:
            return
        for fd in {channel.source, channel.sink} - {-1}:
            os.set_blocking(fd, False)
            self._by_fd[fd] = channel
        self._watch(channel)

    def _hold(self, channel: Channel, due: list[tuple[Channel, int]]) -> bool:
        """Let what it says wait for so many bytes of others; whether it has to."""
        held = Held(due, is_host=self.is_host)
        if held.is_over():
            return False
        self._held[channel] = held
        self._watch(channel)
        if not self.is_host:
            for out, count in due:
                if count - out.passed > out.room:
                    self._put(LAST, out.number, b"%d" % (count - out.passed))
        return True

    def _make_room(self, out: Channel, count: int) -> None:
        """Let a pipe that nobody reads hold all that is left of a process's output.

        Args:
            count: Bytes that are still to come; what a guest says.
        """
        if count < 0:
            raise LineError("less than none")
        if out.kind != WRITE or out.sink < 0:
            return
        import fcntl

        wanted = min(_unread(out.sink) + len(out.waiting) + count + _SLACK, _MOST_IN_PIPE)
        try:
            if wanted > fcntl.fcntl(out.sink, _F_GETPIPE_SZ):
                fcntl.fcntl(out.sink, _F_SETPIPE_SZ, wanted)
        except OSError:
            return  # this user's share is used up: it waits until somebody reads
        self._drain(out)

    def _read_source(self, channel: Channel) -> None:
        if channel in self._held:
            return
        due = [
            (out, out.passed + _unread(out.source)) for out in channel.outputs if out.source >= 0
        ]
        if not self._hold(channel, due):
            self._pass_on(channel)

    def _pass_on(self, channel: Channel) -> None:
        if channel.source < 0:
            return
        try:
            data = os.read(channel.source, min(PIECE, max(1, channel.room)))
        except BlockingIOError:
            return
        except OSError:
            if self._broke(channel):
                return
            data = b""  # a terminal whose last user is gone, a connection that was reset
        if not data:
            self._put(END, channel.number, b"")
            self._let_go_of_source(channel)
            return
        for blob in channel.beside:
            self._send_back(blob)
        channel.beside.clear()
        channel.room -= len(data)
        channel.passed += len(data)
        self._put(DATA, channel.number, data)
        self._watch(channel)

    def _drain(self, channel: Channel, *, failed: bool = False) -> None:
        """Pass on what came; when that was all, or nobody wants it, close."""
        if channel.kind == BLOB:
            self._close(channel)
            return
        if channel.sink < 0 or channel in self._held:
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
            if not self._broke(channel):
                self._put(STOP, channel.number, b"")
                self._let_go_of_sink(channel)
            return
        if count:
            channel.passed += count
            self._give_room(channel, count)
        if channel.ends and not channel.has_waiting:
            self._let_go_of_sink(channel)
        else:
            self._watch(channel)

    def _broke(self, channel: Channel) -> bool:
        """Our end is gone, and did not just end; returns whether no more is to be done about it."""
        del channel
        return False

    def _send_back(self, blob: Channel) -> None:
        """Send back the data written to the copy of a file, before anyone is told of the write."""
        raise NotImplementedError

    def _stop_reading(self, channel: Channel) -> None:
        if channel.source >= 0 and channel.kind != BLOB:
            self._let_go_of_source(channel)

    def _let_go_of_source(self, channel: Channel) -> None:
        if channel.kind == PACKETS or channel.sink < 0:
            self._end(channel)
            return
        channel.source = -1
        self._watch(channel)

    def _let_go_of_sink(self, channel: Channel) -> None:
        if channel.kind == PACKETS or channel.source < 0:
            self._end(channel)
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

    def _end(self, channel: Channel) -> None:
        self._close(channel)

    def _close(self, channel: Channel) -> None:
        self._channels.pop(channel.number, None)
        self._held.pop(channel, None)
        for fd in {channel.source, channel.sink} - {-1}:
            if channel.kind != BLOB:
                self._by_fd.pop(fd, None)
                self._want(fd, -1) if fd in self._events else None
            os.close(fd)
        channel.source = channel.sink = -1


def _unread(fd: int) -> int:
    """Bytes that can be read from a pipe or a socket."""
    import fcntl

    count: int = struct.unpack("i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))[0]
    return count
