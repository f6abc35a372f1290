"""Live events of sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query
from starlette.responses import Response, StreamingResponse

from ...model.event import Event
from .. import schemas
from ..access.caller import Caller
from ..models import AsModel
from ..routers import Router
from ..service import Service, TheCaller, TheService

router = Router(prefix="/v1/events", tags=["events"])
_HEARTBEAT_S = 15.0
_LAST_ID = Header(max_length=64, description="as SSE clients send it when they come back")


@router.get(
    "",
    response_model=schemas.Page[Annotated[Event, AsModel()]],
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def events(
    service: TheService,
    caller: TheCaller,
    follow: Annotated[bool, Query(description="stay, as server-sent events")] = False,
    since: Annotated[int, Query(ge=0, le=2**62, description="only events after this `seq`")] = 0,
    last_event_id: Annotated[str, _LAST_ID] = "",
) -> Response:
    """The last events, oldest first; with `follow`, a stream that goes on.

    A stream's ids are `EPOCH-SEQ`. When events were missed for good, or the server has counted
    anew, it says so with an event `gap`.
    """
    log = service.manager.events
    if not follow:
        found, _lost = await service.thread_pools.call(log.since, since)
        return await service.page([each for each in found if _mine(caller, each)])
    epoch, _, seq = last_event_id.rpartition("-")
    anew = bool(last_event_id) and (epoch != log.epoch or not seq.isdecimal())
    after = 0 if anew else int(seq or since)
    return StreamingResponse(
        _stream(service, caller, after, anew),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _mine(caller: Caller, event: Event) -> bool:
    return caller.sees in (None, event.client_id)


async def _stream(service: Service, caller: Caller, after: int, anew: bool) -> AsyncIterator[str]:
    log, loop = service.manager.events, asyncio.get_running_loop()
    news = asyncio.Event()

    def wake(_event: Event) -> None:
        loop.call_soon_threadsafe(news.set)

    stop = log.listen(wake)
    try:
        if anew:
            yield 'event: gap\ndata: {"reason": "the server was started anew"}\n\n'
        while True:
            news.clear()
            found, lost = log.since(after)
            if lost:
                yield f'event: gap\ndata: {{"lost": {lost}}}\n\n'
            for event in found:
                after = event.seq
                if _mine(caller, event):
                    data = json.dumps(event.to_json(), separators=(",", ":"))
                    yield f"id: {log.epoch}-{event.seq}\nevent: {event.kind}\ndata: {data}\n\n"
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await news.wait()
            except TimeoutError:
                yield ": nothing happened\n\n"
    finally:
        stop()
