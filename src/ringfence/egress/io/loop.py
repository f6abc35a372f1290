"""The event loop of the egress process: epoll, timers, and coroutines that wait for both.

Not asyncio: importing that takes 37 ms and 9.5 MB of a process that every host process pays for,
and each of its turns costs a new connection what ten system calls do.

Descriptors are watched edge-triggered, once, for reading and writing. So whoever watches one tries
first and waits only after EAGAIN, and may be woken for nothing.
"""

from __future__ import annotations

import heapq
import select
from _collections import deque  # the C half: `collections` is not needed
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any, Self, TypeVar

    T = TypeVar("T")
    U = TypeVar("U")

_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_BATCH = 256  # events taken from the kernel at once
_MOST_CANCELLED = 512


class Cancelled(BaseException):
    """Thrown into a task that shall end."""


def _raise(error: BaseException) -> None:
    raise error


def _ignore() -> None:
    pass


class Timer:
    """Something to be called at a time, unless it is cancelled."""

    __slots__ = ("_loop", "call", "when")

    def __init__(self, loop: Loop, when: float, call: Callable[[], None]) -> None:
        self._loop = loop
        self.when = when
        self.call: Callable[[], None] | None = call

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        """Not call it; what it refers to is free at once."""
        if self.call is not None:
            self.call = None
            self._loop._cancelled += 1


