"""Watches of directories, streamed or kept between two polls; bounded in number, events and time."""

from __future__ import annotations

import asyncio
import json
import posixpath
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from ..api.service import Service
from ..api.streaming.pipes import Running
from ..errors import RingfenceError, TimeoutExceeded
from ..model.base.jsonform import loads
from ..model.found import MOST_LINE_BYTES, FileChange
from ..sessions.live import Live
from .codec import RpcError

_READ_BYTES = 8 << 10
_MOST_EVENTS = 10_000  # of one watcher, between two polls
_MOST_NAMES = 1 << 20  # characters in them, those of entries included
_IDLE_S = 600.0  # that a watcher is kept for without being asked
_FLUSH_S = 2.0  # for a helper that is slow to tell what has happened already
_MARKS = "/run"  # a directory that is in every sandbox and that little opens
_GONE = ("EVENT_TYPE_REMOVE", "EVENT_TYPE_RENAME")
_KINDS = {  # without `written`: E2B tells nothing when a file is closed
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "attributes": "EVENT_TYPE_CHMOD",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved_from": "EVENT_TYPE_RENAME",
    "moved_to": "EVENT_TYPE_CREATE",
}


Look = Callable[[list[str]], dict[str, dict[str, Any]]]
"""Describes what is at these paths, as it is now; what is gone is left out."""


class Watch:
    """A watch by a helper inside, as E2B's events. `close` it.

    Args:
        look: Describes the entries of events; None: events have none.
    """

    def __init__(
        self, service: Service, live: Live, path: str, *, is_recursive: bool, look: Look | None
    ) -> None:
        self._service, self.live, self._path, self._look = service, live, path, look
        options = json.dumps({"recursive": is_recursive, "marks": _MARKS})
        self.marked, self._is_marked = asyncio.Event(), False
        self._helper = Running(service.thread_pools, live, "watch", path, options)
        self._stack, self._left, self._is_over = AsyncExitStack(), b"", False

    async def begin(self) -> None:
        """Start; what changes from now on is told.

        Raises:
            RingfenceError: It cannot be watched.
        """
        self._running = await self._stack.enter_async_context(self._helper)
        try:
            first = await self._running.read()
            if not first:
                await self._running.finish()
            self._early = self._events(first)
        except BaseException:
            await self._stack.aclose()
            raise

    async def next(self, wait_s: float) -> list[dict[str, Any]] | None:
        """Wait for changes: none within `wait_s` is an empty list, None that there is no more."""
        if self._early:
            early, self._early = self._early, []
            return await self._described(early)
        if self._is_over:
            return None
        try:
            data = await self._running.read(wait_s, _READ_BYTES)
        except TimeoutExceeded:
            return []
        if not data:
            self._is_over = True
            self.marked.set()
            return None
        events = await self._service.share.run(partial(self._events, data))
        return await self._described(events)

    async def _described(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the entries that were asked for; only then is what happened before a mark told."""
        if self._look is not None and found:
            there = {each["name"] for each in found if each["type"] not in _GONE}
            paths = {name: posixpath.join(self._path, name) for name in there}
            call = self._service.thread_pools.call
            known = await call(self._look, [*paths.values()], key=self.live.sandbox_id)
            for each in found:
                if entry := known.get(paths.get(each["name"], "")):
                    each["entry"] = entry
        if self._is_marked:
            self._is_marked = False
            self.marked.set()
        return found

    def _events(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._left = (self._left + data).split(b"\n")
        if len(self._left) > MOST_LINE_BYTES:
            raise RpcError("internal", "the helper inside sent a line that is too long")
        found = []
        for line in lines:
            if line.startswith(b'{"kind": "mark"'):
                self._is_marked = True
                continue
            change = FileChange.from_json(loads(line))
            if change.kind == "overflow":
                raise RpcError("resource_exhausted", "changes were lost: more came than was read")
            if kind := _KINDS.get(change.kind):
                name = posixpath.relpath(change.path, self._path)
                found.append({"name": name, "type": kind})
        return found

    async def mark(self) -> None:
        """Let the helper tell that it has told all that happened until now; `marked` is set by it."""
        self.marked.clear()
        call = self._service.thread_pools.call
        await call(self.live.inner.files.list, _MARKS, key=self.live.sandbox_id)

    async def close(self) -> None:
        await self._stack.aclose()


class _Watcher:
    """A watch and what it has told since it was last asked."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.events: deque[dict[str, Any]] = deque()
        self._bytes = 0  # of names and entries in `events`, which programs inside choose
        self.asked, self._lock = time.monotonic(), asyncio.Lock()
        self.task: asyncio.Task[None] | None = None

    async def flush(self) -> None:
        """Wait until what has happened by now has been told."""
        async with self._lock:
            with suppress(TimeoutError, RingfenceError, OSError):
                async with asyncio.timeout(_FLUSH_S):
                    await self.watch.mark()
                    await self.watch.marked.wait()

    async def follow(self) -> None:
        try:
            while (found := await self.watch.next(_IDLE_S / 4)) is not None:
                self._keep(found)
                if time.monotonic() > self.asked + _IDLE_S:
                    return
        except (RingfenceError, RpcError, OSError):
            pass  # its sandbox has ended
        finally:
            await self.watch.close()

    def _keep(self, found: list[dict[str, Any]]) -> None:
        self.events.extend(found)
        self._bytes += sum(map(_size, found))
        while self._bytes > _MOST_NAMES or len(self.events) > _MOST_EVENTS:
            self._bytes -= _size(self.events.popleft())

    def take(self) -> list[dict[str, Any]]:
        """Return the events, which are then forgotten."""
        self.asked = time.monotonic()
        found = [*self.events]
        self.events.clear()
        self._bytes = 0
        return found


def _size(event: dict[str, Any]) -> int:
    return len(event["name"]) + (len(json.dumps(event["entry"])) if "entry" in event else 0)


class Watchers:
    """Watches that are kept between two polls. They end with their sandbox, or unasked for."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[str, _Watcher] = {}

    async def add(self, watch: Watch) -> str:
        """Begin one; return its id.

        Raises:
            TooManyRequests: The sandbox has as many as it may.
        """
        await watch.begin()
        watcher, watcher_id = _Watcher(watch), secrets.token_hex(16)
        self._known[watcher_id] = watcher
        watcher.task = asyncio.ensure_future(watcher.follow())
        watcher.task.add_done_callback(lambda _task: self._known.pop(watcher_id, None))
        return watcher_id

    async def events(self, sandbox_id: str, watcher_id: str) -> list[dict[str, Any]]:
        """Return what has changed since the last time, whatever happened before this call included.

        Raises:
            RpcError: There is no such watcher.
        """
        watcher = self._need(sandbox_id, watcher_id)
        watcher.asked = time.monotonic()
        await watcher.flush()
        return watcher.take()

    async def remove(self, sandbox_id: str, watcher_id: str) -> None:
        """End one.

        Raises:
            RpcError: There is no such watcher.
        """
        watcher = self._need(sandbox_id, watcher_id)
        del self._known[watcher_id]
        if watcher.task is not None:
            watcher.task.cancel()

    def _need(self, sandbox_id: str, watcher_id: str) -> _Watcher:
        watcher = self._known.get(watcher_id)
        if watcher is None or watcher.watch.live.sandbox_id != sandbox_id:
            raise RpcError("not_found", f"watcher {watcher_id} not found")
        return watcher
