"""Saved files of sandboxes. `POST /v1/sandboxes` with a `snapshot_id` restores one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Annotated

from fastapi import Query, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from ...errors import LifecycleError, SandboxLost, SnapshotNotFound
from ...execs.evicted import EvictedExecs
from ...model.base import checks
from ...model.changes import Changes
from ...model.session import Snapshot
from ...sessions import eviction, snapshots
from .. import bodies, schemas
from ..access.caller import Caller
from ..models import AsModel, answer, json_answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.runs import Signal, TheExecs
from ..thread_pools import BODIES, COPIES
from .forks import hold_cells

router = Router(route_class=bodies.Route, prefix="/v1", tags=["snapshots"])
Form = Annotated[Snapshot, AsModel()]
Compared = Annotated[Changes, AsModel()]


def _notes(given: dict[str, str]) -> dict[str, str]:
    checks.weigh("metadata", checks.NOTES_BYTES, checks.string_map(given, "metadata"))
    return given


_Named = Annotated[str, Field(min_length=1)]


class Take(schemas.Form):
    """Notes on a snapshot."""

    metadata: Annotated[dict[_Named, str], AfterValidator(_notes)] = Field(default_factory=dict)


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model=Form)
async def take(
    sandbox_id: schemas.SandboxId,
    request: Request,
    service: TheService,
    caller: TheCaller,
    body: Take | None = None,
) -> Response:
    """Save the sandbox's files; restorable after the sandbox is gone."""
    return await _saved(service.manager.snapshot, sandbox_id, request, service, caller, body)


@router.post("/sandboxes/{sandbox_id}/checkpoint", status_code=201, response_model=Form)
async def checkpoint(
    sandbox_id: schemas.SandboxId,
    request: Request,
    service: TheService,
    caller: TheCaller,
    body: Take | None = None,
) -> Response:
    """Save files and memory, and end the sandbox: restored, all that ran in it goes on."""
    return await _saved(service.manager.checkpoint, sandbox_id, request, service, caller, body)


class Eviction(schemas.Form):
    """The snapshot in the snapshot_store from which another node restores an evicted sandbox."""

    sandbox_id: str
    snapshot_id: str


@router.post(
    "/sandboxes/{sandbox_id}/evict",
    status_code=201,
    response_model=Eviction,
    responses={200: {"model": Eviction}},
)
async def evict(
    sandbox_id: schemas.SandboxId,
    request: Request,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    body: Take | None = None,
) -> Response:
    """Save files, memory and execs in the snapshot_store, and end the sandbox: another node restores it.

    `ringfence nodes drain` asks a node for this. While something in it cannot be saved, or a client is
    being served by it, it goes on. Asking again gives the same snapshot until it is restored.
    """
    manager = service.manager
    try:
        live = await service.need(sandbox_id, caller)
    except (LifecycleError, SandboxLost):
        left = await service.thread_pools.call(eviction.snapshot_of, manager, sandbox_id)
        if left is None:
            raise
        return json_answer({"sandbox_id": sandbox_id, "snapshot_id": left})
    going_on = Signal()
    metadata = body.metadata if body else {}
    async with AsyncExitStack() as held:
        busy = await hold_cells(service, execs, live, "required", held)
        carry = EvictedExecs(execs, live.sandbox_id, busy, going_on.ring)
        call = partial(eviction.evict, manager, live, metadata, carry)
        made = await service.thread_pools.call(call, key=live.sandbox_id, pool=COPIES)
    request.state.made = made
    return json_answer({"sandbox_id": live.sandbox_id, "snapshot_id": made}, 201)


async def _saved(
    save: Callable[[str, dict[str, str], str | None], Snapshot],
    sandbox_id: str,
    request: Request,
    service: Service,
    caller: Caller,
    body: Take | None,
) -> Response:
    live = await service.need(sandbox_id, caller)
    metadata = body.metadata if body else {}

    def saved() -> Snapshot:
        manager = service.manager
        service.permissions.check_snapshots(caller, lambda: manager.snapshots(caller.sees))
        return save(live.sandbox_id, metadata, caller.sees)

    made = await service.thread_pools.call(saved, key=live.sandbox_id, pool=COPIES)
    request.state.made = made.id
    return answer(made, 201)


@router.get("/sandboxes/{sandbox_id}/changes", response_model=Compared)
async def changes(
    sandbox_id: schemas.SandboxId,
    service: TheService,
    caller: TheCaller,
    since: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
) -> Response:
    """List the files that differ from those of a snapshot, or without `since` of a new sandbox."""
    live = await service.need(sandbox_id, caller)

    def compared() -> Response:
        return answer(service.manager.changes(live.sandbox_id, since, caller.sees))

    return await service.thread_pools.call(compared, key=live.sandbox_id, pool=COPIES)


@router.get("/snapshots", response_model=schemas.Page[Form])
async def list_(
    service: TheService,
    caller: TheCaller,
    sandbox_id: Annotated[str | None, Query(max_length=63)] = None,
    limit: schemas.Limit = 100,
    cursor: schemas.Cursor = "",
) -> Response:
    """Snapshots, oldest first."""
    after = schemas.read_cursor(cursor)
    every = await service.thread_pools.call(
        service.manager.snapshots, caller.sees, key=caller.client, pool=BODIES
    )
    mine = sorted((each for each in every if each.id > after), key=lambda each: each.id)
    found = [each for each in mine if sandbox_id in (None, each.session_id)]
    more = found[limit - 1].id if len(found) > limit else None
    return await service.page(found[:limit], schemas.write_cursor(more))


@router.get("/snapshots/{snapshot_id}", response_model=Form)
async def get(snapshot_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Return a snapshot."""
    manager = service.manager

    def find() -> list[Snapshot]:
        with suppress(SnapshotNotFound):  # an admin also sees those without an owner
            snapshots.need(manager, snapshot_id, caller.sees)
        return manager.snapshots(caller.sees)

    for each in await service.thread_pools.call(find, key=caller.client, pool=BODIES):
        if each.id == snapshot_id:
            return answer(each)
    raise SnapshotNotFound(f"no snapshot {snapshot_id!r}")


@router.delete("/snapshots/{snapshot_id}", status_code=204)
async def delete(snapshot_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Remove a snapshot; sandboxes restored from it are not touched."""
    await service.thread_pools.call(service.manager.delete_snapshot, snapshot_id, caller.sees)
    return Response(status_code=204)
