"""Directories shown inside a sandbox."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from ...model.mount import Mount
from ...model.session import ResolvedMount
from .. import bodies, forms
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(
    route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/mounts", tags=["mounts"]
)
Resolved = Annotated[ResolvedMount, AsNoun()]


@router.get("", response_model=forms.Page[Resolved])
async def list_(sandbox_id: forms.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """Every mount, in the order they were made; of two at one target the newer, added later, wins."""
    live = await service.need(sandbox_id, caller)
    return await service.page(live.inner.session.mounts, admin=caller.is_admin)


@router.post("", status_code=201, response_model=Resolved)
async def add(
    sandbox_id: forms.SandboxId,
    body: Annotated[Mount, AsNoun()],
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Add a mount to the live sandbox; running processes see it too."""
    call, judge = service.lanes.call, service.permissions.judge
    mount = await call(judge, caller, body)
    live = await service.need(sandbox_id, caller)
    made = await call(live.sandbox.mount, mount, key=live.sandbox_id)
    return answer(made, 201, admin=caller.is_admin)
