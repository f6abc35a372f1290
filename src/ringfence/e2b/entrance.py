"""Entrance of E2B's API, at a server and at a gateway: finds its requests, answers in its form."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api import problems
from ..api.access import origin_policy
from ..api.access.audit import LONGEST_PATH
from ..api.access.caller import ADMIN, READ_ONLY, TOKEN, USER, Caller
from ..api.access.middleware import KEY_ENDED, close_cut, stopping
from ..api.access.open_requests import OpenRequest
from ..api.access.peer import PEER, local_caller
from ..api.admission import Body
from ..api.service import Service
from ..errors import RingfenceError, SandboxLost, TooManyRequests
from .call import ApiError
from .codec import STATUS, RpcError, rpc_error
from .ports import error_page, is_browser

logger = logging.getLogger("ringfence.e2b")

ENVD_PORT, INTERPRETER_PORT = 49983, 49999
GRANT = "/ringfence/grant"
"""Path at which a node tells gateways with which key a sandbox was made."""
FORWARDED = "x-forwarded-proto"
"""Field by which a gateway tells a node the scheme of its own URL."""
_CONTROL = re.compile(
    r"/(?:v[23]/)?(?:sandboxes|templates|snapshots|teams|volumes|secrets|nodes|access-tokens"
    r"|api-keys)(?:/|\Z)"
)
_HOST = re.compile(r"(\d{1,5})-([a-z0-9-]{1,63})")
MOST_PORT = 65_535
_ANSWERS = ("http.response.start", "websocket.http.response.start")


E = TypeVar("E", bound="Entrance")


class Entrance:
    """E2B's API where a request is one of its; every other request goes to `app`.

    Args:
        app: The application of `/v1`.
        passing: Class of the requests.
    """

    def __init__(
        self, app: ASGIApp, service: Service, domain: str, passing: type[Passing[Any]]
    ) -> None:
        self._app, self._passing = app, passing
        self.service, self.domain = service, domain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(scope["headers"])}
        place = self._place(scope, headers)
        if place is None:
            await self._app(scope, receive, send)
            return
        await self._passing(self, scope, receive, send, headers, place).serve()

    def _place(self, scope: Scope, headers: dict[str, str]) -> tuple[str, int] | None:
        """Return sandbox id and port of a request; both empty for the API; None: it is of `/v1`."""
        if name := self.name_in(headers):
            if match := _HOST.fullmatch(name):
                return match[2], int(match[1])
            if name == "api":
                return "", 0
        if sandbox_id := headers.get("e2b-sandbox-id"):
            port = headers.get("e2b-sandbox-port", str(ENVD_PORT))
            return sandbox_id, int(port) if port.isdecimal() and len(port) < 6 else MOST_PORT + 1
        if scope["path"] in ("/files", GRANT) and b"signature=" in scope.get("query_string", b""):
            return "", ENVD_PORT
        return ("", 0) if _CONTROL.match(scope["path"]) else None

    def name_in(self, headers: dict[str, str]) -> str:
        """Return the part of the host name before the domain; empty where it is another name."""
        host = headers.get("host", "").partition(":")[0].lower()
        suffix = f".{self.domain}"
        return host.removesuffix(suffix) if self.domain and host.endswith(suffix) else ""

    def caller_of(self, client: str, sandbox_id: str, key_id: str) -> Caller:
        """The caller with a sandbox's token: good for as long as the key that made it.

        Raises:
            ApiError: That key opens nothing any more.
        """
        if not key_id:
            return Caller(client, TOKEN, sandbox=sandbox_id)
        found = self.service.authenticator.holder(key_id)
        # A client of `/v1` writes its metadata itself, and may name the key of another one.
        if found is None or found.client != client:
            raise ApiError(401, "the API key that created the sandbox was removed or has expired")
        return replace(found, scope=TOKEN, sandbox=sandbox_id)


class Passing(Generic[E]):
    def __init__(
        self,
        entrance: E,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[str, str],
        place: tuple[str, int],
    ) -> None:
        self._entrance, self._service = entrance, entrance.service
        self._scope, self._receive, self._send = scope, receive, send
        self._headers, (self._sandbox, self._port) = headers, place
        self._is_of_gateway = False
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._began, self._status, self._why = time.monotonic(), 0, ""
        self._caller: Caller | None = None
        self._open: OpenRequest | None = None
        self._route = "(e2b)"
        self._path, self._method = scope["path"], scope.get("method", "GET")

    async def serve(self) -> None:
        """Answer it: with an error in E2B's form if need be."""
        try:
            if self._is_preflight:
                self._check_origin()
                await self._allow_page()
            else:
                await self._answer()
        except ClientDisconnect:
            pass
        except Exception as exc:
            if self._status:
                raise
            await self._refuse(exc)
        except asyncio.CancelledError:
            # The server stops, or the key ends: there is no caller to raise this to.
            await self._break_off()
        finally:
            status, took = self._status or 499, time.monotonic() - self._began
            self._write_down(status, took)
            self._service.requests.add(self._route, self._method, status, took)

    async def _answer(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _let_in(
        self, caller: Caller, route: str, *, streamed: bool = False, method: str = "GET"
    ) -> Iterator[Body]:
        """Be within the bounds of its caller, until its key opens no more; gives the body to read.

        Args:
            method: By which it is told what changes something: that is not ended with its key.
        """
        self._caller, self._route = caller, route
        admission, open_requests = self._service.admission, self._service.open_requests
        admission.begin(caller)
        body = Body(self._receive, admission, caller, streamed=streamed)
        self._open = open_requests.begin(caller, method, None)
        try:
            yield body
        finally:
            open_requests.end(self._open)
            body.close()
            admission.end(caller)

    # -- callers --------------------------------------------------------------------------------

    def _check_origin(self) -> None:
        """Refuse a host name that is not the server's, and web pages of elsewhere."""
        policy = self._service.origin_policy
        if PEER not in self._state and not self._entrance.name_in(self._headers):
            origin_policy.check_host(policy, self._headers.get("host", ""))
        # A sandbox's pages have origins of their own. A signed URL is meant for pages, and what it
        # allows is in it: no page gets more from it than the one who was given the URL.
        if not self._is_of_port and not self._is_signed:
            origin, site = self._headers.get("origin"), self._headers.get("sec-fetch-site")
            origin_policy.check_origin(policy, origin, site)

    @property
    def _is_of_port(self) -> bool:
        """Return whether the request is for a server inside, which has an origin of its own."""
        return self._port not in (0, ENVD_PORT, INTERPRETER_PORT)

    @property
    def _is_signed(self) -> bool:
        is_file = self._port == ENVD_PORT and self._path == "/files"
        return is_file and b"signature=" in self._scope.get("query_string", b"")

    def _with_key(self) -> Caller:
        kind, _, text = self._headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or "x-api-key" in self._headers:
            text = self._headers.get("x-api-key", "")
        if not text and (local := local_caller(self._state)) is not None:
            return local
        caller = self._service.authenticator.caller(text.strip()) if text else None
        if caller is None:
            raise ApiError(401, "the API key is missing or not valid")
        readers = (READ_ONLY,) if self._method in ("GET", "HEAD") else ()
        if caller.scope not in (USER, ADMIN, *readers):
            raise ApiError(403, f"a {caller.scope} key may not do this")
        return caller

    # -- pages ----------------------------------------------------------------------------------

    @property
    def _is_preflight(self) -> bool:
        """Return whether a browser asks what a page may send (CORS); such a request has no key or token."""
        is_asking = {"origin", "access-control-request-method"} <= self._headers.keys()
        return is_asking and self._method == "OPTIONS" and not self._is_of_port

    async def _allow_page(self) -> None:
        headers = {
            "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
            "access-control-allow-headers": self._headers.get("access-control-request-headers", ""),
            "access-control-max-age": "600",
        }
        await Response(status_code=204, headers=headers)(self._scope, self._receive, self.send)

    def _fields_for_page(self) -> list[tuple[bytes, bytes]]:
        """Header fields by which scripts of an accepted page may read the answer."""
        origin = self._headers.get("origin")
        if origin is None or self._is_of_port or self._is_of_gateway:
            return []
        if not self._is_signed and origin.lower() not in self._service.origin_policy.origins:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", b"x-next-token, retry-after, content-range"),
        ]

    # -- going out ------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """See the status on its way out."""
        if message["type"] in _ANSWERS:
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._fields_for_page()]
        elif message["type"] == "websocket.accept":
            self._status = 101
        await self._send(message)

    async def _refuse(self, exc: Exception) -> None:
        if self._is_to_slow and self._service.audit.has_enough(self._peer):
            exc = TooManyRequests("too many refused requests from this address")
        is_rpc = "." in self._path.lstrip("/").partition("/")[0]
        is_inside = bool(self._port)
        response = _error_response(exc, is_rpc=is_rpc, is_inside=is_inside)
        is_for_person = self._is_of_port and is_browser(self._headers.get("user-agent", ""))
        if is_for_person and isinstance(exc, ApiError) and self._scope["type"] == "http":
            response = error_page(exc)
        self._why = getattr(exc, "code", "") or type(exc).__name__
        if not isinstance(exc, (ApiError, RpcError, RingfenceError)):
            logger.error("%s %s failed", self._method, self._path, exc_info=exc)
        await response(self._scope, self._receive, self.send)

    async def _break_off(self) -> None:
        """The server stops, or the key opens no more: say so, unless an answer is under way."""
        is_socket = self._scope["type"] == "websocket"
        if self._open is not None and self._open.is_cut:
            self._open.task.uncancel()
            if not self._status:
                await self._refuse(ApiError(401, KEY_ENDED))
            elif is_socket:
                await close_cut(self._send)
        elif not self._status and not is_socket:
            await self._refuse(stopping())

    @property
    def _is_to_slow(self) -> bool:
        # A gateway is the peer of all its clients, and counts their refusals itself.
        return not self._client and not self._is_of_gateway

    @property
    def _client(self) -> str | None:
        """Return the client of the key or token; None for a signed upload, which needs neither."""
        return (self._caller.client if self._caller else "") or None

    @property
    def _peer(self) -> str:
        if PEER in self._state:
            return str(self._state[PEER])
        host, port = self._scope.get("client") or ("?", 0)
        return f"{host}:{port}"

    def _write_down(self, status: int, took: float) -> None:
        audit = self._service.audit
        if not audit.is_of_interest(self._method, status, self._path):
            return
        facts: dict[str, Any] = {
            "request": os.urandom(16).hex(),
            "client": self._client,
            "key": self._caller.key if self._caller else None,
            "peer": self._peer,
            "method": self._method,
            "path": self._path[:LONGEST_PATH],
            "status": status,
            "ms": round(took * 1000, 3),
        }
        if self._sandbox:
            facts["sandbox"] = self._sandbox[:63]
        if self._why:
            facts["code"] = self._why
        audit.write(**facts)


def _error_response(exc: Exception, *, is_rpc: bool, is_inside: bool) -> Response:
    if isinstance(exc, ApiError):
        if is_rpc and exc.status == 401:
            return JSONResponse(RpcError("unauthenticated", str(exc)).form, 401)
        return JSONResponse(exc.form, exc.status)
    if is_rpc or isinstance(exc, RpcError):
        error = rpc_error(exc)
        status = STATUS[error.code]
        form = error.form if is_rpc else {"code": status, "message": error.message}
        return JSONResponse(form, status)
    if isinstance(exc, RingfenceError):
        if isinstance(exc, SandboxLost):  # its node is gone: for E2B's clients, it was never there
            gone = ApiError(502 if is_inside else 404, exc.message)
            return JSONResponse(gone.form, gone.status)
        status = problems.STATUS.get(exc.code, 500)
        status = 400 if status == 422 else 507 if exc.code == "storage_full" else status
        message = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
        if exc.field:
            message = f"{exc.field}: {message}"
        return JSONResponse({"code": status, "message": message}, status)
    return JSONResponse({"code": 500, "message": "the server failed; its log says why"}, 500)
