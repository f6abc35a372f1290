"""Events of a server, as a stream of server-sent events that reconnects and resumes."""

from __future__ import annotations

import time
from contextlib import aclosing

from ...errors import ServerUnreachable
from ...model.base.jsonform import loads
from ...model.event import GAP, Event
from ..answers import pause_s
from .pauses import pause
from .transport import AsyncTransport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_PATIENCE = 3  # connections in a row that bring nothing


class _Place:
    """How far a stream was read."""

    def __init__(self, since: int) -> None:
        self.seq, self.last_id = since, ""


async def follow(transport: AsyncTransport, since: int) -> AsyncGenerator[Event, None]:
    """Every event once; one of kind `gap` where some were missed for good.

    Raises:
        ServerUnreachable: Nothing came through several connections in a row.
    """
    place, failures = _Place(since), 0
    while True:
        before = place.last_id
        try:
            async with aclosing(_once(transport, place)) as events:
                async for event in events:
                    yield event
        except ServerUnreachable:
            failures = 0 if place.last_id != before else failures + 1
            if failures > _PATIENCE:
                raise
            await pause(pause_s(failures, {}))


async def _once(transport: AsyncTransport, place: _Place) -> AsyncGenerator[Event, None]:
    headers = {"last-event-id": place.last_id} if place.last_id else {}
    params = {"follow": True, "since": place.seq}
    async with transport.stream("/v1/events", params=params, headers=headers) as response:
        new_id = kind = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                new_id = value
            elif name == "event":
                kind = value
            elif name == "data" and kind == GAP:
                told = loads(value)
                reason = told.get("reason") or f"{told.get('lost')} events were missed"
                yield Event(place.seq, GAP, time.time(), "", "", "", reason=reason)
            elif name == "data":
                event = Event.from_json(loads(value))
                place.seq, place.last_id = event.seq, new_id
                yield event
    raise ServerUnreachable(f"{transport.address.shown}: the stream of events ended")
