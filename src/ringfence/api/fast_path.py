"""Fast path for the most frequent requests, which skips routing.

Finding a route among eighty and resolving what it depends on takes longer than most of what routes do.
Here a request that is exactly as the SDK and curl write them goes straight to the function of its
route; whatever is not (a query, another media type, a body that is not what it should be) takes the
long way, which knows every answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RingfenceError
from ..model.base.jsonform import loads
from ..model.create import CreateRequest
from ..model.execs.exec_start import StartRequest
from .bodies import SHORT
from .routes import execs, sandboxes
from .service import Service

_AT = "/v1/sandboxes"
_ONE = re.compile(r"/v1/sandboxes/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(/execs)?")
_JSON = b"application/json"
_LONGEST_KEY = 255
_SHORT, _MOST_KNOWN = 1 << 10, 256  # bytes of a body; bodies


@dataclass(frozen=True)
class _Route:
    """Route of a request, as the metrics and the audit log need it."""

    path: str


_ALL, _EACH, _EXECS = (
    _Route(f"{_AT}{rest}") for rest in ("", "/{sandbox_id}", "/{sandbox_id}/execs")
)


class FastPath:
    """ASGI middleware. Preconditions: who asks is known already, and the route is open to them."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._known: dict[tuple[type[Any], bytes], Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it here, or pass it on untouched."""
        response: Response | None = None
        if scope["type"] == "http" and not scope["query_string"]:
            response, receive = await self._answer(scope, receive)
        if response is None:
            await self._app(scope, receive, send)
        else:
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[Response | None, Receive]:
        """The response, and None where it is not for us; then with the body still to be read."""
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == _AT:
            return await self._create(scope, receive)
        found = _ONE.fullmatch(path)
        if found is None:
            return None, receive
        sandbox_id, rest = found.groups()
        if rest is not None:
            if method == "POST":
                return await self._start(scope, receive, sandbox_id)
        elif method == "DELETE" and _length(scope) == b"0":
            return await self._one(scope, sandboxes.delete, sandbox_id), receive
        elif method == "GET":
            return await self._one(scope, sandboxes.get, sandbox_id), receive
        return None, receive

    async def _one(self, scope: Scope, route: Any, sandbox_id: str) -> Response:
        scope["route"] = _EACH
        response: Response = await route(sandbox_id, self._service, scope["state"]["caller"])
        return response

    async def _create(self, scope: Scope, receive: Receive) -> tuple[Response | None, Receive]:
        key = _header(scope, b"idempotency-key").decode("latin-1")
        body, again = await self._body(scope, receive, CreateRequest)
        if body is None or len(key) > _LONGEST_KEY:
            return None, again
        scope["route"] = _ALL
        app: Starlette = scope["app"]
        caller, runs = scope["state"]["caller"], app.state.execs
        made = await sandboxes.create(body, Request(scope), self._service, runs, caller, key)
        return made, again

    async def _start(
        self, scope: Scope, receive: Receive, sandbox_id: str
    ) -> tuple[Response | None, Receive]:
        key = _header(scope, b"idempotency-key").decode("latin-1")
        body, again = await self._body(scope, receive, StartRequest)
        if body is None or len(key) > _LONGEST_KEY:
            return None, again
        scope["route"] = _EXECS
        app: Starlette = scope["app"]
        caller = scope["state"]["caller"]
        run = app.state.execs
        return await execs.start(sandbox_id, body, self._service, run, caller, key), again

    async def _body(self, scope: Scope, receive: Receive, model: Any) -> tuple[Any, Receive]:
        """The model in the body, None where there is none; and how to read the body once more."""
        if _header(scope, b"content-type") != _JSON:
            return None, receive
        text, messages = b"", []
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return None, _replay(messages, receive)
            text += message.get("body", b"")
            if len(text) > SHORT:
                return None, _replay(messages, receive)
            if not message.get("more_body"):
                break
        try:
            return self._read(model, text), _replay(messages, receive)
        except RingfenceError:
            return None, _replay(messages, receive)  # the long way says what is wrong with it

    def _read(self, model: Any, text: bytes) -> Any:
        """The model. Clients often ask in the same words: what they mean is kept, unless it is secret."""
        known = self._known.get((model, text))
        if known is None:
            known = model.from_json(loads(text))
            if len(text) <= _SHORT and not known.is_secret:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[model, text] = known
        return known


def _header(scope: Scope, name: bytes) -> bytes:
    """The only one of that name; empty without."""
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found


def _length(scope: Scope) -> bytes:
    if _header(scope, b"transfer-encoding"):
        return b"unknown"
    return _header(scope, b"content-length") or b"0"


def _replay(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def again() -> Message:
        message = next(left, None)
        return message if message is not None else await receive()

    return again
