"""Files of a sandbox: whole ones, streamed and in any size; names; moves."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO

from fastapi import Header, Query, Request
from starlette.responses import Response, StreamingResponse

from ...errors import IoError, RingfenceError, file_error
from ...model.files import FileInfo
from ...sessions.live import Live
from .. import names, schemas
from ..models import AsModel, answer
from ..routers import Router
from ..service import Service, TheCaller, TheService
from ..streaming.uploads import Upload
from ..thread_pools import COPIES

router = Router(prefix="/v1/sandboxes/{sandbox_id}/files", tags=["files"], route_class=names.Route)
Info = Annotated[FileInfo, AsModel()]
_CHUNK = 1 << 20
_BODY = {"requestBody": {"required": False, "content": schemas.BYTES}}


async def _run(service: Service, live: Live, verb: str, *args: Any, **more: Any) -> Any:
    call = getattr(live.sandbox.files, verb)
    return await service.thread_pools.call(call, *args, key=live.sandbox_id, **more)


@router.get(
    "/content",
    responses={
        200: {"content": schemas.BYTES, "description": "The file."},
        206: {"content": schemas.BYTES, "description": "The part that `Range` names."},
        416: {"description": "`Range` names nothing that is there."},
    },
    response_class=Response,
)
async def read(
    sandbox_id: schemas.SandboxId,
    path: names.FilePath,
    service: TheService,
    caller: TheCaller,
    range_: Annotated[str, Header(alias="range", max_length=100)] = "",
    if_range: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    """A file, whole or in part, as it is; whole where nobody knows how long it is, as in `/proc`.

    With its `ETag` in `If-Range`, a part is of that file as it was, or else the whole as it is.
    """
    live = await service.need(sandbox_id, caller)
    file: BinaryIO = await _run(service, live, "open_read", path)
    size = 0
    try:
        size, tag = await _size(service, live, file, path)
        if if_range and if_range != tag:
            range_ = ""
        if not size:  # nothing, or as much as comes
            pieces = _pieces(service, live, file, 0, None)
            return StreamingResponse(pieces, media_type="application/octet-stream")
        start, end = part_of(range_, size) or (0, size)
        is_part = (start, end) != (0, size)
    except ValueError:
        file.close()
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    except BaseException:
        file.close()
        raise
    headers = {"content-length": str(end - start), "accept-ranges": "bytes", "etag": tag}
    if is_part:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        _pieces(service, live, file, start, end),
        206 if is_part else 200,
        headers=headers,
        media_type="application/octet-stream",
    )


async def _size(service: Service, live: Live, file: BinaryIO, path: str) -> tuple[int, str]:
    """How long it says it is, and its entity tag; some backends have a pipe in place of the file."""
    if file.seekable():
        info = os.fstat(file.fileno())
        return info.st_size, f'"{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}"'
    found: FileInfo = await _run(service, live, "stat", path, follow=True)
    return found.size_bytes, f'"{found.size_bytes:x}-{found.mtime_s!r}"'


async def _pieces(
    service: Service, live: Live, file: BinaryIO, start: int, end: int | None
) -> AsyncIterator[bytes]:
    """Stream the announced bytes or raise: a short file must not look whole. Without `end`, stream
    to the end.
    """
    at = start if file.seekable() else 0
    try:
        with live.use.call():
            while end is None or at < end:
                size = _CHUNK if end is None else min(_CHUNK, end - at)
                data = await service.thread_pools.call(
                    _read, file, at, size, key=live.sandbox_id, pool=COPIES
                )
                if not data:
                    if end is None:
                        return
                    raise IoError("the file became shorter while it was read", retryable=True)
                at += len(data)
                if at > start:
                    yield data[max(0, start - at + len(data)) :]
    finally:
        file.close()


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    """Of a pipe, what comes next."""
    return os.pread(file.fileno(), size, at) if file.seekable() else file.read(size)


@router.put("/content", response_model=Info, openapi_extra=_BODY)
async def write(
    sandbox_id: schemas.SandboxId,
    path: names.FilePath,
    request: Request,
    service: TheService,
    caller: TheCaller,
    append: bool = False,
    mode: Annotated[str, Query(pattern="^0?[0-7]{3}$", description="of a new file")] = "644",
) -> Response:
    """Create or replace a file with the body, however large; its directory must exist.

    It is there whole or not at all: a body that breaks off leaves what was there. Not so with `append`.
    """
    live = await service.need(sandbox_id, caller)
    call, key, bits = service.thread_pools.call, live.sandbox_id, int(mode, 8)
    files = live.sandbox.files
    uploads: Upload = await call(Upload, files, path, append=append, mode=bits, key=key)
    try:
        await _take(service, live, uploads, request)
        return answer(await call(uploads.done, key=key))
    except BaseException as exc:
        service.thread_pools.later(uploads.abandon)
        if isinstance(exc, OSError):
            raise _typed(exc, path) from exc
        raise


async def _take(service: Service, live: Live, uploads: Upload, request: Request) -> None:
    waiting: list[bytes] = []
    size = 0

    async def flush() -> None:
        await service.thread_pools.call(
            uploads.write, b"".join(waiting), key=live.sandbox_id, pool=COPIES
        )

    async for chunk in request.stream():
        waiting.append(chunk)
        size += len(chunk)
        if size >= _CHUNK:
            await flush()
            waiting, size = [], 0
    await flush()


def _typed(exc: OSError, path: str) -> RingfenceError:
    return file_error(exc.errno or 5, path)


@router.get("/stat", response_model=Info)
async def stat(
    sandbox_id: schemas.SandboxId, path: names.FilePath, service: TheService, caller: TheCaller
) -> Response:
    """Stat a path itself: a symlink is not followed."""
    live = await service.need(sandbox_id, caller)
    return answer(await _run(service, live, "stat", path))


@router.get("/list", response_model=schemas.Page[Info])
async def list_(
    sandbox_id: schemas.SandboxId,
    service: TheService,
    caller: TheCaller,
    path: names.FilePath = ".",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    cursor: names.LastName = "",
) -> Response:
    """The entries of a directory, by name."""
    live = await service.need(sandbox_id, caller)
    ask, key = live.inner.files.list, live.sandbox_id
    found: list[FileInfo] = await service.thread_pools.call(ask, path, cursor, limit + 1, key=key)
    more = found[limit - 1].name if len(found) > limit else None
    return await service.page(found[:limit], more)


class Move(schemas.Form):
    """From where to where."""

    source: names.Path
    target: names.Path


@router.post("/move", response_model=Info)
async def move(
    sandbox_id: schemas.SandboxId, body: Move, service: TheService, caller: TheCaller
) -> Response:
    """Rename, replacing a file at the target."""
    live = await service.need(sandbox_id, caller)
    await _run(service, live, "move", body.source, body.target)
    return answer(await _run(service, live, "stat", body.target))


class MakeDir(schemas.Form):
    """A directory, with those above it unless told otherwise."""

    path: names.Path
    parents: bool = True


@router.post("/dirs", response_model=Info)
async def make_dir(
    sandbox_id: schemas.SandboxId, body: MakeDir, service: TheService, caller: TheCaller
) -> Response:
    """Make a directory."""
    live = await service.need(sandbox_id, caller)
    await _run(service, live, "make_dir", body.path, parents=body.parents)
    return answer(await _run(service, live, "stat", body.path))


@router.delete("", status_code=204)
async def remove(
    sandbox_id: schemas.SandboxId,
    path: names.FilePath,
    service: TheService,
    caller: TheCaller,
    recursive: bool = False,
) -> Response:
    """Remove a file, a symlink itself or an empty directory; a whole tree when `recursive`."""
    live = await service.need(sandbox_id, caller)
    await _run(service, live, "remove", path, recursive=recursive)
    return Response(status_code=204)


_ONE = re.compile(r"\Abytes=(\d{0,18})-(\d{0,18})\Z")


def part_of(header: str, size: int) -> tuple[int, int] | None:
    """From where to where, exclusive; None for the whole, which is also right for what is not understood.

    Raises:
        ValueError: Nothing of it is there.
    """
    match = _ONE.match(header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        last = int(match[2])
        if not last or not size:
            raise ValueError
        return max(0, size - last), size
    start = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    if start >= size:
        raise ValueError
    return None if end <= start else (start, end)
