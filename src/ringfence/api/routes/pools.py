"""Warm sandboxes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel
from starlette.responses import Response

from ...sessions.config import PoolConfig
from ...sessions.manager import SessionManager
from .. import bodies
from ..models import AsModel, json_answer
from ..routers import Router
from ..service import TheService

router = Router(route_class=bodies.Route, prefix="/v1/pools", tags=["pools"])
Config = Annotated[PoolConfig, AsModel()]


class Pools(BaseModel):
    """Configuration and state of the pool.

    `given_up` maps profiles that no backend can build ahead to the reason.
    """

    config: Config
    warm: int
    given_up: dict[str, str]
    last_error: str


def _shown(manager: SessionManager) -> Response:
    pool = manager.pool
    return json_answer(
        {
            "config": pool.config.to_json(),
            "warm": pool.size,
            "given_up": dict(pool.given_up),
            "last_error": pool.last_error,
        }
    )


@router.get("", response_model=Pools)
async def get(service: TheService) -> Response:
    """Return configuration and state of the pool."""
    return _shown(service.manager)


@router.put("", response_model=Pools)
async def change(body: Config, service: TheService) -> Response:
    """Keep other sandboxes warm from now on, and when the server is started again; admins only.

    Until the pool in the configuration that the server is started with is another one than now.
    """
    await service.thread_pools.call(service.manager.change_pool, body)
    return _shown(service.manager)
