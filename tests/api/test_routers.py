"""Routes are worked out when they are first used, each once, and not while the daemon starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import WebSocket
from starlette.routing import Match

from ringfence.api.routers import Route, Router

pytestmark = pytest.mark.anyone

_AT_IMPORT = """
from ringfence.api.app import ROUTERS, routes_of
routes = [each for router in ROUTERS for each in router.routes]
routes_of(routes)
print(sum("dependant" in vars(each) for each in routes))
print(sum(not hasattr(each, "dependant") for each in routes))
"""


class _Counted(Route):
    made = 0

    def get_route_handler(self) -> Callable[..., Any]:
        type(self).made += 1
        return super().get_route_handler()


@pytest.mark.full
def test_loading_the_application_works_out_no_route() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _AT_IMPORT], check=True, capture_output=True, text=True
    ).stdout.split()
    assert ["0", "0"] == said


def test_a_route_is_worked_out_once_for_all_threads() -> None:
    router = Router(prefix="/here", tags=["here"], route_class=_Counted)

    @router.get("/{name}", status_code=201)
    async def get(name: str, number: int = 0) -> None:
        """Nothing."""

    @router.websocket("/{name}/channel")
    async def channel(socket: WebSocket, name: str) -> None:
        """Nothing."""

    route, websocket = router.routes
    scope = {"type": "http", "method": "GET", "path": "/here/a", "root_path": ""}
    assert Match.FULL == route.matches(scope)[0]
    assert Match.PARTIAL == route.matches({**scope, "method": "POST"})[0]
    assert not any("dependant" in vars(each) for each in router.routes)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: id(route.app), range(64)))  # type: ignore[attr-defined]
    assert (1, 1, 201) == (len(found), _Counted.made, route.status_code)  # type: ignore[attr-defined]
    assert not hasattr(route, "no_such_thing")
    assert ["name"] == [each.name for each in websocket.dependant.path_params]  # type: ignore[attr-defined]
