"""How the server is doing."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from ...model.manager_stats import Health
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(prefix="/v1", tags=["server"])


@router.get("/health", response_model=Annotated[Health, AsNoun()])
async def health(service: TheService, _caller: TheCaller) -> Response:
    """Whether everything that the server needs works, each looked at now."""
    found = await service.lanes.call(service.manager.health)
    return answer(found, 200 if found.ok else 503)
