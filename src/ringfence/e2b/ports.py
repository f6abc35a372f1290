"""Servers inside a sandbox at a host name of their own: HTTP and WebSockets, cookies and all.

People who open one in a browser get errors as pages.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..api.access import gateways
from ..api.service import Service
from ..api.streaming.breaking import BreakableResponse
from ..api.streaming.preview import Answer, ask
from ..api.streaming.runs import Watching
from ..api.streaming.tunnel import carry_messages, open_websocket
from ..errors import ConnectError
from ..sessions.live import Live
from .call import ApiError
from .notes import notes_of

_WITHHELD = frozenset(
    (
        *(b"e2b-traffic-access-token", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-access-token"),
        gateways.HEADER.encode(),
    )
)
"""Header fields that are for the server; the sandbox's programs must not learn its tokens."""

_BROWSER = re.compile(r"mozilla|chrome|safari|firefox|edge|opera|msie", re.IGNORECASE)
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 36rem; margin: 15vh auto; padding: 0 1rem }}
</style></head>
<body><h1>{title}</h1><p>{text}</p></body>
</html>
"""
_OF_WEBSOCKETS = re.compile(
    rb"host|connection|upgrade|content-length|transfer-encoding|keep-alive|proxy-connection|te"
    rb"|trailer|expect|sec-websocket-.*",
    re.IGNORECASE,
)
"""Header fields that each WebSocket has of its own."""
_HOST = re.compile(rb"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:]{2,45}\])(?::[0-9]{1,5})?")


async def carry(
    service: Service, live: Live, port: int, scope: Scope, receive: Receive, send: Send
) -> None:
    """Carry one request to a server inside, and its answer back.

    Raises:
        ApiError: No server listens there, or it does not speak HTTP.
    """
    notes = notes_of(live.metadata)
    tls = _unverified() if port in notes.https_ports else None
    fields = [each for each in scope["headers"] if each[0].lower() not in _WITHHELD]
    if notes.host_mask:
        mask = notes.host_mask.replace("${PORT}", str(port)).encode()
        fields = [(b"Host", mask), *(each for each in fields if each[0].lower() != b"host")]
    try:
        inside = await service.thread_pools.call(live.sandbox.connect, port, key=live.sandbox_id)
        target: bytes = scope["raw_path"].partition(b"?")[0]
        if query := scope.get("query_string", b""):
            target += b"?" + query
        if scope["type"] == "websocket":
            host = next((value for name, value in fields if name.lower() == b"host"), b"")
            opened = await open_websocket(
                inside,
                port,
                target.decode("ascii"),
                scope.get("subprotocols", []),
                service.share,
                host=host.decode("ascii") if _HOST.fullmatch(host) else "",
                fields=[
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in fields
                    if not _OF_WEBSOCKETS.fullmatch(name)
                ],
                tls=tls,
            )
        else:
            request = Request(scope, receive)
            asked = request.method, target, fields, request.stream(), b""
            with Watching(service, live.sandbox_id):
                answer = await ask(
                    inside, port, *asked, service.share, receive, withheld=_WITHHELD, tls=tls
                )
    except ConnectError as exc:
        message = "The sandbox is running but port is not open"
        # E2B's proxy names a sandbox by what comes before the first hyphen, and clients compare that.
        name = live.sandbox_id.partition("-")[0]
        raise ApiError(502, message, sandboxId=name, port=port) from exc
    if scope["type"] == "http":
        response = BreakableResponse(_watched(service, live, answer), answer.status)
        response.raw_headers = [_of_one_origin(*each) for each in answer.fields]
        await response(scope, receive, send)
        return
    outside = WebSocket(scope, receive, send)
    try:
        await outside.accept(opened.subprotocol)
        with suppress(WebSocketDisconnect), Watching(service, live.sandbox_id):
            await carry_messages(outside, opened, service.share)
    finally:
        await opened.close()


@cache
def _unverified() -> ssl.SSLContext:
    """For servers inside, whose certificates say nothing: the connection ends in the sandbox anyway."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _of_one_origin(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A field without a cookie's `Domain`: it would be sent to the sandboxes of others (RFC 6265, 5.1.3)."""
    if name.lower() != b"set-cookie":
        return name, value
    pair, *attributes = value.split(b";")
    kept = [each for each in attributes if each.partition(b"=")[0].strip().lower() != b"domain"]
    return name, b";".join([pair, *kept])


async def _watched(service: Service, live: Live, answer: Answer) -> AsyncIterator[bytes]:
    with Watching(service, live.sandbox_id):
        async for piece in answer.body:
            yield piece


def is_browser(user_agent: str) -> bool:
    """Return whether a person will see the answer: E2B's proxy tells by the same words."""
    return _BROWSER.search(user_agent) is not None


def error_page(error: ApiError) -> HTMLResponse:
    """Return the page for an error of a port; its titles are those by which E2B's clients know it."""
    sandbox_id, port = error.form.get("sandboxId", ""), error.form.get("port")
    if port is not None:
        title = "Closed Port Error"
        text = f"{error}: sandbox {sandbox_id}. Connection refused on port {port}."
    elif sandbox_id:
        title, text = "Sandbox Not Found", f"{error}: {sandbox_id}. It has ended or is paused."
    else:
        title, text = "Error", str(error)
    return HTMLResponse(_PAGE.format(title=title, text=escape(text)), error.status)
