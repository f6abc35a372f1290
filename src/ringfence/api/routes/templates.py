"""Templates that clients build, and the files that go into them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Annotated, Any

from fastapi import Header, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import FileResponse, Response, StreamingResponse

from ...errors import Forbidden
from ...model.template import TemplateRequest, TemplateView
from ...store.templates import FAILED, READY
from .. import bodies, schemas
from ..models import AsModel, answer, json_answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.lines import NDJSON
from ..thread_pools import BODIES, COPIES, ENDING

router = Router(route_class=bodies.Route, prefix="/v1/templates", tags=["templates"])
uploads = Router(prefix="/v1/uploads", tags=["templates"])
View = Annotated[TemplateView, AsModel()]
AnyName = Annotated[str, Path(pattern="^[a-z0-9_][a-z0-9_.-]{0,62}$", description="id or name")]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the content")]
_PIECE = 256 << 10
TAR = "application/x-tar"
_BODY = {"requestBody": {"required": True, "content": schemas.BYTES}}


class Uploaded(BaseModel):
    """An upload, by the SHA-256 of its content."""

    digest: str
    present: bool


class Publish(schemas.Form):
    """Visibility of a template."""

    public: bool


@router.post("", status_code=201, response_model=View)
async def build(
    body: Annotated[TemplateRequest, AsModel()],
    request: Request,
    service: TheService,
    caller: TheCaller,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> Response:
    """Build a template in the background. One of the same name is replaced once it is ready.

    With an `Idempotency-Key`, asking again begins nothing: it answers about the same build.
    """
    judge, templates = service.permissions.judge, service.manager.templates

    def begin() -> TemplateView:
        return templates.begin(judge(caller, body), caller.client, idempotency_key)

    made = await service.thread_pools.call(begin, key=caller.client)
    request.state.made = made.id
    return answer(made, 201)


@router.get("", response_model=schemas.Page[View])
async def list_(service: TheService, caller: TheCaller) -> Response:
    """Templates of one's own, and public ones, oldest first."""
    every = await service.thread_pools.call(service.manager.templates.list, caller.sees)
    return await service.page(every)


@router.get("/{template}", response_model=View)
async def get(template: AnyName, service: TheService, caller: TheCaller) -> Response:
    """A template, and how its newest build stands."""
    look = service.manager.templates.look
    return answer(await service.thread_pools.call(look, template, caller.sees))


@router.patch("/{template}", response_model=View)
async def publish(
    template: AnyName, body: Publish, service: TheService, caller: TheCaller
) -> Response:
    """Let every client use a template, for admins; or its owner alone."""
    if body.public and not caller.is_admin:
        raise Forbidden("only an admin may have a public template", field="public")
    change = service.manager.templates.publish
    return answer(
        await service.thread_pools.call(change, template, public=body.public, sees=caller.sees)
    )


@router.delete("/{template}", status_code=204)
async def delete(template: AnyName, service: TheService, caller: TheCaller) -> Response:
    """Remove a template and end its builds; its sandboxes go on."""
    remove = service.manager.templates.delete
    await service.thread_pools.call(remove, template, caller.sees, key=caller.client, pool=ENDING)
    return Response(status_code=204)


@router.get(
    "/{template}/logs",
    responses={200: {"content": {NDJSON: {}}, "description": "JSON lines."}},
    response_class=Response,
)
async def logs(
    template: AnyName,
    service: TheService,
    caller: TheCaller,
    build_id: Annotated[str, Query(max_length=63)] = "",
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    follow: bool = False,
    heartbeat_s: Annotated[float, Query(ge=0.05, le=3600)] = 15.0,
) -> Response:
    """Lines of a build's log, of the newest one without `build_id`; with `follow`, until it ends.

    The `cursor` of a line is the `offset` to go on from.
    """
    templates = service.manager.templates

    def found() -> str:
        record = templates.find(template, caller.sees, is_mine=True)
        return templates.build_of(record, build_id).id

    known = await service.thread_pools.call(found)
    lines = _lines(service, known, offset, heartbeat_s if follow else 0.0)
    first = await anext(lines)  # a wrong offset is an error of the request

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for each in lines:
            yield each

    return StreamingResponse(rest(), media_type=NDJSON, headers={"cache-control": "no-store"})


async def _lines(
    service: Service, build_id: str, offset: int, heartbeat_s: float
) -> AsyncIterator[bytes]:
    templates, call = service.manager.templates, service.thread_pools.call
    news, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> tuple[bytes, int, dict[str, Any]]:
        record = templates.records.build(build_id)
        status, error = (record.status, record.error) if record else (FAILED, "deleted")
        data = templates.places.read_log(build_id, offset, _PIECE)
        text, at = bytearray(), offset
        for line in data.splitlines():
            at += len(line) + 1
            text += b'{"type":"log",%b,"cursor":%d}\n' % (line[1:-1], at)
        return bytes(text), at, {"status": status, "error": error}

    stop = templates.listen(lambda: loop.call_soon_threadsafe(news.set))
    try:
        while True:
            news.clear()
            await service.share.take()
            text, offset, form = await call(read, pool=BODIES)
            if text:
                yield text
                continue
            over = form["status"] in (READY, FAILED)
            if over or not heartbeat_s:
                yield _line("end" if over else "running", offset, **form)
                return
            try:
                async with asyncio.timeout(heartbeat_s):
                    await news.wait()
            except TimeoutError:
                yield _line("heartbeat", offset)
    finally:
        stop()


def _line(kind: str, cursor: int, **more: str) -> bytes:
    return json.dumps({"type": kind, **more, "cursor": cursor}).encode() + b"\n"


@uploads.get(
    "/{digest}",
    response_model=Uploaded,
    responses={200: {"content": {TAR: {}}, "description": "Whether it is there, or it."}},
)
async def known(
    digest: Digest, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """Tell if this client has uploaded this content; `Accept: application/x-tar` gives the content."""
    places = service.manager.templates.places
    if request.headers.get("accept") == TAR:
        path = await service.thread_pools.call(places.upload, caller.client, digest)
        return FileResponse(path, media_type=TAR, headers={"cache-control": "no-store"})
    has = await service.thread_pools.call(places.has, caller.client, digest)
    return json_answer({"digest": digest, "present": has})


@uploads.put("/{digest}", status_code=201, response_model=Uploaded, openapi_extra=_BODY)
async def upload(
    digest: Digest, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """Store a tar stream, perhaps gzipped, for the `copy` steps of this client's templates."""
    await store(service, caller.client, request.stream(), digest=digest)
    return json_answer({"digest": digest, "present": True}, 201)


async def store(
    service: Service, client: str, stream: AsyncIterator[bytes], *, digest: str = "", name: str = ""
) -> str:
    """Store an upload; its SHA-256. See `Upload.finish`."""
    call, begin = service.thread_pools.call, service.manager.templates.upload
    with closing(await call(begin, client, key=client, pool=COPIES)) as incoming:
        waiting = bytearray()
        async for data in stream:
            waiting += data
            if len(waiting) >= _PIECE:
                await call(incoming.write, bytes(waiting), key=client, pool=COPIES)
                waiting.clear()
        await call(incoming.write, bytes(waiting), key=client, pool=COPIES)
        found: str = await call(incoming.finish, digest, name, key=client, pool=COPIES)
        return found
