"""Output that is kept within a bound: the head and the tail, and a true count of what lies between."""

from __future__ import annotations

from _thread import allocate_lock

from ..model.base.helpful import helpful

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from concurrent.futures import Future

DEFAULT_OUTPUT_BYTES = 4 << 20


@helpful
class Stream:
    """Output of a process on one stream, at most `limit` bytes of it.

    A reader never slows the process down: bytes overwritten before they were read are skipped and
    counted in `missed_bytes`. Use `on_stdout` to get every byte. Thread-safe.
    """

    def __init__(self, limit: int = DEFAULT_OUTPUT_BYTES) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()  # the last bytes; trimmed when twice too long
        self._total = 0
        self._read = self._missed = 0
        self._closed = False
        self._lock = allocate_lock()
        # Once somebody waits in `read`: few execs have a reader.
        self._changed: threading.Condition | None = None
        self._waiting: list[Future[None]] = []

    def feed(self, data: bytes | memoryview) -> None:
        """Add what was just read from the pipe."""
        with self._lock:
            self._total += len(data)
            room = self._head_limit - len(self._head)
            if room > 0:
                self._head += data[:room]
                data = data[room:]
            if data and self._tail_limit:
                self._tail += data[-self._tail_limit :]
                if len(self._tail) >= 2 * self._tail_limit:
                    del self._tail[: -self._tail_limit]
            waiting = self._wake()
        _tell(waiting)

    def close(self) -> None:
        """Nothing more will come; idempotent."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            waiting = self._wake()
        _tell(waiting)

    def _wake(self) -> list[Future[None]]:
        """Whoever waits in `read`; the others are returned. Precondition: the lock is ours."""
        if self._changed is not None:
            self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        return waiting

    def readable(self) -> Future[None]:
        """Done once `read` would not wait."""
        from concurrent.futures import Future  # half of what importing this room would cost

        future: Future[None] = Future()
        with self._lock:
            if self._read >= self._total and not self._closed:
                self._waiting = [f for f in self._waiting if not f.done()]
                self._waiting.append(future)
                return future
        future.set_result(None)
        return future

    @property
    def dropped_bytes(self) -> int:
        """How many bytes between head and tail were not kept."""
        return self._total - len(self._head) - min(len(self._tail), self._tail_limit)

    @property
    def missed_bytes(self) -> int:
        """Bytes missing between those that were read: overwritten before the read."""
        return self._missed

    def getvalue(self) -> bytes:
        """Head and tail, joined."""
        with self._lock:
            if not self._tail:
                return bytes(self._head)
            tail = memoryview(self._tail)[max(0, len(self._tail) - self._tail_limit) :]
            return b"".join((self._head, tail))

    def read(self, timeout_s: float | None = None) -> bytes:
        """Read the bytes that arrived since the last read; wait for the first; empty at the end of
        the stream.

        Raises:
            TimeoutError: Nothing came within `timeout_s` seconds.
        """
        with self._lock:
            if self._changed is None:
                from threading import Condition

                self._changed = Condition(self._lock)
            if not self._changed.wait_for(
                lambda: self._read < self._total or self._closed, timeout_s
            ):
                raise TimeoutError(f"no output within {timeout_s} s")
            head = bytes(self._head[self._read :]) if self._read < len(self._head) else b""
            kept = min(len(self._tail), self._tail_limit)
            wanted = self._total - max(self._read, len(self._head))
            tail = (
                bytes(self._tail[len(self._tail) - min(wanted, kept) :])
                if kept and wanted > 0
                else b""
            )
            self._missed += self._total - self._read - len(head) - len(tail)
            self._read = self._total
            return head + tail

    def __iter__(self) -> Iterator[bytes]:
        """Chunks until the end."""
        while chunk := self.read():
            yield chunk

    def lines(self) -> Iterator[str]:
        """Text lines, without their newline, bad bytes replaced."""
        rest = b""
        for chunk in self:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")


def _tell(waiting: list[Future[None]]) -> None:
    for future in waiting:
        if future.set_running_or_notify_cancel():  # else it was cancelled meanwhile
            future.set_result(None)
