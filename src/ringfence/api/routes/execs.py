"""Running commands in a sandbox."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from starlette.responses import Response

from ...model.exec import ExecRequest, ExecResult
from ...sandbox.aio import AsyncSandbox
from ..nouns import AsNoun, answer
from ..service import TheCaller, TheService

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["execs"])


@router.post("/execs", response_model=Annotated[ExecResult, AsNoun()])
async def start(
    sandbox_id: str,
    body: dict[str, Any],
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Run a command to its end."""
    live = await service.need(sandbox_id, caller)
    body.pop("wait", None)
    asked = ExecRequest.from_json(body)
    result = await AsyncSandbox(live.sandbox).exec(
        asked.argv,
        cwd=asked.cwd,
        env=asked.env,
        user=asked.user,
        stdin=asked.stdin,
        timeout_s=asked.timeout_s,
        max_output_bytes=asked.max_output_bytes,
    )
    return answer(result)
