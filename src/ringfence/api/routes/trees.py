"""Directory trees of a sandbox: tar streams, search, watch. Helpers inside do the work."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse

from ...errors import IoError, NotADirectory, TimeoutExceeded
from ...model.base import checks
from ...model.base.jsonform import loads
from ...model.files import DIRECTORY, FileInfo
from ...model.found import MOST_LINE_BYTES, AllReplaced, FileChange, FoundFiles, FoundLines
from ...sandbox.looking import MOST_FOUND_BYTES, found_in, too_much
from .. import names, schemas
from ..access.caller import Caller
from ..models import AsModel, json_answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.pipes import Running
from ..thread_pools import BODIES

router = Router(prefix="/v1/sandboxes/{sandbox_id}/files", tags=["files"], route_class=names.Route)
_TAR: dict[str, Any] = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_BODY = {"requestBody": {"required": True, "content": {**_TAR, **schemas.BYTES}}}
_HEARTBEAT_S = 15.0
_CHANGES_BYTES = 8 << 10  # of changes, read at once on the loop
_READ_S = 0.001
Pattern = Annotated[str, Query(min_length=1, max_length=1000)]
Most = Annotated[int, Query(ge=1, le=10_000)]


@router.get(
    "/tree",
    responses={200: {"content": _TAR, "description": "A tar stream."}},
    response_class=Response,
)
async def download(
    sandbox_id: schemas.SandboxId, path: names.FilePath, service: TheService, caller: TheCaller
) -> Response:
    """A directory with all below it. A stream that breaks off was not all."""
    live = await service.need(sandbox_id, caller)
    info: FileInfo = await service.thread_pools.call(
        live.sandbox.files.stat, path, key=live.sandbox_id
    )
    if info.kind != DIRECTORY:
        raise NotADirectory(f"{path}: is a {info.kind}", path=path)
    stack = AsyncExitStack()
    running = await stack.enter_async_context(Running(service.thread_pools, live, "out", path))
    try:
        first = await running.read()
        if not first:
            await running.finish()
    except BaseException:
        await stack.aclose()
        raise

    async def rest() -> AsyncIterator[bytes]:
        async with stack:
            yield first
            async for data in running.chunks():
                yield data

    return StreamingResponse(rest(), media_type="application/x-tar")


class Unpacked(BaseModel):
    """Where the tree is now, and how long the stream was."""

    path: str
    received_bytes: int


@router.put("/tree", response_model=Unpacked, openapi_extra=_BODY)
async def upload(
    sandbox_id: schemas.SandboxId,
    path: names.FilePath,
    request: Request,
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Unpack a tar stream below `path`, made if need be; files that are there are replaced.

    Names that lead out of `path`, or through a symlink, are refused. What it may take up is the
    sandbox's own limit of disk and inodes.
    """
    live = await service.need(sandbox_id, caller)
    received = 0
    async with Running(service.thread_pools, live, "in", path) as running:
        async for chunk in request.stream():
            received += len(chunk)
            if not await running.write(chunk):
                break  # its own error says why it does not read any more
        await running.finish()
    return json_answer({"path": path, "received_bytes": received})


@router.get("/glob", response_model=Annotated[FoundFiles, AsModel()])
async def find(
    sandbox_id: schemas.SandboxId,
    pattern: Pattern,
    service: TheService,
    caller: TheCaller,
    path: names.FilePath = ".",
    limit: Most = 1000,
) -> Response:
    """Paths below `path` that match: `*` within a name, `**` any number of directories."""
    asked = {"pattern": pattern, "most": limit}
    return await _ask(service, caller, sandbox_id, "find", path, asked)


@router.get("/search", response_model=Annotated[FoundLines, AsModel()])
async def search(
    sandbox_id: schemas.SandboxId,
    pattern: Pattern,
    service: TheService,
    caller: TheCaller,
    path: names.FilePath = ".",
    regex: bool = False,
    ignore_case: bool = False,
    glob: Annotated[str, Query(max_length=1000, description="only in files that match")] = "",
    limit: Most = 1000,
) -> Response:
    """Lines of text files below `path` in which `pattern` is found."""
    asked = {
        "pattern": pattern,
        "regex": regex,
        "ignore_case": ignore_case,
        "glob": glob,
        "most": limit,
    }
    return await _ask(service, caller, sandbox_id, "search", path, asked)


class Replace(schemas.Form):
    """In which files, what by what; with `regex`, `\\\\1` is the first group."""

    paths: Annotated[list[names.Path], Field(max_length=1000)]
    pattern: Annotated[str, Field(min_length=1, max_length=10_000)]
    replacement: Annotated[str, Field(max_length=1_000_000)]
    regex: bool = False
    ignore_case: bool = False


@router.post("/replace", response_model=Annotated[AllReplaced, AsModel()])
async def replace(
    sandbox_id: schemas.SandboxId, body: Replace, service: TheService, caller: TheCaller
) -> Response:
    """Replace text in files; each is put in place whole, or left as it was."""
    asked = {**body.model_dump(exclude={"paths"}), "files": checks.texts(body.paths, "paths")}
    return await _ask(service, caller, sandbox_id, "replace", ".", asked)


async def _ask(
    service: Service, caller: Caller, sandbox_id: str, what: str, path: str, asked: dict[str, Any]
) -> Response:
    """All that a helper inside finds. What it writes is the guest's word: data, and bounded."""
    live = await service.need(sandbox_id, caller)
    text = bytearray()
    async with Running(service.thread_pools, live, what, path, _options(asked)) as running:
        async for data in running.chunks():
            text += data
            if len(text) > MOST_FOUND_BYTES:
                raise too_much()

    def read() -> Response:
        return json_answer(found_in(bytes(text)))

    return await service.thread_pools.call(read, key=live.sandbox_id, pool=BODIES)


def _options(asked: dict[str, Any]) -> str:
    return json.dumps(asked)


def _event(line: bytes) -> str:
    change = FileChange.from_json(loads(line))
    return f"event: {change.kind}\ndata: {line.decode()}\n\n"


@router.get(
    "/watch",
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Server-sent events, named by what happened.",
        }
    },
    response_class=Response,
)
async def watch(
    sandbox_id: schemas.SandboxId,
    path: names.FilePath,
    service: TheService,
    caller: TheCaller,
    recursive: bool = False,
) -> Response:
    """Stream changes at and below `path`, starting with the event `watching`."""
    live = await service.need(sandbox_id, caller)
    stack = AsyncExitStack()
    running = await stack.enter_async_context(
        Running(service.thread_pools, live, "watch", path, _options({"recursive": recursive}))
    )
    try:
        first = await running.read()
        if not first:
            await running.finish()
    except BaseException:
        await stack.aclose()
        raise

    async def events() -> AsyncIterator[str]:
        async with stack:
            data, left = first, b""
            while data:
                *lines, left = (left + data).split(b"\n")
                if len(left) > MOST_LINE_BYTES:
                    raise IoError("the helper inside sent a line that is too long")
                if lines:
                    yield "".join(map(_event, lines))
                data = b""
                while not data:
                    await service.share.take(_READ_S)
                    try:
                        data = await running.read(_HEARTBEAT_S, _CHANGES_BYTES)
                        break
                    except TimeoutExceeded:
                        yield ": nothing happened\n\n"
            await running.finish()

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )
