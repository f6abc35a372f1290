"""Proxy to servers inside a sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Request, WebSocket
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from ...errors import ConnectError, RingfenceError
from ...sessions.live import Live
from ..models import json_answer
from ..problems import problem
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.breaking import BreakableResponse
from ..streaming.preview import Answer, ask
from ..streaming.runs import Watching
from ..streaming.tunnel import carry_bytes, carry_messages, open_websocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

router = Router(prefix="/v1/sandboxes/{sandbox_id}/ports/{port}", tags=["ports"])
Port = Annotated[int, Path(ge=1, le=65_535)]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


async def _dial(service: Service, live: Live, port: int) -> socket.socket:
    return await service.thread_pools.call(live.sandbox.connect, port, key=live.sandbox_id)


@router.post("")
async def expose(sandbox_id: str, port: Port, service: TheService, caller: TheCaller) -> Response:
    """Where a server inside, on its loopback or on every address, is reached. It must listen already.

    No port of the host is opened: what leads inside asks for the same keys as everything here.
    """
    live = await service.need(sandbox_id, caller)
    try:
        (await _dial(service, live, port)).close()
    except ConnectError as exc:
        return problem(exc, status=409)  # nobody's bad answer: there is no server yet to ask
    at = f"/v1/sandboxes/{live.sandbox_id}/ports/{port}"
    return json_answer({"port": port, "http": f"{at}/http/", "ws": f"{at}/ws/", "tcp": f"{at}/tcp"})


@router.api_route("/http/{path:path}", methods=METHODS, include_in_schema=False)
@router.api_route("/http", methods=METHODS, include_in_schema=False)
async def http(
    sandbox_id: str, port: Port, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """A request to the server inside.

    It is not told what the client identified itself with, nor any cookie; its pages run in an origin
    of their own, which can read nothing of ours.
    """
    live = await service.need(sandbox_id, caller)
    with Watching(service, live.sandbox_id):
        inside = await _dial(service, live, port)
        target, body = _rest(request), request.stream()
        prefix = f"/v1/sandboxes/{live.sandbox_id}/ports/{port}/http".encode()
        asked = request.method, target, request.headers.raw, body, prefix
        answer = await ask(inside, port, *asked, service.share, request.receive)
    response = BreakableResponse(_watched(service, live, answer), answer.status)
    response.raw_headers = answer.fields
    return response


async def _watched(service: Service, live: Live, answer: Answer) -> AsyncIterator[bytes]:
    with Watching(service, live.sandbox_id):
        async for piece in answer.body:
            yield piece


@router.websocket("/ws/{path:path}")
async def websocket(
    socket: WebSocket, sandbox_id: str, port: Port, service: TheService, caller: TheCaller
) -> None:
    """A WebSocket to the server inside."""
    try:
        live = await service.need(sandbox_id, caller)
        inside = await open_websocket(
            await _dial(service, live, port),
            port,
            _rest(socket).decode("ascii"),
            socket.scope.get("subprotocols", []),
            service.share,
        )
    except RingfenceError as exc:
        await socket.send_denial_response(problem(exc))
        return
    try:
        await socket.accept(inside.subprotocol)
        with Watching(service, live.sandbox_id):
            await carry_messages(socket, inside, service.share)
    except WebSocketDisconnect:
        pass
    finally:
        await inside.close()


@router.websocket("/tcp")
async def tcp(
    socket: WebSocket, sandbox_id: str, port: Port, service: TheService, caller: TheCaller
) -> None:
    """A connection to the server inside, whatever it speaks: binary messages are its bytes."""
    try:
        live = await service.need(sandbox_id, caller)
        inside = await _dial(service, live, port)
    except RingfenceError as exc:
        await socket.send_denial_response(problem(exc))
        return
    with inside:
        await socket.accept()
        with Watching(service, live.sandbox_id):
            await carry_bytes(socket, inside, service.share)


def _rest(connection: Request | WebSocket) -> bytes:
    """Return the inner server's part of the URL, exactly as the client wrote it."""
    path: bytes = connection.scope["raw_path"].partition(b"?")[0]
    # /v1/sandboxes/ID/ports/PORT/http/REST
    _before, *rest = path.split(b"/", 7)[6:]
    query: bytes = connection.scope.get("query_string", b"")
    return b"/" + b"".join(rest) + (b"?" + query if query else b"")
