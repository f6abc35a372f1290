"""Forks of a sandbox, and merges of one into another."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Request
from pydantic import Field
from starlette.responses import Response

from ...backends.optional import Continuable, Forkable
from ...contexts.frames import language_of
from ...execs.execs import Execs
from ...execs.live_forks import LiveForks
from ...fork.branches import check_arguments
from ...model.fork import MOST_FORKS, ForkReport, Merged
from ...model.limits import Limits
from ...model.net.network import NetworkPolicy
from ...model.sandbox import SandboxView
from ...model.spec import SandboxSpec
from ...model.state import State
from ...sessions.catalogue import describe
from ...sessions.live import Live
from .. import bodies, schemas
from ..access.caller import Caller
from ..models import AsModel, answer, json_answer
from ..routers import Router
from ..schema import VARIABLE
from ..service import Service, TheCaller, TheService
from ..streaming.cells import is_idle, sending_of
from ..streaming.runs import Signal, TheExecs
from ..thread_pools import COPIES

router = Router(route_class=bodies.Route, prefix="/v1/sandboxes", tags=["forks"])
_View = Annotated[SandboxView, AsModel()]
_Report = Annotated[ForkReport, AsModel()]
_Merged = Annotated[Merged, AsModel()]
_Labels = Annotated[
    dict[str, str], Field(max_length=64, json_schema_extra={"propertyNames": {"minLength": 1}})
]
_Secrets = Annotated[
    dict[str, str], Field(max_length=64, json_schema_extra={"propertyNames": VARIABLE})
]


class Fork(schemas.Form):
    """How many forks, and what differs from the sandbox that is forked."""

    n: Annotated[int, Field(ge=1, le=MOST_FORKS)] = 1
    processes: Annotated[str, Field(pattern="^(auto|none|required)$")] = "auto"
    network: Annotated[NetworkPolicy, AsModel()] | None = None
    limits: Annotated[Limits, AsModel()] | None = None
    labels: _Labels | None = None
    secrets: _Secrets | None = None


class Forks(schemas.Page[_View]):
    """The new sandboxes, and what they took along."""

    report: _Report
    execs: Annotated[
        list[dict[str, str]],
        Field(description="Of each sandbox: ids of the execs that go on there, by their ids here."),
    ]


class Merge(schemas.Form):
    """Where to merge to, and what both sides come from."""

    into: Annotated[str, Field(min_length=1, max_length=63)]
    base: Annotated[str, Field(min_length=1, max_length=128)]
    path: Annotated[str, Field(min_length=1, max_length=4096)] = "."
    prefer: Annotated[str, Field(pattern="^(ours|theirs)$")] | None = None
    dry_run: bool = False


@router.post(
    "/{sandbox_id}/fork", status_code=201, response_model=Forks, responses={200: {"model": Forks}}
)
async def fork(
    sandbox_id: schemas.SandboxId,
    request: Request,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    body: Fork | None = None,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> Response:
    """Make new sandboxes with the files of this one and what runs in it, which goes on; same owner.

    With an `Idempotency-Key`, asking again gives the same ones as long as all live.
    """
    live = await service.need(sandbox_id, caller)
    wanted = body or Fork()
    check_arguments(wanted.n, wanted.processes)
    going_on = Signal()
    async with AsyncExitStack() as held:
        busy = await hold_cells(service, execs, live, wanted.processes, held)
        carry = LiveForks(execs, live.sandbox_id, busy, going_on.ring)
        call = partial(_fork, service, caller, live.sandbox_id, wanted, idempotency_key, carry)
        forking = asyncio.ensure_future(
            service.thread_pools.call(call, key=live.sandbox_id, pool=COPIES)
        )
        forking.add_done_callback(lambda _: going_on.ring())
        await going_on.wait(None)
    is_new, made = await forking
    request.state.made = " ".join(view.id for view in made)
    items = [view.to_json(admin=caller.is_admin) for view in made]
    form = {"items": items, "next_cursor": None, "report": carry.report.to_json()}
    return json_answer({**form, "execs": carry.execs}, 201 if is_new else 200)


async def hold_cells(
    service: Service, execs: Execs, live: Live, processes: str, held: AsyncExitStack
) -> str:
    """Keep cells of a sandbox from beginning; the id of a context that runs one, where there is one."""
    # Else no kernel answers. A fork in which nothing was started yet is provisioned.
    is_awake = live.inner.session.state in (State.PROVISIONED, State.RUNNING)
    is_copied = isinstance(live.inner, Forkable | Continuable)
    if processes == "none" or not is_copied or not is_awake:
        return ""
    for run in execs.running_of(live.sandbox_id):
        if language_of(run.view().argv):
            await held.enter_async_context(sending_of(service).hold(run))
            if not await is_idle(service, run):
                return run.id
    return ""


def _fork(
    service: Service, caller: Caller, sandbox_id: str, body: Fork, key: str, carry: LiveForks
) -> tuple[bool, list[SandboxView]]:
    """Fork, or find the forks of the same key; return whether they are new, and the sandboxes."""
    manager = service.manager
    changes: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("network", "limits", "labels", "secrets")
        if getattr(body, name) is not None
    }

    def judge(spec: SandboxSpec) -> SandboxSpec:
        return service.permissions.judge(caller, spec)

    leases = manager.fork(
        sandbox_id,
        body.n,
        processes=body.processes,
        changes=changes,
        judge=judge,
        client_id=caller.sees,
        most=caller.max_sandboxes,
        key=key,
        carry=carry,
    )
    return leases[0].newly_created, [describe.describe(manager, each.id) for each in leases]


@router.post("/{sandbox_id}/merge", response_model=_Merged)
async def merge(
    sandbox_id: schemas.SandboxId, body: Merge, service: TheService, caller: TheCaller
) -> Response:
    """Merge what has changed in a directory since a snapshot into the same directory of another sandbox."""
    live = await service.need(sandbox_id, caller)
    target = await service.need(body.into, caller)
    call = partial(
        service.manager.merge,
        path=body.path,
        prefer=body.prefer,
        dry_run=body.dry_run,
        client_id=caller.sees,
    )

    def merged() -> Response:
        return answer(call(live.sandbox_id, target.sandbox_id, body.base))

    return await service.thread_pools.call(merged, key=live.sandbox_id, pool=COPIES)
