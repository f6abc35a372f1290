"""Names to addresses, as the host resolves them: getaddrinfo(3) in threads of our own.

The system's resolver blocks for as long as it likes, so each sandbox has a share of the threads and
a queue of its own: one that asks for names that never answer makes only itself wait.
"""

from __future__ import annotations

import _socket as socket
import os
from _collections import deque
from _queue import SimpleQueue
from _thread import allocate_lock, stack_size, start_new_thread
from time import monotonic

from ..io.loop import current, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..io.loop import Loop, Task

MOST_THREADS = 32
_SHARE = 8  # threads that one sandbox may have at most
_MOST_WAITING = 1024  # names that one sandbox may have waiting
_FRESH_S = 2.0  # an answer serves a burst of connections; each judges it anew
_MOST_KEPT = 1024
_MOST_ADDRESSES = 16  # of one name
_STACK_BYTES = 512 << 10

Found = tuple[tuple[int, str], ...]  # (family, address as text), best first


class _Lookup:
    """Resolution of a name for a sandbox; several connections may wait for it."""

    __slots__ = ("error", "found", "is_done", "name", "sandbox_id", "waiting")

    def __init__(self, sandbox_id: str, name: str) -> None:
        self.sandbox_id, self.name = sandbox_id, name
        self.found: Found = ()
        self.error = ""
        self.is_done = False
        self.waiting: list[Task] = []


class Resolver:
    """Of the whole process.

    Args:
        look_up: For tests; else the system's.
    """

    def __init__(self, loop: Loop, look_up: Callable[[str], Found] | None = None) -> None:
        self._loop = loop
        self._look_up = look_up or system_look_up
        # Both ends of the way to the threads and back; they touch nothing else.
        self._ready: SimpleQueue[_Lookup | None] = SimpleQueue()
        self._finished: SimpleQueue[_Lookup] = SimpleQueue()
        self._threads = 0
        self._ending = allocate_lock()
        self._queues: dict[str, deque[_Lookup]] = {}  # by sandbox, in the order of their turns
        self._running: dict[str, int] = {}
        self._lookups: dict[tuple[str, str], _Lookup] = {}
        self._kept: dict[tuple[str, str], tuple[float, Found]] = {}  # oldest first
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.watch(self._event, self._on_finished)

    async def resolve(self, sandbox_id: str, name: str) -> Found:
        """The addresses of `name`; a `loop.Deadline` around it ends the wait.

        Raises:
            OSError: It has none, or cannot be resolved now.
        """
        key = sandbox_id, name
        kept = self._kept.get(key)
        if kept is not None and monotonic() - kept[0] < _FRESH_S:
            return kept[1]
        lookup = self._lookups.get(key) or self._begin(key)
        task = current()
        lookup.waiting.append(task)
        try:
            while not lookup.is_done:
                await pause()
        finally:
            lookup.waiting.remove(task)
            if not lookup.waiting and not lookup.is_done:
                self._withdraw(lookup)
        if lookup.error:
            raise OSError(lookup.error)
        return lookup.found

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone, or its policy changed: keep no answer of its."""
        for key in [key for key in self._kept if key[0] == sandbox_id]:
            del self._kept[key]

    def close(self) -> None:
        """Let the threads end; the last closes what they write to. One inside getaddrinfo cannot be ended."""
        self._loop.unwatch(self._event)
        threads = self._threads  # fewer from the first that is told
        for _ in range(threads):
            self._ready.put(None)
        if not threads:
            os.close(self._event)

    # -- turns --------------------------------------------------------------------------------

    def _begin(self, key: tuple[str, str]) -> _Lookup:
        queue = self._queues.setdefault(key[0], deque())
        if len(queue) >= _MOST_WAITING:
            raise OSError("too many names wait to be resolved")
        lookup = self._lookups[key] = _Lookup(*key)
        queue.append(lookup)
        self._hand_out()
        return lookup

    def _withdraw(self, lookup: _Lookup) -> None:
        """Cancel a lookup without waiters. Once a thread has it, it keeps its place until answered."""
        queue = self._queues.get(lookup.sandbox_id)
        if queue is not None and lookup in queue:
            queue.remove(lookup)
            self._lookups.pop((lookup.sandbox_id, lookup.name), None)

    def _hand_out(self) -> None:
        """Give each sandbox in turn a thread, as long as there are any and it has not its share."""
        moved = True
        while moved:
            moved = False
            for sandbox_id in list(self._queues):
                if self._may_run(sandbox_id):
                    moved = True
                    self._start(sandbox_id)

    def _may_run(self, sandbox_id: str) -> bool:
        queue = self._queues[sandbox_id]
        if not queue:
            del self._queues[sandbox_id]
            return False
        running = self._running.get(sandbox_id, 0)
        total = sum(self._running.values())
        # The last threads are for sandboxes that have none.
        return total < MOST_THREADS and running < min(_SHARE, 1 + (MOST_THREADS - total) // 4)

    def _start(self, sandbox_id: str) -> None:
        queue = self._queues.pop(sandbox_id)
        lookup = queue.popleft()
        if queue:
            self._queues[sandbox_id] = queue  # behind the others
        self._running[sandbox_id] = self._running.get(sandbox_id, 0) + 1
        if sum(self._running.values()) > self._threads:
            self._threads += 1
            before = stack_size(_STACK_BYTES)
            start_new_thread(self._serve, ())
            stack_size(before)
        self._ready.put(lookup)

    def _on_finished(self, _events: int) -> None:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        while not self._finished.empty():
            self._settle(self._finished.get())
        self._hand_out()

    def _settle(self, lookup: _Lookup) -> None:
        key = lookup.sandbox_id, lookup.name
        self._lookups.pop(key, None)
        self._running[lookup.sandbox_id] -= 1
        if not self._running[lookup.sandbox_id]:
            del self._running[lookup.sandbox_id]
        lookup.is_done = True
        if lookup.found:
            self._kept.pop(key, None)
            self._kept[key] = monotonic(), lookup.found
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        for task in lookup.waiting:
            task.wake()

    # -- in the threads -----------------------------------------------------------------------

    def _serve(self) -> None:
        while (lookup := self._ready.get()) is not None:
            try:
                lookup.found = self._look_up(lookup.name)
                lookup.error = "" if lookup.found else "the name has no address"
            except Exception as exc:  # noqa: BLE001  whatever it is, the others go on
                lookup.error = str(exc.args[-1]) if exc.args else type(exc).__name__
            self._finished.put(lookup)
            os.eventfd_write(self._event, 1)
        with self._ending:
            self._threads -= 1
            is_last = not self._threads
        if is_last:
            os.close(self._event)


def system_look_up(name: str) -> Found:
    # Bytes: text would be encoded with IDNA once more, by a module that is imported for that.
    answers = socket.getaddrinfo(name.encode("ascii"), None, 0, socket.SOCK_STREAM)
    found = dict.fromkeys((answer[0], str(answer[4][0])) for answer in answers)
    return tuple(found)[:_MOST_ADDRESSES]
