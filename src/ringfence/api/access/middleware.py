"""ASGI middleware before every route: admission, limits, audit, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import (
    InvalidRequest,
    RingfenceError,
    ServerUnreachable,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unsupported,
)
from .. import problems
from ..admission import Body
from ..service import Caller, Service
from . import gateways, origin_policy, permissions
from .audit import LONGEST_PATH
from .open_requests import OpenRequest
from .peer import PEER, local_caller, note_gateway

_KEY = "create a key with `ringfence keys create NAME`; send it as Authorization: Bearer KEY"
KEY_ENDED = "the key was removed, was rotated or has expired"
_KEY_HINT = f"{KEY_ENDED}, or is another server's; {_KEY}"
_POLICY_VIOLATION = 1008  # RFC 6455 7.4.1
_CLIENT_LEFT = 499  # nginx's: no client sees it, only logs and metrics
_CLOSE_S = 1.0
_NOTHING_SAID = b"{}"
_OF = re.compile(r"\A/v1/sandboxes/(?P<sandbox>[a-z0-9-]+)(?:/execs/(?P<exec>[a-z0-9-]+))?")
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
_REQUEST_ID = re.compile(r"\A[A-Za-z0-9._-]{1,64}\Z")

logger = logging.getLogger("ringfence.requests")


def stopping() -> ServerUnreachable:
    """Return the error of a request that the end of the server broke off."""
    hint = "the result of the request is unknown: check when the server is back"
    return ServerUnreachable("the server is stopping", hint=hint)


async def close_cut(send: Send) -> None:
    """Close a WebSocket whose key opens nothing any more; a client that does not read is not waited for."""
    # A reason has at most 123 bytes (RFC 6455 5.5); the connection would break off instead.
    close = {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": KEY_ENDED}
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await send(close)


class AccessMiddleware:
    """ASGI middleware: who asks, from where, for how much; then counted and written down."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request = _Passing(self._service, scope, receive, send)
        try:
            if request.is_preflight():
                await request.allow()
                return
            caller, admission = request.admit(), self._service.admission
            admission.begin(caller)
            try:
                request.open()
                await self._app(scope, await request.body(), request.send)
            finally:
                request.close()
                admission.end(caller)
        except RingfenceError as exc:
            await request.refuse(exc)
        except ClientDisconnect:
            await request.let_go()
        except Exception as exc:
            if not await request.fail(exc):
                raise
        except asyncio.CancelledError:
            # The server stops, or the key ends: there is no caller to raise this to.
            await request.break_off()
        finally:
            request.finish()


