"""State shared by all routes: the manager, threads to call it from, the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ..errors import (
    Forbidden,
    InvalidRequest,
    LifecycleError,
    SandboxLost,
    SandboxNotFound,
    Unauthenticated,
)
from ..model.base.model import Model
from ..sandbox.sync import Sandbox
from ..sessions.catalogue.ended import EndedSandbox
from ..sessions.live import Live
from ..sessions.maker import EVICTED
from ..sessions.manager import SessionManager
from .access.audit import Audit
from .access.caller import Caller
from .access.open_requests import OpenRequests
from .access.origin_policy import OriginPolicy
from .access.permissions import Permissions
from .admission import Admission
from .bounds import Bounds
from .loop_share import LoopShare
from .measured import Requests
from .models import page_of
from .thread_pools import BODIES, ThreadPools

_FEW = 20  # models: to write them down takes less than to ask a thread


@dataclass(frozen=True)
class Settings:
    origin_policy: OriginPolicy = field(default_factory=OriginPolicy)
    bounds: Bounds = field(default_factory=Bounds)
    permissions: Permissions = field(default_factory=Permissions)
    gateway_secret: bytes = field(default=b"", repr=False)
    """What gateways seal callers with; empty where the server is no node of a cluster."""


@dataclass
class Service:
    """The application's state. Of one event loop."""

    manager: SessionManager
    settings: Settings = field(default_factory=Settings)
    audit: Audit = field(default_factory=lambda: Audit(None))
    thread_pools: ThreadPools = field(default_factory=ThreadPools)
    share: LoopShare = field(default_factory=LoopShare)
    requests: Requests = field(default_factory=Requests)

    def __post_init__(self) -> None:
        from .access.keys import Authenticator

        self.origin_policy, self.admission = (
            self.settings.origin_policy,
            Admission(self.settings.bounds),
        )
        self.permissions = self.settings.permissions
        self.authenticator = Authenticator(self.manager.store)
        self.open_requests = OpenRequests(self.authenticator)

    def live(self, any_id: str, caller: Caller) -> Live:
        """A session that lives, without waiting for anything.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        found = self.manager.index.find(any_id, caller.sees)
        if found is None or caller.sandbox not in ("", found.sandbox_id):
            raise SandboxNotFound(f"no session or sandbox {any_id!r}")
        return found

    async def known(self, any_id: str, caller: Caller) -> Sandbox | EndedSandbox:
        """The sandbox of `need`, or what one that has just ended still tells.

        Raises:
            SandboxNotFound, LifecycleError: As `need`.
        """
        try:
            return (await self.need(any_id, caller)).sandbox
        except LifecycleError:
            session = await self.thread_pools.call(self.manager.get, any_id, caller.sees)
            ended = self.manager.ended.find(session.sandbox_id)
            if ended is None:
                raise
            return ended

    async def page(
        self, found: Sequence[Model], next_cursor: str | None = None, **options: Any
    ) -> Response:
        """Build a page of model objects, a large one in a thread; `options` go to `to_json`."""
        if len(found) <= _FEW:
            return page_of(found, next_cursor, **options)
        return await self.thread_pools.call(page_of, found, next_cursor, pool=BODIES, **options)

    async def need(self, any_id: str, caller: Caller) -> Live:
        """`live`; of one that has ended it is said why.

        One that is being saved and restored in its place is waited for.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
            LifecycleError: It has ended.
        """
        try:
            live = self.live(any_id, caller)
            if live.moving is not None:
                await settled(live)
                live = self.live(any_id, caller)
            return live
        except SandboxNotFound:
            ended = await self.thread_pools.call(self.manager.get, any_id, caller.sees)
            if caller.sandbox not in ("", ended.sandbox_id):
                raise
            if ended.reason == EVICTED:
                raise SandboxLost(
                    f"sandbox {ended.sandbox_id} was saved for another node",
                    hint="send the request again: a gateway has it restored",
                    retryable=True,
                ) from None
            raise LifecycleError(
                f"sandbox {ended.sandbox_id} has ended: {ended.reason or ended.state}",
                hint="create a new one",
            ) from None


async def settled(live: Live) -> None:
    """Wait until a sandbox that is saved and restored in its place is there again."""
    if live.moving is not None:
        # Another request may be cancelled, and wait for the same.
        await asyncio.shield(asyncio.wrap_future(live.moving))


async def _service(connection: HTTPConnection) -> Service:
    found: Service = connection.app.state.service
    return found


async def _caller(connection: HTTPConnection) -> Caller:
    found: Caller | None = getattr(connection.state, "caller", None)
    if found is None:
        raise Unauthenticated("the request was not authenticated")
    return found


async def check_query(connection: HTTPConnection) -> None:
    """Refuse a parameter that the route does not have: a misspelt one must not mean none.

    Raises:
        InvalidRequest: `field` names it.
        Forbidden: This is not the route whose permissions were looked at.
    """
    given = connection.query_params.keys()
    route = connection.scope.get("route")
    if route is not None and getattr(connection.state.found, "path", None) != route.path:
        raise Forbidden("only routes in the table of permissions are served")
    if not given or route is None or "/ports/" in route.path:
        return  # what is behind a port of a sandbox has parameters of its own
    known = _query_of(route)
    for name in given:
        if name not in known:
            hint = f"one of {', '.join(sorted(known))}" if known else "the route has no parameters"
            raise InvalidRequest("no such parameter", field=name, hint=hint)


def _query_of(route: Any) -> frozenset[str]:
    known: frozenset[str] | None = vars(route).get(_QUERY)
    if known is None:
        waiting: list[Any] = [route.dependant]
        names: set[str] = set()
        while waiting:
            found = waiting.pop()
            names.update(each.alias for each in found.query_params)
            waiting += found.dependencies
        known = vars(route)[_QUERY] = frozenset(names)
    return known


_QUERY = "ringfence_query"  # attribute of a route: the names of its parameters

TheService = Annotated[Service, Depends(_service)]
TheCaller = Annotated[Caller, Depends(_caller)]

__all__ = ["Caller", "Request", "Service", "TheCaller", "TheService"]
