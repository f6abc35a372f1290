"""Requests to E2B's API as its routes see them, and the errors that they answer with."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from ..api.access.caller import Caller
from ..api.bodies import SHORT
from ..api.service import Service
from ..api.thread_pools import PARSING
from ..execs.execs import Execs
from ..model.client_session import SessionState
from ..sessions.live import Live
from .codec import Inflate, inflated, json_object
from .metering import Meter
from .notes import Notes, notes_of, write_files
from .settings import IDENTITY, E2BSettings
from .tokens import Tokens
from .watchers import Watchers

_TOO_LARGE = 413
logger = logging.getLogger("ringfence.e2b")


class ApiError(Exception):
    """An answer in E2B's form: its status and the text that its clients look at."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.form = {"code": status, "message": message, **more}
        self.status = status


class Shared:
    """State of E2B's API. Of one event loop.

    Attributes:
        tags: Tag and environment of each exec that runs, as its client named them.
        pids: Number inside of each exec that runs and was asked for it.
        began: Wall time at which it was made.
        ahead_s: How far the wall clock is ahead of the one that deadlines are counted by.
    """

    def __init__(self, service: Service, execs: Execs, settings: E2BSettings) -> None:
        self.service, self.execs, self.settings = service, execs, settings
        self.tokens = Tokens(service.manager.store.directory)
        self.watchers, self.meter = Watchers(service), Meter(service)
        self.tags: dict[str, tuple[str, dict[str, str]]] = {}
        self.pids: dict[str, int] = {}
        self.began = time.time()
        self.ahead_s = service.manager.clock.ahead_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._introduced: dict[str, asyncio.Future[None]] = {}

    def introduce(self, live: Live) -> None:
        """Begin to write the files that tell programs inside which sandbox they are in.

        They take milliseconds that the client needs anyway to receive its sandbox.
        """
        if live.state != SessionState.ACTIVE:  # found by its key, it may be paused
            return
        name = live.sandbox_id
        writing = self.service.thread_pools.call(write_files, live, key=name)
        begun = self._introduced[name] = asyncio.ensure_future(writing)

        def end(done: asyncio.Future[None]) -> None:
            if self._introduced.get(name) is done:
                del self._introduced[name]
            if not done.cancelled() and (exc := done.exception()) is not None:
                logger.warning("the files in %s of %s were not written: %s", IDENTITY, name, exc)

        begun.add_done_callback(end)

    async def introduced(self, live: Live) -> None:
        """Wait until the files are written, where they are being so."""
        if begun := self._introduced.get(live.sandbox_id):
            await asyncio.wait([begun])

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of this name; it lives for as long as it is held or waited for."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


@dataclass
class Call:
    """A request that was let in.

    Attributes:
        live: The sandbox that it is about, where it is about its processes, files or ports.
        params: Parts of the path.
    """

    shared: Shared
    request: Request
    caller: Caller
    live: Live | None = None
    params: dict[str, str] = field(default_factory=dict)

    @property
    def service(self) -> Service:
        """The state that it shares with `/v1`."""
        return self.shared.service

    @property
    def inside(self) -> Live:
        assert self.live is not None  # the door has looked for it
        return self.live

    @cached_property
    def notes(self) -> Notes:
        """Notes of E2B: what it knows of the sandbox beside what `/v1` does."""
        return notes_of(self.inside.metadata)

    async def call(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call it in a thread, with at most a few others for the same sandbox."""
        key = self.live.sandbox_id if self.live else ""
        return await self.service.thread_pools.call(function, *args, key=key, **more)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body, uncompressed, however long."""
        inflate = None
        if (encoding := self.request.headers.get("content-encoding", "identity")) == "gzip":
            inflate = Inflate()
        elif encoding != "identity":
            raise ApiError(415, f"unsupported content encoding: {encoding}")
        async for data in self.request.stream():
            if inflate is None:
                yield data
                continue
            pieces = inflate.pieces(data)
            while piece := await self.service.share.run(partial(next, pieces, b""), 0.0):
                yield piece
        if inflate is not None and not inflate.is_whole:
            raise ApiError(400, "the compressed body broke off")

    async def form(self) -> dict[str, Any]:
        """Read the body as a JSON object, bounded also where it is compressed."""
        text, most = bytearray(), self.service.admission.bounds.body_bytes
        async for data in self.stream():
            text += data
            if len(text) > most:
                raise ApiError(_TOO_LARGE, f"the body is larger than {most} bytes")
        return await self.read(bytes(text))

    async def read(self, text: bytes, *, is_compressed: bool = False) -> dict[str, Any]:
        """Read a JSON object, a long one in a thread that lets the event loop go on."""
        if len(text) <= SHORT and not is_compressed:
            return json_object(text)

        def read() -> dict[str, Any]:
            return json_object(inflated(text) if is_compressed else text)

        call, client = self.service.thread_pools.call, self.caller.client
        found: dict[str, Any] = await call(read, key=client, pool=PARSING)
        return found


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """A route: method, path with parameters as in Starlette, and what answers.

    Attributes:
        is_stream: Its body may be of any length.
    """

    method: str
    path: str
    handler: Handler
    is_stream: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return compile_path(self.path)[0]


def find_route(routes: Sequence[Route], method: str, path: str) -> tuple[Route, dict[str, str]]:
    """Find the route of a request.

    Raises:
        ApiError: There is none.
    """
    others = []
    for each in routes:
        if match := each.pattern.match(path):
            if each.method == method:
                return each, match.groupdict()
            others.append(each.method)
    if others:
        raise ApiError(405, f"method {method} not allowed")
    raise ApiError(501, f"{method} {path} is not implemented by Ringfence")


def not_running(sandbox_id: str) -> ApiError:
    """The answer of E2B's proxy for a sandbox that has ended or is paused."""
    return ApiError(502, "The sandbox was not found", sandboxId=sandbox_id)


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "unauthorized access, please provide a valid access token or method signing if supported",
    )
