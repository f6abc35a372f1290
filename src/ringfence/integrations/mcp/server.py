"""The server: over stdio for one client, or as streamable HTTP at `/mcp`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.mcpserver import MCPServer

from ... import __version__
from .sandboxes import Sandboxes
from .tools import tools_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..origin import Origin

PATH = "/mcp"
_INSTRUCTIONS = """\
The tools work in a sandbox: a private Linux machine with the host's programs and none of its files, \
except directories that were mounted. Files stay between calls. Write results for the user to \
$RINGFENCE_OUTPUTS_DIR and fetch them with fetch_outputs."""


def make_server(origin: Origin, *, shared: bool, **settings: Any) -> MCPServer[None]:
    """A server with the tools of a sandbox.

    Args:
        shared: All calls are of one client, as over stdio.
        settings: Further arguments of the SDK's `MCPServer`.
    """
    sandboxes = Sandboxes(origin, shared=shared)

    @asynccontextmanager
    async def lifespan(_: MCPServer[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await sandboxes.close()

    server: MCPServer[None] = MCPServer(
        "ringfence",
        title="Ringfence",
        instructions=_INSTRUCTIONS,
        version=__version__,
        lifespan=lifespan,
        log_level="WARNING",
        tools=[*tools_of(sandboxes), *settings.pop("tools", ())],
        **settings,
    )
    return server


def serve_stdio(origin: Origin) -> None:
    """Serve one client on standard input and output, until it closes them."""
    server = make_server(origin, shared=True)
    anyio.run(server.run_stdio_async)


def http_app(origin: Origin | MCPServer[Any], *, host: str, token: str, **settings: Any) -> Any:
    """An ASGI application; requests need `token` as their bearer.

    Args:
        origin: Of the sandboxes; or a server of `make_server(origin, shared=False)`, to which tools
            of your own were added.
        host: What it is bound to: other `Host` headers are refused where this is loopback.
        token: Empty only where something in front asks who comes: loopback is open to every user of
            a machine, and each caller may do everything that the sandboxes may.
        settings: Further arguments of the SDK's `streamable_http_app`.
    """
    server = origin if isinstance(origin, MCPServer) else make_server(origin, shared=False)
    app = server.streamable_http_app(streamable_http_path=PATH, host=host, **settings)
    return _Guarded(app, token) if token else app


def serve_http(origin: Origin, host: str, port: int, token: str) -> None:
    """Serve until a signal."""
    import uvicorn

    uvicorn.run(http_app(origin, host=host, token=token), host=host, port=port, log_level="warning")


class _Guarded:
    """Lets through only requests that bring the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        import hmac

        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks it, and an unanswered handshake is refused
        headers = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
