"""A terminal, or pipes, over a WebSocket."""

from __future__ import annotations

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from ...errors import RingfenceError
from ..problems import problem
from ..routers import Router
from ..service import TheCaller, TheService
from ..streaming.attachment import Attachment
from ..streaming.runs import TheExecs, find_run

router = Router(prefix="/v1/sandboxes/{sandbox_id}/execs/{exec_id}", tags=["execs"])


@router.websocket("/attach")
async def attach(
    socket: WebSocket,
    sandbox_id: str,
    exec_id: str,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    offset: str = "",
) -> None:
    """Output from `offset` on (a cursor, or `now`), and input; see `Attachment` for the messages.

    Who has been refused gets a problem, as of any other request.
    """
    try:
        run = await find_run(service, execs, caller, sandbox_id, exec_id)
        attachment = Attachment(service, run, socket, offset)
    except RingfenceError as exc:
        await socket.send_denial_response(problem(exc))
        return
    await socket.accept()
    try:
        await attachment.serve()
    except WebSocketDisconnect:
        pass
