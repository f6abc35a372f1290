"""Sandboxes: create, look at, end."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from ...model.acquire import AcquireOptions
from ...model.create import CreateRequest
from ...model.sandbox import SandboxView
from ...sessions.describe import describe
from ..lanes import ENDING
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])
View = Annotated[SandboxView, AsNoun()]


@router.post("", status_code=201, response_model=View)
async def create(
    body: Annotated[CreateRequest, AsNoun()],
    service: TheService,
    caller: TheCaller,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> Response:
    """Make a sandbox. With an `Idempotency-Key`, asking again gives the same one."""
    metadata = {**body.metadata, "name": body.name} if body.name else body.metadata
    options = AcquireOptions(
        preferred_id=body.spec.id,
        preferred_backend=body.backend,
        use_pool=body.use_pool,
        timeouts=body.timeouts,
        key=idempotency_key,
        metadata=metadata,
    )
    lease = await service.lanes.call(
        service.manager.acquire, replace(body.spec, id=None), options, client_id=caller.client
    )
    view = describe(service.manager, lease.id)
    return answer(view, 201 if lease.newly_created else 200, admin=caller.is_admin)


@router.get("/{sandbox_id}", response_model=View)
async def get(sandbox_id: str, service: TheService, caller: TheCaller) -> Response:
    """A sandbox, also for a while after it has ended."""
    view = await service.lanes.call(describe, service.manager, sandbox_id, caller.sees)
    return answer(view, admin=caller.is_admin)


@router.delete("/{sandbox_id}", response_model=View)
async def delete(sandbox_id: str, service: TheService, caller: TheCaller) -> Response:
    """End a sandbox. Legal in every state; ending it twice is once."""
    manager, lanes = service.manager, service.lanes
    await lanes.call(manager.terminate, sandbox_id, caller.sees, key=sandbox_id, lane=ENDING)
    view = await lanes.call(describe, manager, sandbox_id, caller.sees)
    return answer(view, admin=caller.is_admin)
