"""Sessions: a client's leases, with everything that `SessionManager` has."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from ...model.acquire import AcquireOptions, AttachRequest
from ...model.client_session import ClientSession, SessionState
from ...model.spec import SandboxSpec
from ...sessions.lease import Lease
from .. import bodies, schemas
from ..access.caller import Caller
from ..models import AsModel, answer, json_answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..thread_pools import ENDING

router = Router(route_class=bodies.Route, prefix="/v1/sessions", tags=["sessions"])
Session = Annotated[ClientSession, AsModel()]
StateName = Annotated[str, Field(pattern="^(active|detached|suspended)$")]


class Acquire(schemas.Form):
    """The spec, how to acquire it, and the client it is for: null is the caller; others are for admins."""

    spec: Annotated[SandboxSpec, AsModel()] = SandboxSpec()
    options: Annotated[AcquireOptions, AsModel()] = AcquireOptions()
    client_id: Annotated[str, Field(max_length=255, pattern=schemas.LINE)] | None = None


class Leased(BaseModel):
    """A session, and whether it is new."""

    session: Session
    newly_created: bool


class Release(schemas.Form):
    """With `keep_alive`, a fresh sandbox of the same kind is kept warm instead."""

    keep_alive: bool = False


class Default(schemas.Form):
    """The sandbox that a client means when it names none; null for none."""

    sandbox_id: Annotated[str, Field(max_length=63)] | None


class DefaultSession(BaseModel):
    """The session of the default sandbox; null where there is none, or it has ended."""

    session: Session | None


def _leased(request: Request, lease: Lease) -> Response:
    session = lease.session
    request.state.made = session.session_id
    form: dict[str, Any] = {"session": session.to_json(), "newly_created": lease.newly_created}
    return json_answer(form, 201 if lease.newly_created else 200)


@router.post("", status_code=201, response_model=Leased, responses={200: {"model": Leased}})
async def acquire(
    body: Acquire, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """A session on a sandbox as `spec` asks, which no other client has ever used."""
    return _leased(request, await service.thread_pools.call(_acquired, service, caller, body))


def _acquired(service: Service, caller: Caller, body: Acquire) -> Lease:
    judge = service.permissions.judge
    return service.manager.acquire(
        judge(caller, body.spec, "spec"),
        judge(caller, body.options, "options"),
        client_id=service.permissions.client_of(caller, body.client_id),
        most=caller.max_sandboxes,
    )


@router.post("/attach", status_code=200, response_model=Leased, responses={201: {"model": Leased}})
async def attach(
    body: Annotated[AttachRequest, AsModel()],
    request: Request,
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Work with a certain sandbox: detached, suspended, or in use by the same client already."""
    return _leased(request, await service.thread_pools.call(_attached, service, caller, body))


def _attached(service: Service, caller: Caller, body: AttachRequest) -> Lease:
    wanted = service.permissions.judge(caller, body)
    client = service.permissions.client_of(caller, body.client_id)
    wanted = wanted.altered(client_id=client)
    return service.manager.attach(wanted, most=caller.max_sandboxes)


@router.get("", response_model=schemas.Page[Session])
async def list_(
    service: TheService,
    caller: TheCaller,
    state: Annotated[list[StateName], Query()] = [],  # noqa: B006
    label: Annotated[list[schemas.Label], Query(max_length=64)] = [],  # noqa: B006
) -> Response:
    """Sessions that have not ended, oldest first."""
    found = await service.thread_pools.call(
        service.manager.list,
        caller.sees,
        states=tuple(SessionState(each) for each in state),
        labels=schemas.read_labels(label),
    )
    return await service.page(found)


@router.get("/default", response_model=DefaultSession)
async def default(service: TheService, caller: TheCaller) -> Response:
    """The caller's default sandbox."""
    found = await service.thread_pools.call(service.manager.default_sandbox, caller.client)
    return json_answer({"session": found.to_json() if found else None})


@router.put("/default", response_model=DefaultSession)
async def set_default(body: Default, service: TheService, caller: TheCaller) -> Response:
    """Choose it."""
    manager = service.manager
    await service.thread_pools.call(manager.set_default_sandbox, caller.client, body.sandbox_id)
    return await default(service, caller)


@router.get("/{session_id}", response_model=Session)
async def get(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """A session, also for a while after it has ended."""
    return answer(await service.thread_pools.call(service.manager.get, session_id, caller.sees))


@router.post("/{session_id}/release", response_model=Session)
async def release(
    session_id: schemas.AnyId, service: TheService, caller: TheCaller, body: Release | None = None
) -> Response:
    """End a session that is no longer needed; releasing it twice is once."""
    found = await service.thread_pools.call(
        service.manager.release,
        session_id,
        keep_alive=body.keep_alive if body else False,
        client_id=caller.sees,
        key=session_id,
        pool=ENDING,
    )
    return answer(found)


async def _verb(service: Service, caller: TheCaller, session_id: str, verb: str) -> Response:
    call = getattr(service.manager, verb)
    pool = {"pool": ENDING} if verb == "terminate" else {}
    return answer(
        await service.thread_pools.call(call, session_id, caller.sees, key=session_id, **pool)
    )


@router.post("/{session_id}/detach", response_model=Session)
async def detach(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Leave a session alone for a while; what runs goes on. Detaching twice is once."""
    return await _verb(service, caller, session_id, "detach")


@router.post("/{session_id}/suspend", response_model=Session)
async def suspend(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Freeze every process of a session."""
    return await _verb(service, caller, session_id, "suspend")


@router.post("/{session_id}/resume", response_model=Session)
async def resume(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Let its processes go on, and make it active."""
    return await _verb(service, caller, session_id, "resume")


@router.post("/{session_id}/touch", response_model=Session)
async def touch(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """Say that it is still wanted: its timeouts begin anew."""
    return await _verb(service, caller, session_id, "touch")


@router.post("/{session_id}/terminate", response_model=Session)
async def terminate(session_id: schemas.AnyId, service: TheService, caller: TheCaller) -> Response:
    """End it and its sandbox. Legal in every state; ending it twice is once."""
    return await _verb(service, caller, session_id, "terminate")
