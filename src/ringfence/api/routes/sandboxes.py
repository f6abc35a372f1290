"""Sandboxes: create, list, inspect, freeze, terminate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from ...errors import InvalidRequest, LifecycleError
from ...execs.evicted import come_back
from ...execs.execs import Execs
from ...model.acquire import AcquireOptions
from ...model.capabilities import Protection
from ...model.create import CreateRequest
from ...model.granted import SandboxCapabilities
from ...model.sandbox import SandboxView
from ...model.spec import SandboxSpec
from ...model.state import State
from ...model.stats import SandboxStats
from ...sessions import eviction, snapshots
from ...sessions.catalogue import describe, listing
from ...sessions.catalogue.records import NAME
from ...sessions.keys import digest_of
from ...sessions.manager import SessionManager
from .. import bodies, schemas
from ..access.caller import Caller
from ..models import AsModel, answer, json_answer, page
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.runs import TheExecs, sandbox_of
from ..thread_pools import CONTROL, ENDING

router = Router(route_class=bodies.Route, prefix="/v1/sandboxes", tags=["sandboxes"])
_CALLED_HERE = {"preferred_backend": "backend", "preferred_id": "id"}
View = Annotated[SandboxView, AsModel()]
StateName = Annotated[str, Field(pattern="^(provisioned|running|suspended|terminated)$")]


@router.post("", status_code=201, response_model=View, responses={200: {"model": View}})
async def create(
    body: Annotated[CreateRequest, AsModel()],
    request: Request,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> Response:
    """Make a sandbox. With an `Idempotency-Key`, asking again gives the same one, ended or not."""
    spec = body.spec
    if body.snapshot_id is not None:
        spec = await _restored(service, caller, body)
    metadata = {**body.metadata, NAME: body.name} if body.name else body.metadata
    options = AcquireOptions(
        preferred_id=spec.id,
        preferred_backend=body.backend,
        use_pool=body.use_pool,
        timeouts=body.timeouts,
        key=idempotency_key,
        metadata=metadata,
        snapshot_id=body.snapshot_id,
    )
    if spec.id is not None:
        spec = spec.altered(id=None)
    made, view = await service.thread_pools.call(_create, service, execs, caller, spec, options)
    request.state.made = view.id
    return answer(view, 201 if made else 200, admin=caller.is_admin)


async def _restored(service: Service, caller: Caller, body: CreateRequest) -> SandboxSpec:
    """Combine the snapshot's spec with the fields that the client sets."""
    assert body.snapshot_id is not None
    record = await service.thread_pools.call(
        snapshots.need, service.manager, body.snapshot_id, caller.client
    )
    changes = {name: getattr(body.spec, name) for name in body.given}
    return replace(snapshots.spec_of(record), **{"id": None, **changes})


def _create(
    service: Service, execs: Execs, caller: Caller, spec: SandboxSpec, options: AcquireOptions
) -> tuple[bool, SandboxView]:
    """Create a sandbox, or find the one of the same key; return whether it is new, and the sandbox."""
    manager, judge = service.manager, service.permissions.judge
    spec, options = judge(caller, spec), judge(caller, options)
    if options.key:
        # The manager knows the key of a live sandbox; an ended sandbox is not made again.
        known = manager.store.session_under_key(caller.client, options.key)
        if known is not None and manager.index.find(known.id) is None:
            if known.request != digest_of(spec, options):
                raise InvalidRequest(
                    "this idempotency key was used for another request", field="key"
                )
            return False, describe.describe(manager, known.id)
    evicted = None
    if options.snapshot_id and options.preferred_id:
        evicted = eviction.find(manager, options.preferred_id, options.snapshot_id, caller.client)
    try:
        most = caller.max_sandboxes
        lease = manager.acquire(spec, options, client_id=caller.client, most=most)
    except InvalidRequest as exc:
        exc.field = _CALLED_HERE.get(exc.field, exc.field)
        raise
    if options.preferred_id not in (None, lease.session.sandbox_id):
        lease.release()
        raise InvalidRequest("is already used by a sandbox, live or ended", field="id")
    live = manager.index.find(lease.id)
    if live is not None:
        if lease.newly_created and evicted is not None:
            come_back(manager, execs, live, evicted)
        view = describe.describe_live(live)
        if view.state != State.TERMINATED:
            return lease.newly_created, view
    return lease.newly_created, describe.describe(manager, lease.id)


@router.get("", response_model=schemas.Page[View])
async def list_(
    service: TheService,
    caller: TheCaller,
    label: Annotated[
        list[schemas.Label], Query(max_length=64, description="KEY=VALUE; all must hold")
    ] = [],  # noqa: B006
    state: Annotated[list[StateName], Query(description="default: all live states")] = [],  # noqa: B006
    name: Annotated[str | None, Query(max_length=255)] = None,
    limit: schemas.Limit = 100,
    cursor: schemas.Cursor = "",
) -> Response:
    """Sandboxes, oldest first."""
    states = tuple(State(each) for each in state)
    wanted = listing.Wanted(caller.sees, schemas.read_labels(label), states, name)
    after = schemas.read_cursor(cursor)
    found, more = await service.thread_pools.call(
        listing.page, service.manager, wanted, after, limit
    )
    return await service.page(found, schemas.write_cursor(more), admin=caller.is_admin)


