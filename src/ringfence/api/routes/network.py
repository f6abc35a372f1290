"""What a sandbox may reach, and what it tried to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from ...model.netlog import NetworkEvent
from ...model.network import NetworkPolicy
from .. import bodies, forms
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(
    route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/network", tags=["network"]
)
Policy = Annotated[NetworkPolicy, AsNoun()]


@router.get("", response_model=Policy)
async def get(sandbox_id: forms.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """The policy that holds now."""
    live = await service.need(sandbox_id, caller)
    return answer(live.inner.spec.network)


@router.put("", response_model=Policy)
async def change(
    sandbox_id: forms.SandboxId, body: Policy, service: TheService, caller: TheCaller
) -> Response:
    """Change what it may reach, at once: what is connected against the new policy is cut."""
    call, judge = service.lanes.call, service.permissions.judge
    policy = await call(judge, caller, body)
    live = await service.need(sandbox_id, caller)
    await call(live.sandbox.apply_network_policy, policy, key=live.sandbox_id)
    service.manager.events.add("network", live)
    return answer(live.inner.spec.network)


@router.get("/log", response_model=forms.Page[Annotated[NetworkEvent, AsNoun()]])
async def log(sandbox_id: forms.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """What was asked of the network, oldest first: the newest thousand decisions."""
    sandbox = await service.known(sandbox_id, caller)
    found = await service.lanes.call(sandbox.network_log, key=sandbox.id)
    return await service.page(found)


@router.get("/learned", response_model=Policy)
async def learned(sandbox_id: forms.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """The smallest policy that allows what was reached so far."""
    sandbox = await service.known(sandbox_id, caller)
    return answer(await service.lanes.call(sandbox.learned_policy, key=sandbox.id))
