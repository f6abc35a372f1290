"""ASGI application in front of `/v1`: finds E2B's requests, checks them and answers in E2B's form."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from ..api.access import gateways
from ..api.access.caller import TOKEN, Caller
from ..api.access.peer import note_gateway
from ..api.access.permissions import WEBSOCKET
from ..api.service import Service, settled
from ..errors import Unauthenticated
from ..execs.execs import Execs
from ..model.client_session import SessionState
from ..sessions.live import Live
from . import control, envd, interpreter, lives, ports, templates
from .call import ApiError, Call, Route, Shared, find_route, not_running, unauthorized
from .entrance import ENVD_PORT, FORWARDED, GRANT, INTERPRETER_PORT, MOST_PORT, Entrance, Passing
from .notes import notes_of
from .settings import E2BSettings

_BY_PORT = {0: control.ROUTES, ENVD_PORT: envd.ROUTES, INTERPRETER_PORT: interpreter.ROUTES}


class Door(Entrance):
    """The entrance of a server, or of a node: there, a gateway has checked keys."""

    def __init__(self, app: ASGIApp, service: Service, execs: Execs, settings: E2BSettings) -> None:
        super().__init__(app, service, settings.domain, _Passing)
        self.shared = Shared(service, execs, settings)


class _Passing(Passing[Door]):
    _sealed: Caller | None = None

    async def _answer(self) -> None:
        routes = _BY_PORT.get(self._port)
        self._sealed = self._of_gateway()
        if self._sealed is None:
            self._check_origin()
        elif self._path == GRANT and self._sealed.scope != TOKEN:
            await self._tell_grant()
            return
        if not self._port and not self._sandbox:
            if self._sealed is not None:  # of the gateway's own URL
                self._scope["scheme"] = self._headers.get(FORWARDED, self._scope["scheme"])
            await self._handle(control.ROUTES, self._sealed or self._with_key(), None)
            return
        live = await self._live()
        if routes is not None:
            has_token = self._with_token if self._port == ENVD_PORT else self._at_port
            await self._handle(routes, has_token(live), live)
            return
        await self._carry(self._at_port(live), live)

    async def _carry(self, caller: Caller, live: Live) -> None:
        """Pass a request on to a server inside."""
        with self._let_in(caller, "e2b:port", streamed=True) as body:
            receive = self._receive if self._scope["type"] == "websocket" else body
            await ports.carry(self._service, live, self._port, self._scope, receive, self.send)

    async def _handle(self, routes: Sequence[Route], caller: Caller, live: Live | None) -> None:
        self._caller = caller
        if self._scope["type"] == "websocket":
            raise ApiError(501, "there are no WebSockets here")
        route, params = find_route(routes, self._method, self._path)
        shared, method = self._entrance.shared, "GET" if live else self._method
        name, streamed = f"e2b:{route.path}", route.is_stream
        with self._let_in(caller, name, streamed=streamed, method=method) as body:
            if live is not None:
                await shared.introduced(live)
            call = Call(shared, Request(self._scope, body), caller, live, params)
            response = await route.handler(call)
            await response(self._scope, body, self.send)

    # -- callers --------------------------------------------------------------------------------

    def _with_key(self) -> Caller:
        if templates.is_upload(self._method, self._path, self._headers):
            # The signature in its URL is looked at by the route; the key is not sent to a storage.
            return Caller("", TOKEN)
        return super()._with_key()

    def _of_gateway(self) -> Caller | None:
        """The caller that a gateway of this node's cluster has let in."""
        secret, header = self._service.settings.gateway_secret, self._headers.get(gateways.HEADER)
        if not secret or header is None:
            return None
        note_gateway(self._state)
        query = self._scope.get("query_string", b"")
        target = self._scope["raw_path"] + (b"?" + query if query else b"")
        method = self._scope.get("method", WEBSOCKET)
        if (caller := gateways.unseal(secret, header, method, target)) is None:
            raise Unauthenticated("the gateway is not one of this cluster")
        self._is_of_gateway = self._state["is_of_gateway"] = True
        return caller

    async def _tell_grant(self) -> None:
        """Tell a gateway with which key a sandbox was made: it knows whether that opens."""
        operation = HTTPConnection(self._scope).query_params.get("operation", "")
        live = self._found() if self._sandbox else self._signed(operation)
        form = {"sandbox": live.sandbox_id, "client": live.client_id}
        response = JSONResponse({**form, "key": notes_of(live.metadata).key})
        await response(self._scope, self._receive, self.send)

    def _grant(self, live: Live) -> Caller:
        """The caller with a sandbox's token, whose key a gateway has looked at, or this server does."""
        key, sealed = notes_of(live.metadata).key, self._sealed
        if sealed is None:
            return self._entrance.caller_of(live.client_id, live.sandbox_id, key)
        if sealed.client != live.client_id or sealed.key_id != key:
            raise unauthorized()  # another sandbox had this id when the gateway asked
        return Caller(live.client_id, TOKEN, sandbox=live.sandbox_id)

    async def _live(self) -> Live:
        """Find the sandbox, resumed if it is to be."""
        live = self._found() if self._sandbox else self._signed(self._operation)
        manager = self._service.manager
        if live.moving is not None:
            await settled(live)
            if live.state == SessionState.TERMINATED:  # saved for another node
                raise not_running(live.sandbox_id)
        if live.state == SessionState.SUSPENDED:
            is_health = self._path == "/health" and self._port == ENVD_PORT
            if is_health or not notes_of(live.metadata).auto_resume:
                raise not_running(live.sandbox_id)
            # A stranger wakes nothing.
            (self._with_token if self._port == ENVD_PORT else self._at_port)(live)
            await self._service.thread_pools.call(
                lives.wake, manager, self._entrance.shared.execs, live, key=live.sandbox_id
            )
        return live

    def _found(self) -> Live:
        live = self._service.manager.index.find(self._sandbox)
        is_over = live is None or live.state == SessionState.TERMINATED  # which takes a moment
        if live is None or is_over or self._port > MOST_PORT:
            raise not_running(self._sandbox)
        return live

    def _signed(self, operation: str) -> Live:
        """Find the sandbox of a signed URL that names none: with E2B_SANDBOX_URL none does."""
        tokens = self._entrance.shared.tokens
        is_signed = tokens.signed(operation, {**HTTPConnection(self._scope).query_params})
        for live in self._service.manager.index.all():
            if is_signed(live):
                return live
        raise unauthorized()

    @property
    def _operation(self) -> str:
        return "read" if self._method in ("GET", "HEAD") else "write"

    def _with_token(self, live: Live) -> Caller:
        """The caller inside a sandbox, by its token or by a signature for a file."""
        shown = self._headers.get("x-access-token", "")
        query = HTTPConnection(self._scope).query_params  # of a WebSocket too
        is_open = bool(shown) and self._entrance.shared.tokens.opens(live, shown)
        if not is_open and self._path == "/files" and "signature" in query:
            if why := self._entrance.shared.tokens.signs(live, self._operation, {**query}):
                raise ApiError(401, why)
            is_open = True
        if not is_open and self._path != "/health":
            raise unauthorized()
        return self._grant(live)

    def _at_port(self, live: Live) -> Caller:
        """The caller of a server inside, or of an interpreter."""
        notes = notes_of(live.metadata)
        shown = self._headers.get("e2b-traffic-access-token") or self._headers.get("x-access-token")
        needs_token = self._port == INTERPRETER_PORT or not notes.is_public
        is_shown = bool(shown) and self._entrance.shared.tokens.opens_traffic(live, shown or "")
        if needs_token and not is_shown:
            if self._port == INTERPRETER_PORT:
                raise unauthorized()
            raise ApiError(403, "the port needs the header e2b-traffic-access-token")
        return self._grant(live)