class Loop:
    """Runs what is ready, in turns; single-threaded.

    Attributes:
        now: `time.monotonic()` at the start of this turn.
        on_fault: Told of an exception that a handler or a task let through.
    """

    def __init__(self) -> None:
        self.now = monotonic()
        self.on_fault: Callable[[BaseException], None] = _raise
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[Timer] = []
        self._cancelled = 0  # of them, about
        self._stopped = False

    # -- descriptors ------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever something new happens to `fd`."""
        known = fd in self._handlers
        self._handlers[fd] = handler
        if not known:
            self._epoll.register(fd, _EVENTS)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`. To be called before closing it: epoll itself keeps what has duplicates."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # -- calls and tasks ----------------------------------------------------------------------

    def soon(self, call: Callable[[], None]) -> None:
        """Call it in the next turn, after those that wait already."""
        self._soon.append(call)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self, monotonic() + delay_s, call)
        heapq.heappush(self._timers, timer)
        if self._cancelled > max(_MOST_CANCELLED, len(self._timers) // 2):
            self._sweep()
        return timer

    def _sweep(self) -> None:
        """Drop what was cancelled: the limit of ten minutes of a connection that took one."""
        self._timers = [timer for timer in self._timers if timer.call is not None]
        heapq.heapify(self._timers)
        self._cancelled = 0

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """Run a coroutine; its first step is taken at once."""
        task = Task(self, coroutine)
        task.step()
        return task

    # -- running ------------------------------------------------------------------------------

    def run(self) -> None:
        global _running
        before, _running = _running, self
        try:
            while not self._stopped:
                self.turn()
        finally:
            _running = before
            self._stopped = False

    def stop(self) -> None:
        """Let `run` return after this turn."""
        self._stopped = True

    def run_until_done(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and everything else meanwhile: for tests and tools."""
        global _running
        before, _running = _running, self
        try:
            task = Task(self, coroutine)
            task.on_done = _ignore  # no fault to be told of: its result is asked for
            task.step()
            while not task.done:
                self.turn()
            result: T = task.result()
            return result
        finally:
            _running = before

    def turn(self) -> None:
        """Wait for something to do, then do what is ready now."""
        for fd, events in self._epoll.poll(self._patience_s(), _BATCH):
            handler = self._handlers.get(fd)
            if handler is not None:
                self._run(handler, events)
        self.now = monotonic()
        while self._timers and self._timers[0].when <= self.now:
            timer = heapq.heappop(self._timers)
            if timer.call is not None:
                call, timer.call = timer.call, None
                self._run(call)
        for _ in range(len(self._soon)):
            self._run(self._soon.popleft())

    def close(self) -> None:
        self._epoll.close()

    def _patience_s(self) -> float:
        if self._soon:
            return 0
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return max(0.0, self._timers[0].when - monotonic())

    def _run(self, call: Callable[..., None], *args: int) -> None:
        try:
            call(*args)
        except Exception as exc:  # noqa: BLE001  one connection's fault is not the others'
            self.on_fault(exc)


class Task:
    """A coroutine on its way.

    It waits with `await pause()`, after telling somebody to `wake` it, and looks again then: it may
    have been woken for nothing.
    """

    __slots__ = ("_coroutine", "_error", "_ready", "_result", "done", "loop", "on_done")

    def __init__(self, loop: Loop, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.loop = loop
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self._coroutine = coroutine
        self._error: BaseException | None = None  # to be thrown in with the next step
        self._result: Any = None
        self._ready = False

    def wake(self) -> None:
        """Let it go on, in the next turn."""
        if not self._ready and not self.done:
            self._ready = True
            self.loop.soon(self.step)

    def interrupt(self, error: BaseException) -> None:
        """Let it go on with an exception; the first one counts, but for `cancel`."""
        if self._error is None:
            self._error = error
        self.wake()

    def cancel(self) -> None:
        """End it: `Cancelled` is thrown where it waits."""
        if not self.done:
            self._error = Cancelled()
            self.wake()

    def forgive(self, error: BaseException) -> None:
        """Take back an interruption that was not thrown yet."""
        if self._error is error:
            self._error = None

    @property
    def error(self) -> BaseException | None:
        """The exception that ended it; None while it runs, or when it returned."""
        return self._error if self.done else None

    def result(self) -> Any:
        """Return its result, or raise its exception.

        Precondition: it is done.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def step(self) -> None:
        """Run it to where it waits next."""
        if self.done:
            return
        self._ready = False
        error, self._error = self._error, None
        global _current
        before, _current = _current, self
        try:
            if error is None:
                self._coroutine.send(None)
            else:
                self._coroutine.throw(error)
        except StopIteration as exc:
            self._end(exc.value, None)
        except BaseException as exc:  # noqa: BLE001  kept for whoever asks for the result
            self._end(None, exc)
        finally:
            _current = before

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.done = True
        self._result, self._error = result, error
        if self.on_done is not None:
            self.on_done()
        elif error is not None and not isinstance(error, Cancelled):
            self.loop.on_fault(error)


class _Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield


_PAUSE = _Pause()
_running: Loop | None = None
_current: Task | None = None


def running() -> Loop:
    if _current is not None:
        return _current.loop
    if _running is None:
        raise RuntimeError("no loop runs")
    return _running


def current() -> Task:
    if _current is None:
        raise RuntimeError("not in a task")
    return _current


def pause() -> _Pause:
    """`await pause()`: wait to be woken."""
    return _PAUSE


async def sleep(seconds: float) -> None:
    task = current()
    until = monotonic() + seconds
    timer = task.loop.later(seconds, task.wake)
    try:
        while monotonic() < until:
            await pause()
    finally:
        timer.cancel()


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Run two coroutines at the same time, to their ends.

    An exception of one ends the other, too, and is raised once both have ended.
    """
    parent = current()
    one, two = Task(parent.loop, first), Task(parent.loop, second)
    for task in (one, two):
        task.on_done = parent.wake
        task.step()
    error: BaseException | None = None
    while not (one.done and two.done):
        error = error or one.error or two.error
        if error is not None:
            one.cancel()
            two.cancel()
        try:
            await pause()
        except BaseException as exc:  # noqa: BLE001  raised once both have ended
            error = error or exc
    for failed in (error, one.error, two.error):
        if failed is not None:
            raise failed
    return one.result(), two.result()


class Deadline:
    """`with Deadline(seconds):` raises TimeoutError in the task when the time is up.

    None is no limit. Deadlines nest: the one that is reached is the one that raises.
    """

    __slots__ = ("_error", "_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: Timer | None = None
        self.expired = False

    def __enter__(self) -> Self:
        self._task = current()
        self._error = Cancelled()
        if self._seconds is not None:
            self._timer = self._task.loop.later(self._seconds, self._expire)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task.forgive(self._error)
        if error is self._error:
            raise TimeoutError(f"nothing for {self._seconds} s") from None

    def _expire(self) -> None:
        self.expired = True
        self._task.interrupt(self._error)
