"""The ASGI application."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..errors import RingfenceError
from . import problems, validation_errors
from .access import permissions
from .access.middleware import AccessMiddleware
from .fast_path import FastPath
from .models import json_answer
from .routes import ROUTERS
from .schema import with_models
from .schemas import Problem
from .service import Service
from .thread_pools import BODIES


class _App(FastAPI):
    """The framework's application, behind an entrance of our own.

    As the framework's own middleware, ours and the fast path would stand behind layers of its, of
    which the requests that are made most often need none.
    """

    def __init__(
        self, service: Service, behind: Callable[[ASGIApp], ASGIApp], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.state.service = service
        self._entrance = AccessMiddleware(behind(super().__call__), service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._entrance(scope, receive, send)


def make_app(service: Service, behind: Callable[[ASGIApp], ASGIApp] | None = None) -> FastAPI:
    """The application over a service.

    Args:
        behind: Makes what stands between the door and the framework's application; None: the fast path.
    """
    routes = [each for router in ROUTERS for each in router.routes]
    permissions.check_complete(routes_of(routes))
    # Not `include_router`: it works out each route a second time, when the first request comes.
    app = _App(
        service,
        behind or partial(FastPath, service=service),
        routes=routes,
        title="Ringfence",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_route("/v1/openapi.json", _openapi, include_in_schema=False)
    app.add_exception_handler(RingfenceError, _ringfence_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unforeseen)
    return app


def routes_of(routes: Iterable[Any]) -> list[tuple[list[str], str]]:
    """Methods and path of each; a WebSocket's method is `WS`."""
    return [
        ([*(getattr(each, "methods", None) or (permissions.WEBSOCKET,))], each.path)
        for each in routes
    ]


async def _openapi(request: Request) -> Response:
    """Answer with the OpenAPI document, made when it is first asked for."""
    app = request.app
    if not hasattr(app.state, "openapi"):
        # It takes half a second: once, and not on the event loop.
        made = app.state.service.thread_pools.call(lambda: json_answer(document(app)), pool=BODIES)
        app.state.openapi = asyncio.ensure_future(made)
    answer = await asyncio.shield(app.state.openapi)
    return Response(answer.body, media_type="application/json")


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application made here."""
    made = get_openapi(
        title="Ringfence",
        version=app.version,
        summary="Run untrusted code in sandboxes on this machine.",
        routes=app.routes,
    )
    components = made.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "not on the unix socket"}
    }
    made["security"] = [{"key": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return with_models(made)


async def _ringfence_error(_request: Request, exc: Any) -> Response:
    return problems.problem(exc)


async def _validation_error(_request: Request, exc: Any) -> Response:
    return problems.problem(validation_errors.error_of(exc.errors()))


_ATTACH = re.compile("/v1/sandboxes/[^/]+/execs/[^/]+/attach")


async def _http_error(request: Request, exc: Any) -> Response:
    if isinstance(exc.__cause__, RingfenceError):
        return problems.problem(exc.__cause__)  # met while the body was read
    said = str(exc.detail)
    if exc.status_code in (404, 405):
        said = f"no route for {request.method} {request.url.path}"
    error = problems.of_status(exc.status_code, said)
    headers = dict(exc.headers or {})
    if exc.status_code == 405 and (methods := _methods(request.scope)):
        headers = {"allow": ", ".join(sorted(methods))}
        error.hint = f"allowed methods: {headers['allow']}"
    if _ATTACH.fullmatch(request.url.path):
        error.hint = "open a WebSocket, or use `.../output` and `.../stdin` over plain HTTP"
    return problems.problem(error, headers, status=exc.status_code)


def _methods(scope: Scope) -> set[str]:
    """Every method of the path: the framework names those of the first route that fits it.

    A path that a route names whole is that route's alone, as in OpenAPI 3.1, "Path Templating Matching".
    """
    fitting = [each for each in scope["app"].routes if each.matches(scope)[0] is not Match.NONE]
    fitting = [each for each in fitting if getattr(each, "path", "") == scope["path"]] or fitting
    return {name for each in fitting for name in getattr(each, "methods", None) or ()}


async def _gone(_request: Request, _exc: Any) -> Response:
    """The client went away while its body was read: nobody is answered, and nothing went wrong here."""
    return Response(status_code=499)


async def _unforeseen(request: Request, exc: Exception) -> Response:
    return problems.unforeseen(request.method, request.url.path, exc)
