"""Warm sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from ...sessions.config import PoolConfig
from ...sessions.manager import SessionManager
from .. import bodies
from ..nouns import AsNoun, json_answer
from ..service import TheService

router = APIRouter(route_class=bodies.Route, prefix="/v1/pools", tags=["pools"])
Config = Annotated[PoolConfig, AsNoun()]


class Pools(BaseModel):
    """What is kept warm, and how that goes.

    `given_up` are profiles that no backend builds ahead, and why.
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
    """What is kept warm, and how that goes."""
    return _shown(service.manager)


@router.put("", response_model=Pools)
async def change(body: Config, service: TheService) -> Response:
    """Keep other sandboxes warm from now on, and when the server is started again; admins only.

    Until the pool in the configuration that the server is started with is another one than now.
    """
    await service.lanes.call(service.manager.change_pool, body)
    return _shown(service.manager)
