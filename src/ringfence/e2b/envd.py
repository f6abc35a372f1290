"""Routes that E2B's agent inside answers over plain HTTP: files, health, metrics."""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import stat
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, BinaryIO, cast

from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ..api.routes import files as our_files
from ..api.thread_pools import COPIES
from ..errors import (
    FileError,
    FileNotFound,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
    RingfenceError,
)
from ..model.files import DIRECTORY
from ..sessions import liveness
from . import entries, filesystem, multipart, processes
from .call import ApiError, Call, Route, not_running
from .entries import absolute
from .rpc import home_of, user_of
from .settings import HOME, ROOT

_PIECE = 1 << 20
_GZIP = 31  # zlib's window bits for a gzip header
_COPY = 'mkdir -p -- "$(dirname -- "$2")" && cp --preserve=xattr -- "$1" "$2"'
_LOOK = f"""{filesystem.LOOK}[ -e "$1" ] || exit 44
[ -r "$1" ] || {{ echo "$1: permission denied" >&2; exit 1; }}"""
_TAKE = """[ -e "$1" ] || exit 44
umask 077; cat -- "$1" > "$2" && chown --reference="$3" -- "$2" || { rm -f -- "$2"; exit 1; }"""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MOST_FILES = 1000  # of one upload


def _user(call: Call) -> str | None:
    return user_of(call, call.request.query_params.get("username"))


async def _path(call: Call) -> str:
    return absolute(call.request.query_params.get("path", ""), await home_of(call, _user(call)))


async def download(call: Call) -> Response:
    """Send a file or the part that `Range` names; a whole one by gzip if that is all the client takes."""
    path, headers = await _path(call), call.request.headers
    sandbox_id = call.inside.sandbox_id
    part = headers.get("range", ""), headers.get("if-range", "")
    try:
        info = await call.call(call.inside.sandbox.files.stat, path, follow=True)
        if info.kind == DIRECTORY:
            raise ApiError(400, f"path '{path}' is a directory")
        response = await our_files.read(sandbox_id, path, call.service, call.caller, *part)
    except PermissionDenied:
        user = _user(call)
        if user is None:
            raise
        response = await _read_as_named(call, user, path, part)
    except (FileNotFound, NotADirectory) as exc:
        if path == _BOOT_ID:  # gVisor's kernel has none
            return PlainTextResponse(call.shared.tokens.boot_id(call.inside, call.notes.boots))
        raise ApiError(404, f"path '{path}' does not exist") from exc
    except IsADirectory as exc:
        raise ApiError(400, f"path '{path}' is a directory") from exc
    # A line break in a header would cut the connection.
    name = re.sub(r"[^ !#-\[\]-~]", "?", posixpath.basename(path))
    response.headers["content-disposition"] = f'inline; filename="{name}"'
    takes = headers.get("accept-encoding", "")
    # Only where it is all that the client takes: to compress costs more than loopback.
    is_gzip = takes.strip() == "gzip" and response.status_code == 200
    if is_gzip and isinstance(response, StreamingResponse):
        response.body_iterator = _deflated(call, response.body_iterator)
        del response.headers["content-length"]
        response.headers["content-encoding"] = "gzip"
    return response


async def _read_as_named(call: Call, user: str, path: str, part: tuple[str, str]) -> Response:
    """Send a copy of a file that the sandbox's own user may not read, and the named one may."""
    sandbox, aside = call.inside.sandbox, f"/tmp/.e2b-{secrets.token_hex(8)}"
    # Only root may give the copy to the sandbox's own user.
    steps = ((_TAKE, ROOT),) if user == ROOT else ((_LOOK, user), (_TAKE, ROOT))
    for script, each in steps:
        command = ["/bin/sh", "-c", script, "sh", path, aside, HOME]
        result = await call.call(sandbox.exec, command, user=each)
        if result.exit_code == 44:
            raise ApiError(404, f"path '{path}' does not exist")
        if not result.ok:
            raise ApiError(400, result.stderr_text.strip())
    try:
        return await our_files.read(call.inside.sandbox_id, aside, call.service, call.caller, *part)
    finally:  # it is open
        await call.call(sandbox.files.remove, aside)


async def _deflated(call: Call, pieces: Any) -> AsyncIterator[bytes]:
    deflate, do = zlib.compressobj(1, wbits=_GZIP), call.service.thread_pools.call
    async for each in pieces:
        # A megabyte takes 30 ms.
        if data := await do(deflate.compress, each, key=call.inside.sandbox_id, pool=COPIES):
            yield data
    yield deflate.flush()


async def upload(call: Call) -> Response:
    """Write files: one as the body itself, or several as a form."""
    home = await home_of(call, _user(call))
    notes = entries.given(call.request.headers)
    kind = call.request.headers.get("content-type", "")
    if kind.startswith("multipart/"):
        boundary = multipart.boundary_of(kind)
        return JSONResponse(
            await _write_parts(call, multipart.parts(call.stream(), boundary), notes, home)
        )
    if not call.request.query_params.get("path"):
        raise ApiError(400, "the query has no path")
    writing = _Writing(call, await _path(call), notes)
    try:
        async for data in call.stream():
            await writing.add(data)
        return JSONResponse([await writing.done()])
    except BaseException:
        writing.abandon()
        raise


