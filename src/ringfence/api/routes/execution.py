"""The execution service: a command in, a result out, without a sandbox to look after."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import WithJsonSchema
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ...execution.service import ExecutionService
from ...model.execution.config import ExecutionConfig
from ...model.execution.execution import ExecutionRequest, ExecutionResult
from ...model.execution.info import ExecutionInfo
from .. import bodies
from ..models import MARK, AsModel, answer
from ..routers import Router
from ..service import TheCaller, TheService

router = Router(route_class=bodies.Route, prefix="/api/v1/sandbox", tags=["execution"])
Result = Annotated[ExecutionResult, AsModel()]
Changes = Annotated[dict[str, Any], WithJsonSchema({MARK: "ExecutionConfig"})]


async def _executions(connection: HTTPConnection) -> ExecutionService:
    found: ExecutionService = connection.app.state.executions
    return found


TheExecutions = Annotated[ExecutionService, Depends(_executions)]
_PLAIN = "`error` as a text, and -1 for no exit code; else as `plain_results` of the config says"
Plain = Annotated[bool | None, Query(description=_PLAIN)]


def _told(
    result: ExecutionResult, executions: ExecutionService, plain: bool | None, status: int = 200
) -> Response:
    if plain is None:
        plain = executions.config.plain_results
    return answer(result, status, plain=plain)


@router.post(
    "/execute", response_model=Result, responses={202: {"description": "It waits or runs."}}
)
async def execute(
    body: Annotated[ExecutionRequest, AsModel()],
    service: TheService,
    executions: TheExecutions,
    caller: TheCaller,
    wait: bool = True,
    plain: Plain = None,
) -> Response:
    """Run a command in a sandbox of its own; without `wait`, answer at once.

    It runs to its end, and its result is kept, whether or not the client is still there. An `id` of
    the client's choice makes asking again safe.
    """
    asked = service.permissions.judge(caller, body)
    future = await service.thread_pools.call(
        executions.submit,
        asked,
        client_id=caller.client,
        wait=wait,
        most_sandboxes=caller.max_sandboxes,
    )
    result: ExecutionResult = await asyncio.shield(asyncio.wrap_future(future))
    return _told(result, executions, plain, 200 if result.status.is_final else 202)


@router.get("/status/{execution_id}", response_model=Result)
async def status(
    execution_id: str,
    service: TheService,
    executions: TheExecutions,
    caller: TheCaller,
    plain: Plain = None,
) -> Response:
    """An execution as it stands, or its result, also after a restart of the server."""
    result = await service.thread_pools.call(executions.status, execution_id, caller.sees)
    return _told(result, executions, plain)


@router.post("/kill/{execution_id}", response_model=Result)
async def kill(
    execution_id: str,
    service: TheService,
    executions: TheExecutions,
    caller: TheCaller,
    plain: Plain = None,
) -> Response:
    """End an execution; the answer comes when its whole process tree is gone."""
    future = await service.thread_pools.call(executions.kill, execution_id, caller.sees)
    result: ExecutionResult = await asyncio.shield(asyncio.wrap_future(future))
    return _told(result, executions, plain)


@router.get("/info", response_model=Annotated[ExecutionInfo, AsModel()])
async def info(service: TheService, executions: TheExecutions, caller: TheCaller) -> Response:
    """Which tiers there are, and where not, why; the config; the system-call policy."""
    return answer(
        await service.thread_pools.call(executions.info, caller.sees), admin=caller.is_admin
    )


@router.patch("/config", response_model=Annotated[ExecutionConfig, AsModel()])
async def change(body: Changes, service: TheService, executions: TheExecutions) -> Response:
    """Replace some keys of the config, such as `network_enabled`: kept, and in force at once.

    What is valid only together is refused as a whole; then nothing has changed. For admins.
    """
    return answer(await service.thread_pools.call(executions.change, body))