@router.get("/{sandbox_id}", response_model=View)
async def get(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """A sandbox, also for a while after it has ended."""
    return await _shown(service, caller, sandbox_id)


async def _shown(service: Service, caller: Caller, sandbox_id: str) -> Response:
    view = await service.thread_pools.call(
        describe.describe, service.manager, sandbox_id, caller.sees
    )
    return answer(view, admin=caller.is_admin)


def _then_shown(manager: SessionManager, verb: str, any_id: str, sees: str | None) -> SandboxView:
    """Do it and look, in one go: of a sandbox that has just ended nothing need be read again."""
    live = manager.index.find(any_id, sees)
    getattr(manager, verb)(any_id, sees)
    return describe.describe_live(live) if live else describe.describe(manager, any_id, sees)


async def _do(
    service: Service, caller: Caller, verb: str, sandbox_id: str, pool: str = CONTROL
) -> Response:
    view = await service.thread_pools.call(
        _then_shown, service.manager, verb, sandbox_id, caller.sees, key=sandbox_id, pool=pool
    )
    return answer(view, admin=caller.is_admin)


@router.delete("/{sandbox_id}", response_model=View)
async def delete(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """End a sandbox. Legal in every state; ending it twice is once."""
    return await _do(service, caller, "terminate", sandbox_id, ENDING)


class Changes(schemas.Form):
    """Name and labels to set. Labels that are not named stay; null removes one."""

    name: Annotated[str | None, Field(max_length=255, pattern=schemas.LINE)] = None
    labels: Annotated[
        dict[str, str | None] | None,
        Field(max_length=64, json_schema_extra={"propertyNames": {"minLength": 1}}),
    ] = None


@router.patch("/{sandbox_id}", response_model=View)
async def update(
    sandbox_id: schemas.SandboxId, body: Changes, service: TheService, caller: TheCaller
) -> Response:
    """Change the name and the labels of a live sandbox."""
    change = partial(
        service.manager.change, name=body.name, labels=body.labels, client_id=caller.sees
    )
    await service.thread_pools.call(change, sandbox_id, key=sandbox_id)
    return await _shown(service, caller, sandbox_id)


class Extend(schemas.Form):
    """How long it is to live from now."""

    ttl_s: Annotated[float, Field(gt=0, le=366 * 86_400)]


@router.post("/{sandbox_id}/extend", response_model=View)
async def extend(
    sandbox_id: schemas.SandboxId, body: Extend, service: TheService, caller: TheCaller
) -> Response:
    """Let a sandbox end `ttl_s` seconds from now, whenever it was to end before."""
    manager = service.manager
    service.permissions.check_life(caller, body.ttl_s)
    await service.thread_pools.call(
        manager.extend, sandbox_id, body.ttl_s, caller.sees, key=sandbox_id
    )
    return await _shown(service, caller, sandbox_id)


@router.post("/{sandbox_id}/suspend", response_model=View)
async def suspend(
    sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller
) -> Response:
    """Freeze every process; suspending twice is once."""
    return await _do(service, caller, "suspend", sandbox_id)


@router.post("/{sandbox_id}/resume", response_model=View)
async def resume(sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller) -> Response:
    """Let them go on; resuming twice is once."""
    return await _do(service, caller, "resume", sandbox_id)


@router.get("/{sandbox_id}/stats", response_model=Annotated[SandboxStats, AsModel()])
async def stats(
    sandbox_id: schemas.SandboxId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """Return the resource usage from the kernel; null where unreadable, mostly so for an ended sandbox."""
    try:
        live = await service.need(sandbox_id, caller)
    except LifecycleError:
        over = await sandbox_of(service, caller, sandbox_id)
        count = await service.thread_pools.call(execs.count, over)
        return answer(SandboxStats(State.TERMINATED, memory_bytes=0, pids=0, execs=count))
    return answer(await service.thread_pools.call(live.sandbox.stats, key=live.sandbox_id))


@router.get("/{sandbox_id}/capabilities", response_model=Annotated[SandboxCapabilities, AsModel()])
async def capabilities(
    sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller
) -> Response:
    """Read back what the sandbox can do and what restricts it, each tried inside."""
    live = await service.need(sandbox_id, caller)
    found = await service.thread_pools.call(
        service.manager.capabilities, live.id, caller.sees, key=live.sandbox_id
    )
    return answer(found)


@router.get(
    "/{sandbox_id}/protections", response_model=schemas.Page[Annotated[Protection, AsModel()]]
)
async def protections(
    sandbox_id: schemas.SandboxId, service: TheService, caller: TheCaller
) -> Response:
    """Read back from the kernel the protections of the host."""
    sandbox = await service.known(sandbox_id, caller)
    found = await service.thread_pools.call(sandbox.protections, key=sandbox.id)
    return page([each.to_json() for each in found])


class Token(BaseModel):
    """Token that opens one sandbox; `key` is shown only this once."""

    id: str
    sandbox_id: str
    expires_at: float | None
    key: str


class NewToken(schemas.Form):
    """How long a token opens: without `ttl_s`, as long as its sandbox and the key it is made with."""

    ttl_s: Annotated[float | None, Field(gt=0, le=366 * 86_400)] = None


@router.post("/{sandbox_id}/tokens", status_code=201, response_model=Token)
async def make_token(
    sandbox_id: schemas.SandboxId,
    request: Request,
    service: TheService,
    caller: TheCaller,
    body: NewToken | None = None,
) -> Response:
    """A key that works in this sandbox: its execs, files and ports. It changes nothing about it."""
    live = await service.need(sandbox_id, caller)
    make, ttl_s = service.authenticator.make_token, body.ttl_s if body else None
    record, text = await service.thread_pools.call(
        make, caller, live.sandbox_id, live.client_id, ttl_s
    )
    request.state.made = record.id
    form = {"id": record.id, "sandbox_id": live.sandbox_id, "expires_at": record.expires_at}
    return json_answer({**form, "key": text}, 201)
