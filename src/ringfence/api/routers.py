"""Routes that are worked out when they are first asked for, so that a daemon serves sooner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import compile_path

from .schemas import PROBLEMS
from .service import check_query

_lock = threading.RLock()


class _Deferred:
    """The part of a route that matching needs; the framework works out the rest on first use.

    Parameters, models and their validators of all routes take a quarter of the processor time of a
    start, and a restart beside 13 busy processes waits seven times as long.
    """

    _options: tuple[str, Callable[..., Any], dict[str, Any]] | None

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._options = path, endpoint, options
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.name = options.get("name") or endpoint.__name__

    def __getattr__(self, name: str) -> Any:
        """Work out the route for the first attribute that is missing."""
        with _lock:
            options = self.__dict__.get("_options")
            if options is not None:
                self._options = None
                path, endpoint, more = options
                super().__init__(path, endpoint, **more)  # type: ignore[call-arg]
        return object.__getattribute__(self, name)


class Route(_Deferred, APIRoute):
    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.methods = set(options["methods"])


class _WebSocketRoute(_Deferred, APIWebSocketRoute):
    methods = None


class Router(APIRouter):
    """A router whose routes refuse unknown parameters. The document names every problem for each."""

    def __init__(
        self, *, prefix: str = "", tags: list[Any], route_class: type[APIRoute] = Route
    ) -> None:
        super().__init__(
            prefix=prefix,
            tags=tags,
            route_class=route_class,
            responses=PROBLEMS,
            dependencies=[Depends(check_query)],
        )

    def add_api_websocket_route(
        self, path: str, endpoint: Callable[..., Any], name: str | None = None, **options: Any
    ) -> None:
        options["dependencies"] = [*self.dependencies, *(options.get("dependencies") or ())]
        self.routes.append(_WebSocketRoute(self.prefix + path, endpoint, name=name, **options))
