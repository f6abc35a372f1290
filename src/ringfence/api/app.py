"""The ASGI application."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from .. import __version__
from ..errors import RingfenceError
from . import problems
from .guard import Guard
from .routes import ROUTERS
from .service import Service

logger = logging.getLogger("ringfence.api")


def make_app(service: Service) -> FastAPI:
    """The application over a service."""
    app = FastAPI(
        title="Ringfence",
        version=__version__,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Guard)
    app.add_exception_handler(RingfenceError, _ringfence_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    return app


async def _ringfence_error(_request: Request, exc: Any) -> Response:
    return problems.problem(exc)


async def _validation_error(_request: Request, exc: Any) -> Response:
    return problems.problem(problems.of_validation(exc.errors()))


async def _http_error(_request: Request, exc: Any) -> Response:
    response = problems.problem(problems.of_status(exc.status_code, str(exc.detail)), exc.headers)
    response.status_code = exc.status_code
    return response


async def _unforeseen(request: Request, exc: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    return problems.problem(problems.task_failed())
