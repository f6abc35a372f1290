"""Saved files of sandboxes. `POST /v1/sandboxes` with a `snapshot_id` restores one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from ...errors import SnapshotNotFound
from ...model import checks
from ...model.snapshot import Snapshot
from .. import bodies, forms
from ..caller import Caller
from ..lanes import COPIES
from ..nouns import AsNoun, answer
from ..service import Service, TheCaller, TheService

router = APIRouter(route_class=bodies.Route, prefix="/v1", tags=["snapshots"])
Form = Annotated[Snapshot, AsNoun()]


def _notes(given: dict[str, str]) -> dict[str, str]:
    checks.weigh("metadata", checks.NOTES_BYTES, checks.string_map(given, "metadata"))
    return given


class Take(forms.Form):
    """Notes on a snapshot."""

    metadata: Annotated[dict[str, str], AfterValidator(_notes)] = Field(default_factory=dict)


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model=Form)
async def take(
    sandbox_id: forms.SandboxId,
    request: Request,
    service: TheService,
    caller: TheCaller,
    body: Take | None = None,
) -> Response:
    """Save the sandbox's files; restorable after the sandbox is gone."""
    return await _saved(service.manager.snapshot, sandbox_id, request, service, caller, body)


@router.post("/sandboxes/{sandbox_id}/checkpoint", status_code=201, response_model=Form)
async def checkpoint(
    sandbox_id: forms.SandboxId,
    request: Request,
    service: TheService,
    caller: TheCaller,
    body: Take | None = None,
) -> Response:
    """Save files and memory, and end the sandbox: restored, all that ran in it goes on."""
    return await _saved(service.manager.checkpoint, sandbox_id, request, service, caller, body)


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
    made = await service.lanes.call(
        save, live.sandbox_id, metadata, caller.sees, key=live.sandbox_id, lane=COPIES
    )
    request.state.made = made.id
    return answer(made, 201)


@router.get("/snapshots", response_model=forms.Page[Form])
async def list_(
    service: TheService,
    caller: TheCaller,
    sandbox_id: Annotated[str | None, Query(max_length=63)] = None,
    limit: forms.Limit = 100,
    cursor: forms.Cursor = "",
) -> Response:
    """Snapshots, oldest first."""
    after = forms.read_cursor(cursor)
    every = await service.lanes.call(service.manager.snapshots, caller.sees)
    mine = sorted((each for each in every if each.id > after), key=lambda each: each.id)
    found = [each for each in mine if sandbox_id in (None, each.session_id)]
    more = found[limit - 1].id if len(found) > limit else None
    return await service.page(found[:limit], forms.write_cursor(more))


@router.get("/snapshots/{snapshot_id}", response_model=Form)
async def get(snapshot_id: forms.AnyId, service: TheService, caller: TheCaller) -> Response:
    """One snapshot."""
    every = await service.lanes.call(service.manager.snapshots, caller.sees)
    for each in every:
        if each.id == snapshot_id:
            return answer(each)
    raise SnapshotNotFound(f"no snapshot {snapshot_id!r}")


@router.delete("/snapshots/{snapshot_id}", status_code=204)
async def delete(snapshot_id: forms.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Remove a snapshot; sandboxes restored from it are not touched."""
    await service.lanes.call(service.manager.delete_snapshot, snapshot_id, caller.sees)
    return Response(status_code=204)
