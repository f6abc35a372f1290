"""The output of an exec: the bytes of one stream, or events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.responses import Response, StreamingResponse

from ...errors import InvalidRequest
from ...execs.run import Run
from ...spool.reader import Reader
from ...spool.spool import NAMES
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.breaking import BreakableResponse, BrokenOff
from ..streaming.lines import BOTH, NDJSON, SSE, Lines
from ..streaming.runs import Bell, TheExecs, Watching, find_run
from ..thread_pools import BODIES
from .execs import ExecId

router = Router(prefix="/v1/sandboxes/{sandbox_id}/execs/{exec_id}", tags=["execs"])

BYTES = "application/octet-stream"
_PIECE = 256 << 10
_OFFSET = r"^([0-9]{1,18}(\.[0-9]{1,18})?)?$"
_DONE = {"cache-control": "no-store"}


@router.get(
    "/output",
    response_class=Response,
    responses={200: {"content": {BYTES: {}, NDJSON: {}, SSE: {}}}},
)
async def output(
    sandbox_id: str,
    exec_id: ExecId,
    request: Request,
    service: TheService,
    execs: TheExecs,
    caller: TheCaller,
    stream: Annotated[str, Query(pattern="^(stdout|stderr|both)$")] = BOTH,
    offset: Annotated[str, Query(pattern=_OFFSET)] = "",
    follow: bool = False,
    heartbeat_s: Annotated[float, Query(ge=0.05, le=3600)] = 15.0,
    last_event_id: Annotated[str, Header(max_length=40)] = "",
) -> Response:
    """Return the output from an offset on; with `follow`, until the exec ends.

    One stream: its bytes, unless `Accept` asks for events. Gaps are never silent:
    `x-ringfence-offset` is the offset of the body, `x-ringfence-dropped-bytes` the number of bytes
    missing before it, and the body ends before the next gap. Repeat from the new offset until
    `x-ringfence-end` is `true`.

    Both streams: events, as JSON lines or server-sent, with heartbeats while there is no output.
    The `cursor` of an event, or the header `Last-Event-ID`, is the `offset` to continue from.
    """
    run = await find_run(service, execs, caller, sandbox_id, exec_id)
    accept = request.headers.get("accept", "")
    if stream == BOTH or SSE in accept or NDJSON in accept:
        kind = SSE if SSE in accept else NDJSON
        lines = Lines(run, stream, last_event_id or offset, kind)
        events = _events(service, run, lines, heartbeat_s if follow else 0.0)
        return StreamingResponse(events, media_type=kind, headers=_DONE)
    if offset and not (offset.isdecimal() and len(offset) <= 18):
        raise InvalidRequest("must be a number", field="offset")
    return await _bytes(service, run, NAMES.index(stream), int(offset or 0), follow)


async def _events(
    service: Service, run: Run, lines: Lines, heartbeat_s: float
) -> AsyncIterator[bytes]:
    with lines, Bell(run) as bell, Watching(service, run.sandbox_id):
        while True:
            bell.clear()
            over = run.done.done()
            await service.share.take()
            text = await service.thread_pools.call(lines.batch, pool=BODIES)
            if text:
                yield text
            elif over or not heartbeat_s:
                yield lines.last()
                return
            elif not await bell.wait(heartbeat_s):
                yield lines.heartbeat()


async def _bytes(service: Service, run: Run, stream: int, offset: int, follow: bool) -> Response:
    track = run.spool.tracks[stream]
    if offset > track.total:
        raise InvalidRequest(f"only {track.total} bytes were sent so far", field="offset")
    closed = track.closed
    reader = Reader(track, offset)
    first = await service.thread_pools.call(reader.next, _PIECE)
    begin, data = (first.offset, first.data) if first else (offset, b"")
    # Of what is there now the body's end is known: the next gap, or the present. It goes on coming while
    # we look: what was not there when we read is for the next request, or for following.
    kept = track.kept
    end = next((end for start, end in kept if data and start <= begin < end), begin)
    has_gap = any(start > end for start, _ in kept)
    headers = {
        **_DONE,
        "x-ringfence-offset": str(begin),
        "x-ringfence-dropped-bytes": str(first.dropped_bytes if first else 0),
    }
    if follow and not closed and not has_gap:
        body = _follow(service, run, stream, reader, data)
        return StreamingResponse(body, media_type=BYTES, headers=headers)
    headers["x-ringfence-next-offset"] = str(end)
    headers["x-ringfence-end"] = "true" if closed and end == track.total else "false"
    headers["content-length"] = str(end - begin)
    body = _until(service, reader, end, data)
    return BreakableResponse(body, media_type=BYTES, headers=headers)


async def _until(service: Service, reader: Reader, end: int, data: bytes) -> AsyncIterator[bytes]:
    """Up to `end`. What is dropped meanwhile breaks the connection: the length was promised."""
    with reader:
        left = end - reader.offset + len(data)
        while data:
            yield data[:left]
            left -= len(data)
            if left <= 0:
                return
            piece = await service.thread_pools.call(reader.next, min(left, _PIECE))
            if piece is None or piece.dropped_bytes:
                raise BrokenOff("output was dropped before it was sent")
            data = piece.data


async def _follow(
    service: Service, run: Run, stream: int, reader: Reader, data: bytes
) -> AsyncIterator[bytes]:
    """Until the stream has ended, or something was dropped before it could be sent."""
    track = run.spool.tracks[stream]
    with reader, Bell(run) as bell, Watching(service, run.sandbox_id):
        if data:
            yield data
        while True:
            bell.clear()
            closed = track.closed
            piece = await service.thread_pools.call(reader.next, _PIECE)
            if piece is not None:
                if piece.dropped_bytes:
                    return
                yield piece.data
            elif closed:
                return
            else:
                await bell.wait(None)
