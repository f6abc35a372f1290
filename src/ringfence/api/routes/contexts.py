"""Contexts: interpreters in a sandbox that keep their variables."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from ...contexts.context import (
    LANGUAGE,
    LISTS_VARIABLES,
    MOST_VARIABLES_BYTES,
    PYTHON,
    variables_of,
)
from ...contexts.frames import MOST_CODE_BYTES, argv_of, language_of, request
from ...errors import ExecError, ExecNotFound, LifecycleError, TooManyRequests, Unsupported
from ...execs.execs import Execs
from ...execs.run import Run
from ...model.execs.exec import ExecRequest
from .. import bodies, schemas
from ..models import json_answer
from ..routers import Router
from ..schema import VARIABLE
from ..service import Service, TheCaller, TheService
from ..streaming.cells import Events, begin, cell_offset, new_cell, sending_of
from ..streaming.lines import NDJSON
from ..streaming.runs import TheExecs, find_run, sandbox_of, wait_for
from ..thread_pools import BODIES

router = Router(
    route_class=bodies.Route, prefix="/v1/sandboxes/{sandbox_id}/contexts", tags=["contexts"]
)
ContextId = Annotated[str, Path(max_length=63)]
CellId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Heartbeat = Annotated[float, Query(ge=0.05, le=3600)]
_MOST = 1000  # contexts of a sandbox
_VARIABLES_S, _ENDING_S = 20.0, 30.0  # clients wait 30 s as a rule
_DONE = {"cache-control": "no-store"}


class NewContext(schemas.Form):
    """Language, working directory and environment of an interpreter."""

    language: str = Field(PYTHON, pattern=f"^({LANGUAGE.pattern})$")
    cwd: str | None = Field(None, min_length=1, max_length=4095)
    env: dict[str, str] = Field(default_factory=dict, json_schema_extra={"propertyNames": VARIABLE})


class NewCell(schemas.Form):
    """Code, and the seconds until it is interrupted; with `input`, it may ask for lines."""

    code: str = Field(max_length=MOST_CODE_BYTES)
    timeout_s: float | None = Field(None, ge=0.001, le=366 * 86_400)
    input: bool = False


class InputLine(schemas.Form):
    """Answer to an event `input`; null is the end of the input."""

    text: str | None = Field(max_length=MOST_CODE_BYTES)


class Context(schemas.Form):
    """A context, running or ended."""

    id: str
    sandbox_id: str
    language: str
    running: bool
    cwd: str | None
    created_at: float


class Variables(schemas.Form):
    """Variables of the cells: `name`, `type` and a short `value` each."""

    items: list[dict[str, str]]


def _form(run: Run) -> dict[str, Any]:
    view = run.view()
    return {
        "id": view.id,
        "sandbox_id": view.sandbox_id,
        "language": language_of(view.argv),
        "running": view.running,
        "cwd": view.cwd,
        "created_at": view.created_at,
    }


async def _find(
    service: Service, execs: Execs, caller: TheCaller, sandbox_id: str, context_id: str
) -> Run:
    run = await find_run(service, execs, caller, sandbox_id, context_id)
    if not language_of(run.view().argv):
        raise ExecNotFound(f"exec {context_id} is no context")
    return run


async def _live(
    service: Service, execs: Execs, caller: TheCaller, sandbox_id: str, context_id: str
) -> Run:
    run = await _find(service, execs, caller, sandbox_id, context_id)
    if not run.running:
        raise LifecycleError(
            f"context {run.id} has ended", hint="restart it, or create another one"
        )
    return run


async def _awake(
    service: Service, execs: Execs, caller: TheCaller, sandbox_id: str, context_id: str
) -> Run:
    run = await _live(service, execs, caller, sandbox_id, context_id)
    if (await service.need(sandbox_id, caller)).sandbox.state == "suspended":
        raise LifecycleError("the sandbox is suspended", hint="resume it first")
    return run


async def _begin(
    service: Service, execs: Execs, caller: TheCaller, sandbox_id: str, body: NewContext
) -> Run:
    live = await service.need(sandbox_id, caller)
    if len(execs.running_of(live.sandbox_id)) >= _MOST:
        raise TooManyRequests(f"{_MOST} execs run in this sandbox", hint="close a context")
    command = ExecRequest(
        tuple(argv_of(body.language)), cwd=body.cwd, env=body.env, stream_stdin=True
    )
    wanted = service.permissions.judge(caller, command)
    run = await service.thread_pools.call(execs.start, live, wanted, key=live.sandbox_id)
    await begin(service, run)
    return run


async def _end(service: Service, run: Run) -> None:
    await service.thread_pools.call(run.kill, key=run.sandbox_id)
    await wait_for(run, _ENDING_S)


@router.post("", status_code=201, response_model=Context)
async def create(
    sandbox_id: str, body: NewContext, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """Begin an interpreter; the answer comes when it is ready. It outlives client and server."""
    return json_answer(_form(await _begin(service, execs, caller, sandbox_id, body)), 201)


@router.get("", response_model=schemas.Page[Context])
async def list_(
    sandbox_id: str, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """Contexts of a sandbox that run, oldest first, whoever began them."""
    found = await sandbox_of(service, caller, sandbox_id)
    runs = [each for each in execs.running_of(found) if language_of(each.view().argv)]
    return json_answer({"items": [_form(each) for each in runs], "next_cursor": None})


@router.get("/{context_id}", response_model=Context)
async def get(
    sandbox_id: str, context_id: ContextId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """A context now; `running` is false once its interpreter has ended."""
    return json_answer(_form(await _find(service, execs, caller, sandbox_id, context_id)))


@router.delete("/{context_id}", status_code=204)
async def close(
    sandbox_id: str, context_id: ContextId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """End a context with all that it started; ending it twice is once."""
    run = await _find(service, execs, caller, sandbox_id, context_id)
    await _end(service, run)
    return Response(status_code=204)


@router.post("/{context_id}/restart", status_code=201, response_model=Context)
async def restart(
    sandbox_id: str,
    context_id: ContextId,
    body: NewContext,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
) -> Response:
    """End a context, and begin a fresh one with another id."""
    run = await _find(service, execs, caller, sandbox_id, context_id)
    await _end(service, run)
    return json_answer(_form(await _begin(service, execs, caller, sandbox_id, body)), 201)


@router.post("/{context_id}/interrupt", status_code=204)
async def interrupt(
    sandbox_id: str,
    context_id: ContextId,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    cell_id: Annotated[str, Query(pattern="^([0-9a-f]{32})?$")] = "",
) -> Response:
    """Raise KeyboardInterrupt in the cell that runs, or in `cell_id` only if that runs."""
    run = await _live(service, execs, caller, sandbox_id, context_id)
    await sending_of(service).send(run, request("interrupt", cell=cell_id or None))
    return Response(status_code=204)


@router.post("/{context_id}/input", status_code=204)
async def give_input(
    sandbox_id: str,
    context_id: ContextId,
    body: InputLine,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
) -> Response:
    """Answer an event `input` of the cell that runs."""
    run = await _live(service, execs, caller, sandbox_id, context_id)
    await sending_of(service).send(run, request("answer", text=body.text))
    return Response(status_code=204)


_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}}


@router.post("/{context_id}/cells", response_class=Response, responses=_STREAM)
async def run_cell(
    sandbox_id: str,
    context_id: ContextId,
    body: NewCell,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    heartbeat_s: Heartbeat = 15.0,
) -> Response:
    """Run a cell, and stream its events as JSON lines. It goes on whether or not the client stays.

    The first event, `start`, has the cell's id; the last one, `end`, its error and counts. Between
    them are `stdout`, `stderr`, `result`, `input`, `dropped` and `heartbeat`. Cells of one context
    run one after the other, `timeout_s` counts from the request.
    """
    run = await _awake(service, execs, caller, sandbox_id, context_id)
    sending, cell_id = sending_of(service), new_cell(run)
    data = request("run", cell=cell_id, code=body.code, input=body.input)
    await sending.send(run, data)
    offset = cell_offset(run, cell_id)
    events = Events(service, sending, run, cell_id, offset, body.timeout_s)
    return StreamingResponse(events.stream(heartbeat_s), media_type=NDJSON, headers=_DONE)


@router.get("/{context_id}/cells/{cell_id}", response_class=Response, responses=_STREAM)
async def events(
    sandbox_id: str,
    context_id: ContextId,
    cell_id: CellId,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    cursor: Annotated[int, Query(ge=0, le=2**62)] = 0,
    heartbeat_s: Heartbeat = 15.0,
) -> Response:
    """Stream the events of a cell after `cursor`, or all of them, also after a restart of the server."""
    run = await _find(service, execs, caller, sandbox_id, context_id)
    offset = max(cursor, cell_offset(run, cell_id))
    events = Events(service, sending_of(service), run, cell_id, offset)
    return StreamingResponse(events.stream(heartbeat_s), media_type=NDJSON, headers=_DONE)


@router.get("/{context_id}/variables", response_model=Variables)
async def variables(
    sandbox_id: str, context_id: ContextId, service: TheService, execs: TheExecs, caller: TheCaller
) -> Response:
    """List the variables of a context of Python or Node."""
    run = await _awake(service, execs, caller, sandbox_id, context_id)
    if language_of(run.view().argv) not in LISTS_VARIABLES:
        raise Unsupported("variables of this language are not listed", hint="print them")
    sending, cell_id = sending_of(service), new_cell(run)
    await sending.send(run, request("variables", cell=cell_id))
    found = Events(service, sending, run, cell_id, cell_offset(run, cell_id), _VARIABLES_S)
    items: list[dict[str, str]] | None = None
    async for lines in found.stream(3600.0):
        if len(lines) > MOST_VARIABLES_BYTES:
            raise ExecError(f"the list of variables is over {MOST_VARIABLES_BYTES} bytes long")
        for line in lines.splitlines():
            event = json.loads(line)
            if event["type"] == "result":
                # A program inside may have written it, to keep the event loop busy.
                text = event["data"].get("application/json", "null").encode()
                form = await service.thread_pools.call(bodies.loads, text, pool=BODIES)
                items = variables_of(form)
            elif event["type"] == "end" and items is None:
                said = (event["error"] or {}).get("value", "no answer")
                raise ExecError(f"variables cannot be listed: {said}")
    return json_answer({"items": items})
