"""ASGI application in front of `/v1`: finds E2B's requests, checks them and answers in E2B's form."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api import problems
from ..api.access import origin_policy
from ..api.access.audit import LONGEST_PATH
from ..api.access.caller import ADMIN, READ_ONLY, TOKEN, USER, Caller
from ..api.access.middleware import LOCAL, PEER
from ..api.admission import Body
from ..api.service import Service
from ..errors import RingfenceError, TooManyRequests
from ..execs.execs import Execs
from ..model.client_session import SessionState
from ..sessions.live import Live
from . import control, envd, interpreter, lives, ports, templates
from .call import ApiError, Call, Route, Shared, find_route, not_running, unauthorized
from .codec import STATUS, RpcError, rpc_error
from .notes import notes_of
from .settings import E2BSettings

logger = logging.getLogger("ringfence.e2b")

ENVD_PORT, INTERPRETER_PORT = 49983, 49999
_BY_PORT = {
    0: control.ROUTES,
    ENVD_PORT: envd.ROUTES,
    INTERPRETER_PORT: interpreter.ROUTES,
}
_CONTROL = re.compile(
    r"/(?:v[23]/)?(?:sandboxes|templates|snapshots|teams|volumes|secrets|nodes|access-tokens"
    r"|api-keys)(?:/|\Z)"
)
_HOST = re.compile(r"(\d{1,5})-([a-z0-9-]{1,63})")
_MOST_PORT = 65_535


class Door:
    """E2B's API where a request is one of its; every other request goes to `app`.

    Args:
        app: The application of `/v1`.
    """

    def __init__(self, app: ASGIApp, service: Service, execs: Execs, settings: E2BSettings) -> None:
        self._app, self.service = app, service
        self.shared, self.domain = Shared(service, execs, settings), settings.domain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(scope["headers"])}
        place = self._place(scope, headers)
        if place is None:
            await self._app(scope, receive, send)
            return
        await _Passing(self, scope, receive, send, headers, place).serve()

    def _place(self, scope: Scope, headers: dict[str, str]) -> tuple[str, int] | None:
        """Return sandbox id and port of a request; both empty for the API; None: it is of `/v1`."""
        if name := self.name_in(headers):
            if match := _HOST.fullmatch(name):
                return match[2], int(match[1])
            if name == "api":
                return "", 0
        if sandbox_id := headers.get("e2b-sandbox-id"):
            port = headers.get("e2b-sandbox-port", str(ENVD_PORT))
            return sandbox_id, int(port) if port.isdecimal() and len(port) < 6 else _MOST_PORT + 1
        if scope["path"] == "/files" and b"signature=" in scope.get("query_string", b""):
            return "", ENVD_PORT
        return ("", 0) if _CONTROL.match(scope["path"]) else None

    def name_in(self, headers: dict[str, str]) -> str:
        """Return the part of the host name before the domain; empty where it is another name."""
        host = headers.get("host", "").partition(":")[0].lower()
        suffix = f".{self.domain}"
        return host.removesuffix(suffix) if self.domain and host.endswith(suffix) else ""

    def caller_of(self, key_id: str, live: Live) -> Caller:
        """The caller with a sandbox's token: good for as long as the key that made it.

        Raises:
            ApiError: That key opens nothing any more.
        """
        if not key_id:
            return Caller(live.client_id, TOKEN, sandbox=live.sandbox_id)
        found = self.service.authenticator.holder(key_id)
        # A client of `/v1` writes its metadata itself, and may name the key of another one.
        if found is None or found.client != live.client_id:
            raise ApiError(401, "the API key that created the sandbox was removed or has expired")
        return Caller(
            live.client_id,
            TOKEN,
            sandbox=live.sandbox_id,
            key=key_id,
            expires_at=found.expires_at,
            max_requests=found.max_requests,
            digest=found.digest,
        )


class _Passing:
    """A request on its way."""

    def __init__(
        self,
        door: Door,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[str, str],
        place: tuple[str, int],
    ) -> None:
        self._door, self._service, self._tokens = door, door.service, door.shared.tokens
        self._scope, self._receive, self._send = scope, receive, send
        self._headers, (self._sandbox, self._port) = headers, place
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._began, self._status, self._why = time.monotonic(), 0, ""
        self._caller: Caller | None = None
        self._route = "(e2b)"
        self._path, self._method = scope["path"], scope.get("method", "GET")

    async def serve(self) -> None:
        """Answer it: with an error in E2B's form if need be."""
        try:
            await self._answer()
        except ClientDisconnect:
            pass
        except Exception as exc:
            if self._status:
                raise
            await self._refuse(exc)
        finally:
            status, took = self._status or 499, time.monotonic() - self._began
            self._write_down(status, took)
            self._service.requests.add(self._route, self._method, status, took)

    async def _answer(self) -> None:
        routes = _BY_PORT.get(self._port)
        self._check_origin(is_page=routes is None)
        if not self._port and not self._sandbox:
            await self._handle(control.ROUTES, self._with_key(), None)
            return
        live = await self._live()
        if routes is not None:
            has_token = self._with_token if self._port == ENVD_PORT else self._at_port
            await self._handle(routes, has_token(live), live)
            return
        await self._carry(self._at_port(live), live)

    async def _carry(self, caller: Caller, live: Live) -> None:
        """Pass a request on to a server inside."""
        self._caller, self._route = caller, "e2b:port"
        admission = self._service.admission
        admission.begin(caller)
        body = Body(self._receive, admission, caller, streamed=True)
        receive = self._receive if self._scope["type"] == "websocket" else body
        kept = self._service.open_requests.begin(caller, "GET", None)
        try:
            await ports.carry(self._service, live, self._port, self._scope, receive, self.send)
        finally:
            self._service.open_requests.end(kept)
            body.close()
            admission.end(caller)

    async def _handle(self, routes: Sequence[Route], caller: Caller, live: Live | None) -> None:
        self._caller = caller
        if self._scope["type"] == "websocket":
            raise ApiError(501, "there are no WebSockets here")
        route, params = find_route(routes, self._method, self._path)
        self._route = f"e2b:{route.path}"
        admission = self._service.admission
        admission.begin(caller)
        body = Body(self._receive, admission, caller, streamed=route.is_stream)
        # Ended with the key, unless it changes something: then its answer says whether it did.
        kept = self._service.open_requests.begin(caller, "GET" if live else self._method, None)
        try:
            call = Call(self._door.shared, Request(self._scope, body), caller, live, params)
            response = await route.handler(call)
            await response(self._scope, body, self.send)
        finally:
            self._service.open_requests.end(kept)
            body.close()
            admission.end(caller)

    # -- callers --------------------------------------------------------------------------------

    def _check_origin(self, *, is_page: bool) -> None:
        """Refuse a host name that is not the server's, and web pages of elsewhere."""
        policy = self._service.origin_policy
        if PEER not in self._state and not self._door.name_in(self._headers):
            origin_policy.check_host(policy, self._headers.get("host", ""))
        if not is_page:  # a sandbox's pages have origins of their own
            origin, site = self._headers.get("origin"), self._headers.get("sec-fetch-site")
            origin_policy.check_origin(policy, origin, site)

    def _with_key(self) -> Caller:
        is_upload = self._method == "PUT" and templates.FILES.pattern.match(self._path)
        if is_upload and "x-api-key" not in self._headers:
            # The signature in its URL is looked at by the route; the key is not sent to a storage.
            return Caller("", TOKEN)
        kind, _, text = self._headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or "x-api-key" in self._headers:
            text = self._headers.get("x-api-key", "")
        if not text and PEER in self._state:
            return Caller(LOCAL, ADMIN)
        caller = self._service.authenticator.caller(text.strip()) if text else None
        if caller is None:
            raise ApiError(401, "the API key is missing or not valid")
        readers = (READ_ONLY,) if self._method in ("GET", "HEAD") else ()
        if caller.scope not in (USER, ADMIN, *readers):
            raise ApiError(403, f"a {caller.scope} key may not do this")
        return caller

    async def _live(self) -> Live:
        """Find the sandbox, resumed if it is to be."""
        if not self._sandbox:
            return self._signed()
        manager = self._service.manager
        live = manager.index.find(self._sandbox)
        is_over = live is None or live.state == SessionState.TERMINATED  # which takes a moment
        if live is None or is_over or self._port > _MOST_PORT:
            raise not_running(self._sandbox)
        if live.state == SessionState.SUSPENDED:
            is_health = self._path == "/health" and self._port == ENVD_PORT
            if is_health or not notes_of(live.metadata).auto_resume:
                raise not_running(self._sandbox)
            # A stranger wakes nothing.
            (self._with_token if self._port == ENVD_PORT else self._at_port)(live)
            await self._service.thread_pools.call(lives.wake, manager, live, key=live.sandbox_id)
        return live

    def _signed(self) -> Live:
        """Find the sandbox of a signed URL that names none: with E2B_SANDBOX_URL none does."""
        is_signed = self._tokens.signed(self._operation, {**Request(self._scope).query_params})
        for live in self._service.manager.index.all():
            if is_signed(live):
                return live
        raise unauthorized()

    @property
    def _operation(self) -> str:
        return "read" if self._method in ("GET", "HEAD") else "write"

    def _with_token(self, live: Live) -> Caller:
        """The caller inside a sandbox, by its token or by a signature for a file."""
        shown, query = self._headers.get("x-access-token", ""), Request(self._scope).query_params
        is_open = bool(shown) and self._tokens.opens(live, shown)
        if not is_open and self._path == "/files" and "signature" in query:
            if why := self._tokens.signs(live, self._operation, {**query}):
                raise ApiError(401, why)
            is_open = True
        if not is_open and self._path != "/health":
            raise unauthorized()
        return self._door.caller_of(notes_of(live.metadata).key, live)

    def _at_port(self, live: Live) -> Caller:
        """The caller of a server inside, or of an interpreter."""
        notes = notes_of(live.metadata)
        shown = self._headers.get("e2b-traffic-access-token") or self._headers.get("x-access-token")
        needs_token = self._port == INTERPRETER_PORT or not notes.is_public
        is_shown = bool(shown) and self._tokens.opens_traffic(live, shown or "")
        if needs_token and not is_shown:
            if self._port == INTERPRETER_PORT:
                raise unauthorized()
            raise ApiError(403, "the port needs the header e2b-traffic-access-token")
        return self._door.caller_of(notes.key, live)

    # -- going out ------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """See the status on its way out."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "websocket.accept":
            self._status = 101
        await self._send(message)

    async def _refuse(self, exc: Exception) -> None:
        if self._caller is None and self._service.audit.has_enough(self._peer):
            exc = TooManyRequests("too many refused requests from this address")
        response = _error_response(exc, is_rpc="." in self._path.lstrip("/").partition("/")[0])
        self._why = getattr(exc, "code", "") or type(exc).__name__
        if not isinstance(exc, (ApiError, RpcError, RingfenceError)):
            logger.error("%s %s failed", self._method, self._path, exc_info=exc)
        await response(self._scope, self._receive, self.send)

    @property
    def _peer(self) -> str:
        if PEER in self._state:
            return f"uid {self._state[PEER]}"
        host, port = self._scope.get("client") or ("?", 0)
        return f"{host}:{port}"

    def _write_down(self, status: int, took: float) -> None:
        audit = self._service.audit
        if not audit.is_of_interest(self._method, status, self._path):
            return
        facts: dict[str, Any] = {
            "request": os.urandom(16).hex(),
            "client": self._caller.client if self._caller else None,
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


def _error_response(exc: Exception, *, is_rpc: bool) -> Response:
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
        status = problems.STATUS.get(exc.code, 500)
        status = 400 if status == 422 else 507 if exc.code == "storage_full" else status
        message = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
        if exc.field:
            message = f"{exc.field}: {message}"
        return JSONResponse({"code": status, "message": message}, status)
    return JSONResponse({"code": 500, "message": "the server failed; its log says why"}, 500)
