"""E2B's API in this process, over sandboxes that confine nothing: requests take milliseconds.

What is inside a sandbox is a directory of its own: paths that clients send are below it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any, ClassVar

import httpx
from starlette.types import Message, Receive, Scope, Send

from ringfence import SandboxSpec
from ringfence.api.access.audit import Audit
from ringfence.api.access.caller import Caller
from ringfence.api.access.keys import e2b_form
from ringfence.api.app import make_app
from ringfence.api.service import Service, Settings
from ringfence.e2b.call import Call, Shared
from ringfence.e2b.door import Door
from ringfence.e2b.notes import Notes
from ringfence.e2b.settings import E2BSettings
from ringfence.execs.execs import Execs
from ringfence.model import capabilities as can
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.testing.unconfined.files import UnconfinedFiles
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox
from tests.unconfined import Unconfined

NO_POOL = ManagerConfig(pool=PoolConfig(enabled=False))
_IGNORED = (*can.LIMITED_BY.values(), can.MOUNT, can.NETWORK_HOSTS, can.NETWORK_CHANGE)


class RootedFiles(UnconfinedFiles):
    """Files of which absolute paths begin at the sandbox's own directory."""

    def _absolute(self, path: str) -> str:
        if path.startswith("/") and not path.startswith(self._root):
            path = self._root + path
        return super()._absolute(path)


class Backend(Unconfined):
    """Takes what clients of E2B ask for: limits, mounts and policies, which mean nothing here."""

    lacks: ClassVar = {name: why for name, why in Unconfined.lacks.items() if name not in _IGNORED}

    def _make(self, spec: SandboxSpec, content: str | None) -> UnconfinedSandbox:
        made = super()._make(spec, content)
        made.files = RootedFiles(made.root, made._check_alive, made._scope)
        for path in ("home/user", "run/e2b", "tmp"):
            os.makedirs(f"{made.root}/{path}", exist_ok=True)
        return made


class Here:
    """A server without sockets.

    Attributes:
        sent: Bodies and heads of the last raw request's answer.
    """

    def __init__(
        self,
        stack: ExitStack,
        *,
        settings: Settings | None = None,
        e2b: E2BSettings | None = None,
        audit: Audit | None = None,
        **options: Any,
    ) -> None:
        self.backend = Backend()
        stack.callback(self.backend.close)  # snapshots outlive their manager
        self.manager = stack.enter_context(
            SessionManager(NO_POOL, backends=[self.backend], background=False, **options)
        )
        self.service = Service(self.manager, settings or Settings(), audit or Audit(None))
        stack.callback(self.service.thread_pools.close)
        self.execs = stack.enter_context(closing(Execs(self.manager)))
        app = make_app(self.service)
        app.state.execs = self.execs
        self.e2b = e2b or E2BSettings(domain="sbx.test")
        self.door = Door(app, self.service, self.execs, self.e2b)

    @property
    def shared(self) -> Shared:
        return self.door.shared

    def key(self, owner: str = "ann", scope: str = "user", **more: Any) -> str:
        """Make a key, and return the text that clients of E2B send."""
        return e2b_form(self.service.authenticator.make(owner=owner, scope=scope, **more)[1])

    def live(
        self, owner: str = "ann", notes: Notes | None = None, spec: SandboxSpec | None = None
    ) -> Live:
        """Make a sandbox; of `/v1` where it has no notes."""
        metadata = {} if notes is None else notes.written({})
        lease = self.manager.acquire(
            spec or SandboxSpec(), AcquireOptions(metadata=metadata), client_id=owner
        )
        found = self.manager.index.find(lease.id)
        assert found is not None
        return found

    def root(self, live: Live) -> str:
        """The directory on the host that is the sandbox's own root."""
        inner = live.inner
        assert isinstance(inner, UnconfinedSandbox)
        return inner.root

    async def ask(
        self,
        method: str,
        path: str,
        *,
        state: Mapping[str, Any] | None = None,
        peer: tuple[str, int] = ("127.0.0.1", 5000),
        host: str = "localhost",
        **more: Any,
    ) -> httpx.Response:
        """One request, as it would come from a socket."""

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await self.door({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(with_state, client=peer)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, **more)

    async def raw(
        self,
        method: str,
        path: str,
        pieces: list[bytes],
        headers: Mapping[str, str],
        *,
        query: str = "",
        breaks_off: bool = False,
        kind: str = "http",
        before_end: Callable[[], Any] | None = None,
    ) -> list[Message]:
        """Send a body piece by piece, or break it off; return what was sent back.

        Args:
            before_end: Awaited once all pieces were taken, before the end comes.
        """
        fields = {"host": "localhost", **headers}
        scope: Scope = {
            "type": kind,
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in fields.items()],
            "client": ("127.0.0.1", 5000),
            "server": ("localhost", 80),
            "state": {},
        }
        left, sent = list(pieces), []

        async def receive() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": True}
            if before_end is not None:
                await before_end()
            if breaks_off:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        if kind == "websocket":
            del scope["method"]
        await self.door(scope, receive, send)
        return sent

    def call(self, live: Live | None, caller: Caller | None = None, **query: str) -> Call:
        """A call as routes see it, whose body is empty."""
        from starlette.requests import Request

        scope: Scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": "&".join(f"{k}={v}" for k, v in query.items()).encode(),
            "headers": [],
            "state": {},
        }
        return Call(self.shared, Request(scope), caller or Caller("ann"), live)

    def is_idle(self) -> bool:
        """True if no request is counted any more, and no byte of one is held."""
        service = self.service
        held = service.admission._bytes_of.total()
        return (0, 0, 0) == (service.admission.now, held, len(service.open_requests._requests))
