"""Directories shown inside a sandbox."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response

from ...model.mount import Mount
from ...model.session import ResolvedMount
from .. import bodies, schemas
from ..models import AsModel, answer
from ..routers import Router
from ..service import TheCaller, TheService

router = Router(
    route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/mounts", tags=["mounts"]
)
Resolved = Annotated[ResolvedMount, AsModel()]


@router.get("", response_model=schemas.Page[Resolved])
async def list_(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """Every mount, in the order they were made; of two at one target the newer, added later, wins."""
    live = await service.need(sandbox_id, caller)
    return await service.page(live.inner.session.mounts, admin=caller.is_admin)


@router.post("", status_code=201, response_model=Resolved)
async def add(
    sandbox_id: schemas.SandboxId,
    body: Annotated[Mount, AsModel()],
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Add a mount to the live sandbox; running processes see it too."""
    call, judge = service.thread_pools.call, service.permissions.judge
    mount = await call(judge, caller, body)
    live = await service.need(sandbox_id, caller)
    made = await call(live.sandbox.mount, mount, key=live.sandbox_id)
    return answer(made, 201, admin=caller.is_admin)
