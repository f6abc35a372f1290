"""What every request passes before any route sees it: who asks?"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import Unauthenticated
from .problems import problem
from .service import Caller

PEER = "peer_uid"
"""The key in a request's state under which the uid of a unix socket's peer is."""
LOCAL = "local"
"""The client of whoever comes through the unix socket."""


class Guard:
    """ASGI middleware that puts the `Caller` into the request's state, or refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, WebSocket or lifespan."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        if PEER not in state:
            await problem(Unauthenticated("no key was given"))(scope, receive, send)
            return
        state["caller"] = Caller(LOCAL, is_admin=True)
        await self.app(scope, receive, send)
