"""Network policy and network log of a sandbox."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response

from ...model.net.netlog import NetworkEvent
from ...model.net.network import NetworkPolicy
from .. import bodies, schemas
from ..models import AsModel, answer
from ..routers import Router
from ..service import TheCaller, TheService

router = Router(
    route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/network", tags=["network"]
)
Policy = Annotated[NetworkPolicy, AsModel()]


@router.get("", response_model=Policy)
async def get(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """The policy that holds now."""
    live = await service.need(sandbox_id, caller)
    return answer(live.inner.spec.network)


@router.put("", response_model=Policy)
async def change(
    sandbox_id: schemas.SandboxId, body: Policy, service: TheService, caller: TheCaller
) -> Response:
    """Change what it may reach, at once: what is connected against the new policy is cut."""
    call, judge = service.thread_pools.call, service.permissions.judge
    policy = await call(judge, caller, body)
    live = await service.need(sandbox_id, caller)
    await call(live.sandbox.apply_network_policy, policy, key=live.sandbox_id)
    service.manager.events.add("network", live)
    return answer(live.inner.spec.network)


@router.get("/log", response_model=schemas.Page[Annotated[NetworkEvent, AsModel()]])
async def log(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """List the network events, oldest first: the newest thousand decisions."""
    sandbox = await service.known(sandbox_id, caller)
    found = await service.thread_pools.call(sandbox.network_log, key=sandbox.id)
    return await service.page(found)


@router.get("/learned", response_model=Policy)
async def learned(
    sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller
) -> Response:
    """The smallest policy that allows what was reached so far."""
    sandbox = await service.known(sandbox_id, caller)
    return answer(await service.thread_pools.call(sandbox.learned_policy, key=sandbox.id))
