"""Background thread that drives every exec whose caller does not wait in a thread of its own."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from concurrent.futures import Future

from ..errors import SandboxLost
from ..model.execs.exec import ExecResult
from .pump import LONGEST_S, Pump


class Reactor:
    """epoll(7) in a daemon thread; started on first use."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pumps: dict[int, Pump] = {}
        self._events: dict[Pump, dict[int, int]] = {}
        self._futures: dict[Pump, Future[ExecResult]] = {}
        self._resting: set[Pump] = set()
        self._new: deque[tuple[Pump, Future[ExecResult]]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self.owner = os.getpid()
        self._lock, self._closing = threading.Lock(), False
        threading.Thread(target=self._run, name="ringfence-reactor", daemon=True).start()

    def drive(self, pump: Pump) -> Future[ExecResult]:
        """Take over `pump`; the future gets its result."""
        future: Future[ExecResult] = Future()
        future.set_running_or_notify_cancel()
        pump.may_rest = True
        self._new.append((pump, future))
        self._wake()
        return future

    def close(self) -> None:
        """End the thread once everything that it drives has ended.

        Precondition: `drive` is not called any more.
        """
        # Under the lock, else its descriptors could be closed, and their numbers reused, before it is woken.
        with self._lock:
            if not self._closing:  # a second time they may be closed already
                self._closing = True
                self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # it has been woken already

    def _run(self) -> None:
        while not self._is_over():
            events = self._epoll.poll(self._timeout_s())
            for fd, event in sorted(events, key=lambda item: self._is_end(item[0])):
                if fd == self._wake_read:
                    self._adopt()
                elif fd in self._pumps:
                    self._advance(self._pumps[fd], fd, event)
            self._expire()

    def _is_over(self) -> bool:
        """Return whether nothing is left to drive; then its descriptors are closed."""
        with self._lock:
            if not self._closing or self._futures or self._new:
                return False
            self._epoll.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            return True

    def _is_end(self, fd: int) -> bool:
        pump = self._pumps.get(fd)
        return pump is not None and pump.run.done == fd

    def _timeout_s(self) -> float | None:
        deadlines = [p.deadline for p in self._futures if p.deadline is not None]
        deadlines += [until for pump in self._resting for until in pump.resting.values()]
        return max(0.0, min(min(deadlines) - time.monotonic(), LONGEST_S)) if deadlines else None

    def _adopt(self) -> None:
        os.read(self._wake_read, 4096)
        while self._new:
            pump, future = self._new.popleft()
            self._futures[pump] = future
            self._events[pump] = {}
            try:
                self._sync(pump)
            except Exception as exc:  # noqa: BLE001  out of epoll watches, say: one must not end all
                self._fail(pump, exc)

    def _sync(self, pump: Pump) -> None:
        known = self._events[pump]
        for fd in known.keys() - pump.wants.keys():
            self._epoll.unregister(fd)
            del self._pumps[fd]
        for fd, events in pump.wants.items():
            if fd not in known:
                self._epoll.register(fd, events)
                self._pumps[fd] = pump
            elif known[fd] != events:
                self._epoll.modify(fd, events)
        self._events[pump] = dict(pump.wants)

    def _advance(self, pump: Pump, fd: int, event: int) -> None:
        try:
            # A descriptor must leave the epoll set before it is closed and its number reused.
            before = dict(pump.wants)
            if fd == pump.run.done or event & select.POLLOUT:
                self._forget_closing(pump, fd)
            if pump.ready(fd, event):
                future = self._finish(pump)
                try:
                    future.set_result(pump.result())
                except Exception as exc:  # noqa: BLE001  as below
                    future.set_exception(exc)
                return
            if pump.wants != before or self._events[pump] != pump.wants:
                self._sync(pump)
            if pump.resting:
                self._resting.add(pump)
        except Exception as exc:  # noqa: BLE001  whatever it is belongs to the one who waits
            self._fail(pump, exc)

    def _forget_closing(self, pump: Pump, fd: int) -> None:
        for known in list(self._events[pump]) if fd == pump.run.done else [fd]:
            self._epoll.unregister(known)
            del self._pumps[known]
            del self._events[pump][known]

    def _finish(self, pump: Pump) -> Future[ExecResult]:
        for fd in self._events.pop(pump, {}):
            self._epoll.unregister(fd)
            del self._pumps[fd]
        self._resting.discard(pump)
        return self._futures.pop(pump)

    def _fail(self, pump: Pump, exc: Exception) -> None:
        future = self._finish(pump)
        if not isinstance(exc, SandboxLost):
            pump.run.kill()
        pump.fail()
        future.set_exception(exc)

    def _expire(self) -> None:
        now = time.monotonic()
        for pump in [each for each in self._resting if each.rested(now)]:
            self._sync(pump)
            if not pump.resting:
                self._resting.discard(pump)
        for pump in [p for p in self._futures if p.deadline is not None and p.deadline <= now]:
            try:
                pump.passed_deadline()
            except SandboxLost as exc:
                self._fail(pump, exc)


_lock = threading.Lock()
_reactor: Reactor | None = None


def reactor() -> Reactor:
    """The reactor of this process; a forked child gets its own."""
    global _reactor
    with _lock:
        if _reactor is None or _reactor.owner != os.getpid():
            _reactor = Reactor()
        return _reactor
