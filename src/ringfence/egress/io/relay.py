"""Two connected sockets, joined: what arrives on one goes out on the other.

Bytes move by splice(2). Each direction ends by itself (half-close), moves a bounded amount per turn
of the loop, and stops when the meter says so.
"""

from __future__ import annotations

import _socket as socket
import os
import select

from ..meter import SPENT
from .streams import close_in_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..meter import Meter
    from .loop import Loop, Timer
    from .pipes import Pipe, Pipes

TURN_BYTES = 1 << 18  # one direction's share of a turn: two hundred of them wait for each other
_LITTLE_BYTES = 1 << 14
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_READS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITES = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class Relay:
    """Joins `client` and `server`, which are prepared; owns both from now on.

    Args:
        meter: Of the sandbox; asked before bytes are taken.
        on_end: Called once, with the reason of a break, or "" when both sides ended in order.

    Attributes:
        on_heard: Called once, when something of the server's has gone to the client.
    """

    def __init__(
        self,
        loop: Loop,
        pipes: Pipes,
        client: socket.socket,
        server: socket.socket,
        *,
        meter: Meter,
        idle_s: float,
        on_end: Callable[[str], None],
    ) -> None:
        self._loop, self._idle_s, self._on_end = loop, idle_s, on_end
        self.client, self.server = client, server
        self.out = Direction(self, loop, pipes, meter, client, server)
        self.back = Direction(self, loop, pipes, meter, server, client)
        self.is_over = False
        self._active_at = loop.now
        self._timer: Timer | None = None
        self._on_held: Callable[[], None] | None = None
        self.on_heard: Callable[[], None] | None = None

    def start(self, *, on_held: Callable[[], None] | None = None) -> None:
        """Begin.

        Args:
            on_held: With it, nothing of the client's is taken until `start_out`; it is called
                whenever there may be something of the client's to read.
        """
        self._on_held = on_held
        self.out.is_held = on_held is not None
        self._loop.watch(self.client.fileno(), self._on_client)
        self._loop.watch(self.server.fileno(), self._on_server)
        self._timer = self._loop.later(self._idle_s, self._check_idle)
        self.back.pump()
        self.out.pump()

    def start_out(self, prefix: bytes) -> None:
        """Take the client's bytes, too, after `prefix`, which was read from it already."""
        self.out.put(prefix)
        self.out.is_held = False
        self.out.pump()

    def hand_over(self, data: bytes) -> None:
        """Pass on what was read from the client while it is held, and nothing more."""
        self.out.put(data)
        self.out.pump_prefix()

    def release(self) -> bool:
        """Give both sockets up to the caller, unless something has passed already."""
        if self.is_over or self.back.count or self.back.pipe or self.back.is_done:
            return False
        self.is_over = True
        self._stop()
        return True

    def cut(self, reason: str) -> None:
        """Break off: both far ends see a reset."""
        self._finish(reason, abort=True)

    def moved(self) -> None:
        """Something got through, or a side ended."""
        self._active_at = self._loop.now
        if self.on_heard is not None and self.back.count:
            self._loop.soon(self.on_heard)
            self.on_heard = None

    def one_ended(self) -> None:
        """A direction is done; with the second one all is."""
        if self.out.is_done and self.back.is_done:
            self._finish("", abort=False)

    def _on_client(self, events: int) -> None:
        self._serve(events, self.out, self.back)
        if self.out.is_held and not self.is_over and self._on_held is not None:
            self._on_held()

    def _on_server(self, events: int) -> None:
        self._serve(events, self.back, self.out)

    def _serve(self, events: int, reads: Direction, writes: Direction) -> None:
        if events & select.EPOLLERR and reads.is_done:
            self.cut("the connection broke")  # nobody reads there any more: look no further
            return
        if events & _READS:
            if events & _ENDS:
                reads.is_ending = True
            reads.pump()
        if events & _WRITES and (writes.pipe is not None or writes.prefix):
            writes.pump()
            writes.pump_prefix()
            if not writes.prefix and writes.is_held and self._on_held is not None:
                self._on_held()

    def _check_idle(self) -> None:
        if self.is_over:
            return
        left_s = self._active_at + self._idle_s - self._loop.now
        if left_s <= 0:
            self.cut("idle for too long")
        else:
            self._timer = self._loop.later(left_s, self._check_idle)

    def _finish(self, reason: str, *, abort: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._stop()
        for sock in (self.client, self.server):
            if abort:
                sock.close()
            else:
                close_in_order(sock)
        self._on_end(reason)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for direction in (self.out, self.back):
            direction.stop()
        for sock in (self.client, self.server):
            self._loop.unwatch(sock.fileno())


class Direction:
    """Direction of the pair.

    Attributes:
        count: Bytes that went out.
        pipe: Held only while bytes wait in it.
        prefix: Sent before the source's data.
    """

    __slots__ = (
        "_again",
        "_loop",
        "_meter",
        "_pipes",
        "_relay",
        "_source",
        "_target",
        "_waits",
        "count",
        "is_done",
        "is_ending",
        "is_held",
        "pipe",
        "prefix",
    )

    def __init__(
        self,
        relay: Relay,
        loop: Loop,
        pipes: Pipes,
        meter: Meter,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        self._relay, self._loop, self._pipes, self._meter = relay, loop, pipes, meter
        self._source, self._target = source, target
        self.count = 0
        self.is_done = self.is_held = False
        self.is_ending = False  # there is an end behind what can be read
        self._waits = False  # for the meter
        self.pipe: Pipe | None = None
        self.prefix = b""
        self._again = False

    def put(self, data: bytes) -> None:
        """Let `data`, which was read from the source already, go out first."""
        self.prefix += data
        self._meter.count(len(data))

    def pump(self) -> None:
        """Move what can be moved now, up to this turn's share."""
        if self.is_done or self.is_held or self._relay.is_over:
            return
        try:
            self._pump()
        except OSError as exc:
            self._relay.cut(os.strerror(exc.errno or 0))

    def pump_prefix(self) -> None:
        """Send what goes out before the source's own, also while that is held."""
        if self.prefix and not self._relay.is_over:
            try:
                self._send_prefix()
            except OSError as exc:
                self._relay.cut(os.strerror(exc.errno or 0))

    def stop(self) -> None:
        """Give the pipe back."""
        self.is_done = True
        if self.pipe is not None:
            self._pipes.give_back(self.pipe)
            self.pipe = None

    def _pump(self) -> None:
        if self.prefix and not self._send_prefix():
            return
        left = TURN_BYTES
        if self.pipe is None:
            left -= self._pass_little()
            if left == TURN_BYTES:
                return
        while left > 0:
            if self.pipe is None:
                taken = self._take(left)
                if taken <= 0:
                    return
            taken = self._hand_on()
            if taken <= 0:
                return
            left -= taken
        if not self._again:
            self._again = True
            self._loop.soon(self._pump_again)

    def _pass_little(self) -> int:
        """Through our own memory: of a few bytes, two calls are cheaper than three.

        Returns:
            How many, if there may be more to move now; 0 if not.
        """
        most = self._ask(_LITTLE_BYTES)
        if most <= 0:
            return 0
        try:
            data = self._source.recv(most)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        self.put(data)
        # Less than was asked for: that was all, until the next event. Source: epoll(7).
        is_all = len(data) < most and not self.is_ending
        return len(data) if self._send_prefix() and not is_all else 0

    def _pump_again(self) -> None:
        self._again = False
        self.pump()

    def _send_prefix(self) -> bool:
        try:
            sent = self._target.send(self.prefix)
        except BlockingIOError:
            return False
        self.prefix = self.prefix[sent:]
        self.count += sent
        self._relay.moved()
        return not self.prefix

    def _take(self, most: int) -> int:
        """From the source into a pipe; 0: nothing can be had now, or ever."""
        most = self._ask(most)
        if most <= 0:
            return 0
        pipe = self._pipes.take()
        try:
            pipe.held = os.splice(self._source.fileno(), pipe.write_fd, most, flags=_FLAGS)
        except BlockingIOError:
            self._pipes.give_back(pipe)
            return 0
        except BaseException:
            self._pipes.give_back(pipe)
            raise
        if pipe.held == 0:
            self._pipes.give_back(pipe)
            self._end()
            return 0
        self._meter.count(pipe.held)
        self.pipe = pipe
        return pipe.held

    def _ask(self, most: int) -> int:
        """How much the meter lets us take; when nothing, it calls us later."""
        if self._waits:
            return 0
        granted = self._meter.grant(most, self._pump_later)
        if granted > 0:
            return granted
        if self._meter.is_spent:
            self._look_for_more()
        else:
            self._waits = True
        return 0

    def _pump_later(self) -> None:
        self._waits = False
        self.pump()

    def _hand_on(self) -> int:
        """From the pipe to the target; 0: it is full."""
        pipe = self.pipe
        assert pipe is not None
        try:
            sent = os.splice(pipe.read_fd, self._target.fileno(), pipe.held, flags=_FLAGS)
        except BlockingIOError:
            return 0
        pipe.held -= sent
        self.count += sent
        self._relay.moved()
        if pipe.held == 0:
            self._pipes.give_back(pipe)
            self.pipe = None
        return sent

    def _look_for_more(self) -> None:
        """Nothing may be moved any more: an end is let through, and anything else is cut."""
        try:
            more = self._source.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        if more:
            self._relay.cut(SPENT)
        else:
            self._end()

    def _end(self) -> None:
        """The source has nothing more to say."""
        self.is_done = True
        self._relay.moved()
        self._target.shutdown(socket.SHUT_WR)
        self._relay.one_ended()
