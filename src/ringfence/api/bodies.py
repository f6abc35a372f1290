"""JSON bodies: long ones are read in a thread that lets the event loop go on, and not without end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ..errors import BadJson, TooLarge
from . import routers, validation_errors
from .thread_pools import PARSING

SHORT = 64 << 10
"""Bytes of a body that the event loop reads by itself: 2 ms at worst."""

_STRETCH, _PAUSE_S = 200, 0.001  # values that are read in one go; then others have their turn
_MOST_VALUES = 100_000  # in objects and lists: some 20 MiB


def loads(text: bytes) -> Any:
    """Parse JSON text step by step: the decoder in C would hold every other thread for its whole length.

    Raises:
        BadJson: It is none.
        TooLarge: It has more values than any request needs.
    """
    try:
        return _Decoder().decode(text.decode())
    except (ValueError, RecursionError) as exc:
        raise BadJson(f"not JSON: {exc}") from exc


class _Decoder(json.JSONDecoder):
    """The standard library's decoder in Python, but for strings, which its C decodes quickly.

    Each value in an object or a list is counted before it is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = 0
        self.parse_object, self.parse_array = self._object, self._array
        self.scan_once = py_make_scanner(self)

    def _object(self, place: Any, strict: bool, scan: Any, *more: Any) -> Any:
        return JSONObject(place, strict, self._counting(scan), *more)

    def _array(self, place: Any, scan: Any) -> Any:
        return JSONArray(place, self._counting(scan))

    def _counting(self, scan: Callable[..., Any]) -> Callable[..., Any]:
        def counted(text: str, at: int) -> Any:
            self._values += 1
            if self._values > _MOST_VALUES:
                raise TooLarge(f"the body has more than {_MOST_VALUES} values")
            if self._values % _STRETCH == 0:
                time.sleep(_PAUSE_S)  # a thread that is merely asked for the lock keeps it for 5 ms
            return scan(text, at)

        return counted


class BodyRequest(Request):
    """A request whose long body is parsed and checked in a thread: `json` gives what came of it."""

    field: Any = None

    async def json(self) -> Any:
        """The body, parsed; a long one is already what the route takes."""
        text = await self.body()
        if len(text) <= SHORT or self.field is None:
            return await super().json()
        call, client = self.app.state.service.thread_pools.call, self.state.caller.client
        return await call(self._read, text, key=client, pool=PARSING)

    def _read(self, text: bytes) -> Any:
        found, errors = self.field.validate(loads(text), {}, loc=("body",))
        if errors:
            raise validation_errors.error_of(errors)
        return found


class Route(routers.Route):
    request_class = BodyRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        async def with_body(request: Request) -> Response:
            made = self.request_class(request.scope, request.receive, request._send)
            made.field = field
            return await handle(made)

        return with_body
