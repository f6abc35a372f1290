"""The execution service: a command in, a result out, without a sandbox to look after."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ...execution.service import ExecutionService
from ...model.execution import ExecutionRequest, ExecutionResult
from ...model.execution_config import ExecutionConfig
from ...model.execution_info import ExecutionInfo
from .. import bodies
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(route_class=bodies.Route, prefix="/api/v1/sandbox", tags=["execution"])
Result = Annotated[ExecutionResult, AsNoun()]


async def _executions(connection: HTTPConnection) -> ExecutionService:
    found: ExecutionService = connection.app.state.executions
    return found


TheExecutions = Annotated[ExecutionService, Depends(_executions)]


@router.post(
    "/execute", response_model=Result, responses={202: {"description": "It waits or runs."}}
)
async def execute(
    body: Annotated[ExecutionRequest, AsNoun()],
    service: TheService,
    executions: TheExecutions,
    caller: TheCaller,
    wait: bool = True,
) -> Response:
    """Run a command in a sandbox of its own; without `wait`, answer at once.

    It runs to its end, and its result is kept, whether or not the client is still there. An `id` of
    the client's choice makes asking again safe.
    """
    asked = service.permissions.judge(caller, body)
    future = await service.lanes.call(
        executions.submit,
        asked,
        client_id=caller.client,
        wait=wait,
        most_sandboxes=caller.max_sandboxes,
    )
    result: ExecutionResult = await asyncio.shield(asyncio.wrap_future(future))
    return answer(result, 200 if result.status.is_final else 202)


@router.get("/status/{execution_id}", response_model=Result)
async def status(
    execution_id: str, service: TheService, executions: TheExecutions, caller: TheCaller
) -> Response:
    """An execution as it stands, or its result, also after a restart of the server."""
    return answer(await service.lanes.call(executions.status, execution_id, caller.sees))


@router.post("/kill/{execution_id}", response_model=Result)
async def kill(
    execution_id: str, service: TheService, executions: TheExecutions, caller: TheCaller
) -> Response:
    """End an execution; the answer comes when its whole process tree is gone."""
    future = await service.lanes.call(executions.kill, execution_id, caller.sees)
    result: ExecutionResult = await asyncio.shield(asyncio.wrap_future(future))
    return answer(result)


@router.get("/info", response_model=Annotated[ExecutionInfo, AsNoun()])
async def info(service: TheService, executions: TheExecutions, caller: TheCaller) -> Response:
    """Which tiers there are, and where not, why; the config; the system-call policy."""
    return answer(await service.lanes.call(executions.info, caller.sees), admin=caller.is_admin)


@router.patch("/config", response_model=Annotated[ExecutionConfig, AsNoun()])
async def change(body: dict[str, Any], service: TheService, executions: TheExecutions) -> Response:
    """Replace some keys of the config, such as `network_enabled`: kept, and in force at once.

    What is valid only together is refused as a whole; then nothing has changed. For admins.
    """
    return answer(await service.lanes.call(executions.change, body))