class _Passing:
    """A request on its way through the middleware."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service, self._scope, self._receive, self._send = service, scope, receive, send
        # The first of two headers of one name counts.
        pairs = reversed(scope["headers"])
        self._headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in pairs}
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._began = time.monotonic()
        self._status = 0
        given = self._headers.get("x-request-id", "")
        self._id = given if given and _REQUEST_ID.match(given) else os.urandom(16).hex()
        self._state["request_id"] = self._id
        self._caller: Caller | None = None
        self._body: Body | None = None
        self._open: OpenRequest | None = None
        self._why, self._is_written, self._is_of_gateway = "", False, False
        self._method = method = scope.get("method", permissions.WEBSOCKET)
        self._found = permissions.find("GET" if method == "HEAD" else method, scope["path"])
        self._takes = self._found.rule.body if self._found else permissions.JSON

    # -- pages ----------------------------------------------------------------------------------

    def is_preflight(self) -> bool:
        """Return whether the request is a CORS preflight, which carries no key.

        Raises:
            Forbidden: The origin, or the host name it called, is not accepted.
        """
        if self._scope.get("method") != "OPTIONS":
            return False
        if "access-control-request-method" not in self._headers:
            return False
        self._check_names()
        return "origin" in self._headers

    async def allow(self) -> None:
        """Tell a page that is ours that it may."""
        headers = {
            "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
            "access-control-allow-headers": self._headers.get("access-control-request-headers", ""),
            "access-control-max-age": "600",
        }
        await Response(status_code=204, headers=headers)(self._scope, self._receive, self.send)

    def _check_names(self) -> None:
        headers = self._headers
        if PEER not in self._state:
            origin_policy.check_host(self._service.origin_policy, headers.get("host", ""))
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        origin_policy.check_origin(self._service.origin_policy, origin, site)

    # -- coming in ------------------------------------------------------------------------------

    def admit(self) -> Caller:
        """Authenticate and admit the caller.

        Raises:
            Unauthenticated, Forbidden: No valid key, or no permission: see `permissions`.
            TooLarge, Unsupported: The announced body is too large, or its encoding is not accepted.
        """
        service, headers = self._service, self._headers
        caller = self._of_gateway()
        self._is_of_gateway = caller is not None
        if caller is None:
            self._check_names()
            caller = self._who()
        self._caller = caller
        if self._found is not None:
            permissions.check_route(caller, self._found)
        if headers.get("content-encoding", "identity") != "identity":
            raise Unsupported("compressed bodies are not accepted", field="content-encoding")
        length = headers.get("content-length", "0")
        is_whole = self._takes != permissions.STREAM
        if is_whole and int(length or "0") > service.admission.bounds.body_bytes:
            raise TooLarge(f"a body of {length} bytes exceeds the limit")
        self._state["caller"], self._state["found"] = caller, self._found
        return caller

    def _of_gateway(self) -> Caller | None:
        """The caller of a request that a gateway of this node's cluster has let in."""
        secret, header = self._service.settings.gateway_secret, self._headers.get(gateways.HEADER)
        if not secret or header is None:
            return None
        note_gateway(self._state)
        scope = self._scope
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        caller = gateways.unseal(secret, header, self._method, target)
        if caller is None:
            hint = "compare the clocks of both machines, and restart the gateway"
            raise Unauthenticated("the gateway is not one of this cluster", hint=hint)
        return caller

    def _who(self) -> Caller:
        given = self._headers.get("authorization", "")
        kind, _, text = given.partition(" ")
        if kind.lower() != "bearer":
            text = self._headers.get("x-api-key", "")
        if text:
            found = self._service.authenticator.caller(text.strip())
            if found is None:
                raise Unauthenticated("the API key is not valid", hint=_KEY_HINT)
            if self._service.authenticator.is_due:
                self._service.thread_pools.later(self._flush)
            return found
        if (local := local_caller(self._state)) is not None:
            return local
        raise Unauthenticated("the request has no API key", hint=_KEY)

    def _flush(self) -> None:
        with suppress(RingfenceError):  # the disk is full: another time
            self._service.authenticator.flush()

    async def body(self) -> Receive:
        """The body, bounded; a WebSocket's messages as they are.

        Raises:
            InvalidRequest: There is one where none is taken: what it says would be passed over.
        """
        if self._scope["type"] == "websocket":
            return self._receive
        streamed = self._takes == permissions.STREAM
        assert self._caller is not None  # `admit` comes first
        body = self._body = Body(
            self._receive, self._service.admission, self._caller, streamed=streamed
        )
        if self._takes == permissions.NOTHING and self._announces_body():
            await self._check_empty(body)
        return body

    def open(self) -> None:
        assert self._caller is not None  # `admit` comes first
        self._open = self._service.open_requests.begin(self._caller, self._method, self._found)

    def close(self) -> None:
        """It is served: its body is held no longer, and nothing is left to cut."""
        self._service.open_requests.end(self._open)
        if self._body is not None:
            self._body.close()

    def _announces_body(self) -> bool:
        length = self._headers.get("content-length", "0")
        return length not in ("", "0") or "transfer-encoding" in self._headers

    async def _check_empty(self, body: Body) -> None:
        text, more = b"", True
        while more and len(text) <= len(_NOTHING_SAID):
            message = await body()
            text += message.get("body", b"").strip()
            more = message.get("more_body", False)
        if text not in (b"", _NOTHING_SAID):
            raise InvalidRequest(
                "this route does not accept a body",
                field="body",
                hint="send the request without a body",
            )

    # -- going out ------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Sees the status on its way out, and says which request it was."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.write_down()
            headers = message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self._id.encode()),
                _NO_SNIFFING,
            ]
            if self._is_of_gateway and (made := self._state.get("made")):
                headers.append((gateways.MADE.encode(), made.encode()))
            origin = self._headers.get("origin")
            if origin is not None and origin.lower() in self._service.origin_policy.origins:
                shown = b"x-request-id, retry-after, content-range"
                headers += [
                    (b"access-control-allow-origin", origin.encode("latin-1")),
                    (b"vary", b"origin"),
                    (b"access-control-expose-headers", shown),
                ]
        elif message["type"] == "websocket.accept":
            self._status = 101
            self.write_down()
        await self._send(message)

    async def refuse(self, error: RingfenceError) -> None:
        """Answer with a problem, unless an answer is under way."""
        if self._caller is None and self._service.audit.has_enough(_peer(self._scope, self._state)):
            hint = "send a valid key; requests with one are still served"
            error = TooManyRequests("too many refused requests from this address", hint=hint)
        self._why = error.code
        if self._status:
            raise error
        if self._scope["type"] == "websocket":
            self._status = problems.STATUS.get(error.code, 500)
            self.write_down()
            await problems.problem(error)(self._scope, self._receive, self._send)
            return
        more = {} if self._caller else {"connection": "close"}
        await problems.problem(error, more)(self._scope, self._receive, self.send)

    async def fail(self, error: Exception) -> bool:
        """Answer that something went wrong which nobody foresaw; False where an answer is under way."""
        if self._status or self._scope["type"] != "http":
            return False
        method, path = self._scope["method"], self._scope["path"]
        await problems.unforeseen(method, path, error)(self._scope, self._receive, self.send)
        return True

    async def let_go(self) -> None:
        """The client went away while its body was read: nobody is answered, and nothing went wrong here."""
        if not self._status:
            await Response(status_code=_CLIENT_LEFT)(self._scope, self._receive, self.send)

    async def break_off(self) -> None:
        """The server stops, or the key opens no more: say so, unless an answer is under way."""
        if self._open is not None and self._open.is_cut:
            self._open.task.uncancel()
            await self._cut()
        elif not self._status and self._scope["type"] == "http":
            await self.refuse(stopping())

    async def _cut(self) -> None:
        if not self._status:
            await self.refuse(Unauthenticated("the API key is not valid", hint=_KEY_HINT))
        elif self._scope["type"] == "websocket":
            await close_cut(self._send)

    def write_down(self) -> None:
        """Into the audit log, where it changed something or was refused: once, and before it is told."""
        method, status = self._scope.get("method", "WEBSOCKET"), self._status
        of_interest = self._service.audit.is_of_interest
        if self._is_written or not of_interest(method, status, self._scope["path"]):
            return
        self._is_written = True
        self._service.audit.write(**self._facts())

    def _facts(self) -> dict[str, Any]:
        path = self._scope["path"]
        facts: dict[str, Any] = {
            "request": self._id,
            "client": self._caller.client if self._caller else None,
            "key": self._caller.key if self._caller else None,
            "peer": _peer(self._scope, self._state),
            "method": self._scope.get("method", "WEBSOCKET"),
            "path": path[:LONGEST_PATH],
            "status": self._status,
            "ms": round((time.monotonic() - self._began) * 1000, 3),
        }
        if len(path) > LONGEST_PATH:
            facts["path_length"] = len(path)
        if self._why:
            facts["code"] = self._why
        if made := self._state.get("made"):
            facts["made"] = made
        return facts

    def finish(self) -> None:
        """It is over. What was answered leaves first, and is counted then: nobody waits for that."""
        if self._status:
            asyncio.get_running_loop().call_soon(self.note)
        else:
            self.note()

    def note(self) -> None:
        scope = self._scope
        method = scope.get("method", "WEBSOCKET")
        refused_on = self._found.path if self._found else "(none)"
        route = getattr(scope.get("route"), "path", refused_on)
        self._status = status = self._status or 499  # the client went away
        self.write_down()
        self._service.requests.add(route, method, status, time.monotonic() - self._began)
        refused = status in (401, 403) or status >= 500
        if not refused and not logger.isEnabledFor(logging.DEBUG):
            return
        facts = self._facts()
        if found := _OF.match(scope["path"]):
            facts.update({key: each for key, each in found.groupdict().items() if each})
        level = logging.WARNING if refused else logging.DEBUG
        logger.log(level, "%s %s", method, route, extra={"facts": facts})


def _peer(scope: Scope, state: dict[str, Any]) -> str:
    if PEER in state:
        return str(state[PEER])
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "?"