async def _write_parts(
    call: Call, pieces: AsyncIterator[tuple[str | None, bytes]], notes: dict[str, str], home: str
) -> list[dict[str, Any]]:
    given = call.request.query_params.get("path")
    written: list[dict[str, Any]] = []
    writing: _Writing | None = None
    try:
        async for name, data in pieces:
            if name is None:
                if writing is not None:
                    await writing.add(data)
                continue
            if writing is not None:
                written.append(await writing.done())
                writing = None
            if len(written) >= _MOST_FILES:
                raise ApiError(413, f"over {_MOST_FILES} files in one request")
            path = given or name
            if not path:
                continue  # a field that is no file
            if given and written:
                raise ApiError(400, "several files were sent for one path")
            writing = _Writing(call, absolute(path, home), notes)
        if writing is not None:
            written.append(await writing.done())
    except BaseException:
        if writing is not None:
            writing.abandon()
        raise
    if not written:
        raise ApiError(400, "the form has no file")
    return written


class _Writing:
    """A file that is being written in place, as E2B does: who watches it sees it so.

    It is opened with the first megabyte or at the end, so a short upload that breaks off changes nothing. What
    a long one has written by then is removed.
    """

    def __init__(self, call: Call, path: str, notes: dict[str, str]) -> None:
        self._call, self._path, self._notes = call, path, notes
        self._file: BinaryIO | None = None
        self._waiting: list[bytes] = []
        self._aside = ""  # where it is written first, if only the named user may write it
        self._size = 0

    async def _begin(self) -> BinaryIO:
        files, path = self._call.inside.sandbox.files, self._path

        def start() -> BinaryIO:
            try:
                try:
                    file = files.open_write(path)
                except FileNotFound:
                    files.make_dir(posixpath.dirname(path), parents=True)
                    file = files.open_write(path)
            except PermissionDenied:
                if _user(self._call) is None:
                    raise
                self._aside = f"/tmp/.e2b-{secrets.token_hex(8)}"
                return files.open_write(self._aside)
            _settle_mode(file)
            return file

        try:
            self._file = file = await self._call.call(start)
            return cast(BinaryIO, file)
        except IsADirectory as exc:
            raise ApiError(400, f"path '{path}' is a directory") from exc
        except FileError as exc:
            raise ApiError(400, exc.message) from exc

    async def add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= _PIECE:
            await self._flush()

    async def _flush(self) -> None:
        data, self._waiting, self._size = b"".join(self._waiting), [], 0
        file = self._file or await self._begin()

        def write() -> None:
            file.write(data)
            file.flush()

        call = self._call.service.thread_pools.call
        try:
            await call(write, key=self._call.inside.sandbox_id, pool=COPIES)
        except OSError as exc:
            raise ApiError(507, f"not enough disk space available: {exc.strerror}") from exc

    async def done(self) -> dict[str, Any]:
        await self._flush()
        file = self._file
        assert file is not None
        inner = self._call.inside.inner.files
        await self._call.call(entries.put, inner, self._aside or self._path, file, self._notes)
        await self._call.call(file.close)
        if self._aside:
            command = ["/bin/sh", "-c", _COPY, "sh", self._aside, self._path]
            sandbox, user = self._call.inside.sandbox, _user(self._call)
            result = await self._call.call(sandbox.exec, command, user=user)
            await self._call.call(sandbox.files.remove, self._aside)
            if not result.ok:
                raise ApiError(400, result.stderr_text.strip())
        form = {"name": posixpath.basename(self._path), "type": "file", "path": self._path}
        return {**form, "metadata": self._notes} if self._notes else form

    def abandon(self) -> None:
        file, files = self._file, self._call.inside.sandbox.files
        if file is None:
            return

        def remove() -> None:
            with suppress(OSError, RingfenceError):
                file.close()
            with suppress(RingfenceError):
                files.remove(self._aside or self._path)

        self._call.service.thread_pools.later(remove)


def _settle_mode(file: BinaryIO) -> None:
    """Set the mode that the file has: E2B does so, and whoever watches is told of it."""
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        with suppress(OSError):  # as an ordinary user the file may be another id's
            os.fchmod(file.fileno(), stat.S_IMODE(mode))


async def health(call: Call) -> Response:
    """Say that the sandbox runs; one that has ended by itself does not."""
    if await call.call(liveness.notice_loss, call.service.manager, call.inside):
        raise not_running(call.inside.sandbox_id)
    return Response(status_code=204)


async def metrics(call: Call) -> Response:
    found = await call.call(call.inside.sandbox.stats)
    limits = call.inside.spec.limits
    form = {
        "ts": int(time.time()),
        "cpu_count": max(1, round(limits.cpus or 1)),
        "mem_used": found.memory_bytes or 0,
        "mem_total": limits.memory_bytes or 0,
    }
    return JSONResponse(form)


async def envs(call: Call) -> Response:
    """Return the sandbox's own variables."""
    return JSONResponse(dict(call.inside.spec.env))


async def init(_call: Call) -> Response:
    """Refuse what E2B's own orchestrator sends."""
    raise ApiError(403, "the sandbox is set up by the server")


ROUTES = [
    *processes.ROUTES,
    *filesystem.ROUTES,
    Route("GET", "/files", download),
    Route("POST", "/files", upload, is_stream=True),
    Route("GET", "/health", health),
    Route("GET", "/metrics", metrics),
    Route("GET", "/envs", envs),
    Route("POST", "/init", init),
]
