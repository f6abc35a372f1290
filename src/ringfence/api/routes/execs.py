"""Running commands in a sandbox."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path, Query, Request
from starlette.responses import Response

from ...execs.run import Run
from ...model.base.ids import check_id
from ...model.execs.exec_start import StartRequest
from ...model.execs.exec_view import ExecView
from .. import bodies, schemas
from ..exec_bodies import SignalBody, SizeBody, give, signal_number
from ..models import AsModel, answer, json_answer, page_of_texts
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.runs import TheExecs, find_run, sandbox_of, wait_for
from ..thread_pools import BODIES

router = Router(route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/execs", tags=["execs"])
View = Annotated[ExecView, AsModel()]
ExecId = Annotated[str, Path(max_length=63)]

_LONGEST_WAIT_S = 86_400.0
_ATTENDED_S = 0.01  # by the thread that starts it, where somebody waits for its end


@router.post("", status_code=201, response_model=View, responses={200: {"model": View}})
async def start(
    sandbox_id: str,
    body: Annotated[StartRequest, AsModel()],
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> Response:
    """Run a command. It goes on whether or not the client stays.

    With `wait` the answer comes when it has ended, with status 200 and its output in `result`.
    With an `Idempotency-Key`, asking again starts nothing: it answers about the same exec.
    """
    live = await service.need(sandbox_id, caller)
    wanted = service.permissions.judge(caller, body.request)
    call, key, is_new = service.thread_pools.call, live.sandbox_id, True
    attend_s = _ATTENDED_S if body.wait else 0.0
    if idempotency_key:
        once, asked = execs.start_once, idempotency_key
        run, is_new = await call(once, live, wanted, asked, key=key, attend_s=attend_s)
    else:
        run = await call(execs.start, live, wanted, key=key, attend_s=attend_s)
    if not body.wait or not await wait_for(run, body.wait_s):
        return answer(run.view(), 201 if is_new else 200)
    problem = run.view().problem
    if problem is not None:
        raise problem.error()
    return await _with_result(service, run)


async def _with_result(service: Service, run: Run) -> Response:
    view = run.view()
    if view.status is None:
        return answer(view)

    def whole() -> Response:
        return answer(view.altered(result=run.result()))

    if view.stdout_bytes + view.stderr_bytes < 1 << 16:
        return whole()  # a thread would take longer
    return await service.thread_pools.call(whole, pool=BODIES)


@router.get("")
async def list_(
    sandbox_id: str,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str, Query(pattern=schemas.ID_OR_NONE)] = "",
) -> Response:
    """Execs of a sandbox, oldest first."""
    found = await sandbox_of(service, caller, sandbox_id)
    after = check_id(cursor, "cursor") if cursor else ""
    texts = await service.thread_pools.call(
        execs.texts, found, after, limit, key=found, pool=BODIES
    )
    more = next(reversed(texts)) if len(texts) == limit else None
    return page_of_texts(texts.values(), more)


@router.get("/{exec_id}", response_model=View)
async def get(
    sandbox_id: str, exec_id: ExecId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """An exec now, without its output."""
    return answer((await find_run(service, execs, caller, sandbox_id, exec_id)).view())


@router.get("/{exec_id}/wait", response_model=View)
async def wait(
    sandbox_id: str,
    exec_id: ExecId,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    timeout_s: Annotated[float, Query(ge=0, le=_LONGEST_WAIT_S)] = 60.0,
) -> Response:
    """An exec when it has ended, with its output; after `timeout_s` as it is, still running."""
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    await wait_for(run, timeout_s)
    return await _with_result(service, run)


@router.post("/{exec_id}/signal", response_model=View)
async def signal(
    sandbox_id: str,
    exec_id: ExecId,
    body: SignalBody,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
) -> Response:
    """Send a signal to the process; nothing happens when it has ended."""
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    number = signal_number(body.signal)
    await service.thread_pools.call(run.signal, number, group=body.group, key=run.sandbox_id)
    return answer(run.view())


@router.post("/{exec_id}/kill", response_model=View)
async def kill(
    sandbox_id: str, exec_id: ExecId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """Kill the process and everything that it started; nothing happens when it has ended."""
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    await service.thread_pools.call(run.kill, key=run.sandbox_id)
    return answer(run.view())


@router.post("/{exec_id}/resize", response_model=View)
async def resize(
    sandbox_id: str,
    exec_id: ExecId,
    body: SizeBody,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
) -> Response:
    """Tell its terminal the new size."""
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    await service.thread_pools.call(run.resize, body.rows, body.cols, key=run.sandbox_id)
    return answer(run.view())


@router.post("/{exec_id}/stdin")
async def stdin(
    sandbox_id: str,
    exec_id: ExecId,
    request: Request,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    eof: bool = False,
    stall_s: Annotated[float, Query(ge=0, le=3600)] = 30.0,
) -> Response:
    """Give it input: the body is what comes at `offset` of all its input.

    The answer's `offset` is where to go on. To send the same again changes nothing. A process that
    does not read for `stall_s` leaves `offset` before the end of the body: send the rest later.
    """
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    async for chunk in request.stream():
        if not chunk:
            continue  # the end: what was just given may have ended the process
        end = offset + len(chunk)
        reached = await give(run, offset, chunk, stall_s)
        if reached < end:
            return json_answer({"offset": reached, "eof": False})
        offset = end
    if eof:
        run.end_input(offset)
    return json_answer({"offset": offset, "eof": eof})
