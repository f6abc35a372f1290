"""Copying between files of this machine and a sandbox of a server. Blocks."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import uuid

from ..errors import (
    FileError,
    FileNotFound,
    IoError,
    RingfenceError,
    ServerUnreachable,
    file_error,
    host_file_error,
)
from ..model.base import checks
from ..model.files import DIRECTORY, FileInfo
from . import unpack
from ._sync.pauses import pause
from ._sync.transport import segment
from .answers import pause_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, BinaryIO

    from ._sync.transport import Transport

    Progress = Callable[[int, str], None]

_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_IN_MEMORY = 8 << 20
CONTENT_S = 300.0  # without a byte, while the other end works
_PARTIAL = 206
_BRIEFLY_S = 3600.0  # a sandbox that is only read from
_PATIENCE = 3  # connections in a row that bring nothing


def write_params(path: str, *, append: bool, mode: int) -> dict[str, Any]:
    """The parameters with which a file is written."""
    checks.permissions(mode)
    return {"path": path, "append": append, "mode": f"{mode:03o}"}


class FileReader:
    """How far a file was read, through as many connections as it takes. Pure.

    Where it has become another one meanwhile, it is read from the beginning: half of each is no file.

    Attributes:
        is_over: All of it was read.
    """

    def __init__(self, path: str, offset: int = 0) -> None:
        self._path, self._offset, self._first = path, offset, offset
        self._passed = self._failures = 0
        self._tag = ""
        self.is_over = False

    def request(self) -> dict[str, Any]:
        """Build the parameters and headers of the next connection."""
        headers = {"range": f"bytes={self._offset}-"} if self._offset else {}
        if self._tag and headers:
            headers["if-range"] = self._tag
        return {"params": {"path": self._path}, "headers": headers, "timeout": CONTENT_S}

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """A response has come; whether what was read before is to be forgotten."""
        tag, known = headers.get("etag", ""), self._tag
        self._tag = tag
        if status == _PARTIAL:
            self._passed = 0
            return False
        # Whole: it has changed, or nobody says how long it is, as in /proc.
        self._passed, again = self._first, bool(known) or self._offset > self._first
        self._offset = self._first
        return again

    def take(self, chunk: bytes) -> bytes:
        """The part of a piece that was asked for."""
        passed = min(self._passed, len(chunk))
        self._passed -= passed
        self._offset += len(chunk) - passed
        if len(chunk) > passed:
            self._failures = 0
        return chunk[passed:]

    def broken(self, exc: ServerUnreachable) -> float:
        """The connection broke; how long to wait before the next.

        Raises:
            ServerUnreachable: Several in a row brought nothing.
        """
        self._failures += 1
        if self._failures > _PATIENCE:
            raise exc
        return pause_s(self._failures, {})


def open_read(transport: Transport, at: str, path: str) -> BinaryIO:
    """A temporary file with the content of one of the sandbox."""
    file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  the caller closes it
    try:
        _fetch(transport, at, path, file)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[return-value]


def _fetch(
    transport: Transport, at: str, path: str, file: Any, progress: Progress | None = None
) -> None:
    """Write a file of the sandbox to `file`, which is empty; in a regular file zeros become holes."""
    reader = FileReader(path)
    has_holes = not isinstance(file, tempfile.SpooledTemporaryFile) and stat.S_ISREG(
        os.fstat(file.fileno()).st_mode
    )
    while not reader.is_over:
        try:
            with transport.stream(f"{at}/content", **reader.request()) as response:
                if reader.begin(response.status_code, response.headers):
                    file.seek(0)
                    file.truncate()
                for chunk in response.iter_raw(_CHUNK):
                    data = reader.take(chunk)
                    if has_holes and data == _ZEROS[: len(data)]:
                        file.seek(len(data), os.SEEK_CUR)
                    else:
                        file.write(data)
                    if progress:
                        progress(file.tell(), path)
                if has_holes:
                    file.truncate()
                reader.is_over = True
        except ServerUnreachable as exc:
            pause(reader.broken(exc))


class _Upload(tempfile.SpooledTemporaryFile[bytes]):
    """Sent when it is closed, unless an error closes it."""

    def __init__(self, send: Callable[[Callable[[], Iterator[bytes]]], None]) -> None:
        super().__init__(_IN_MEMORY)
        self._send: Callable[[Callable[[], Iterator[bytes]]], None] | None = send

    def close(self) -> None:
        send, self._send = self._send, None
        try:
            if send is not None:
                send(self._content)
        finally:
            super().close()

    def _content(self) -> Iterator[bytes]:
        self.seek(0)
        return iter(lambda: self.read(_CHUNK), b"")

    def __exit__(self, kind: object, *_exc: object) -> None:
        if kind is not None:
            self._send = None
        self.close()


def open_write(transport: Transport, at: str, path: str, *, append: bool, mode: int) -> BinaryIO:
    """A temporary file that becomes one of the sandbox when it is closed."""
    # An empty append fails at once where the file cannot be written, as with a local sandbox, and
    # leaves its content alone.
    params = write_params(path, append=True, mode=mode)
    transport.request("PUT", f"{at}/content", params=params, content=b"", repeat=True)
    params = write_params(path, append=append, mode=mode)

    def send(content: Callable[[], Iterator[bytes]]) -> None:
        _put(transport, at, params, content)

    return _Upload(send)  # type: ignore[return-value]


def _put(
    transport: Transport, at: str, params: dict[str, Any], content: Callable[[], Iterator[bytes]]
) -> None:
    """Write a file of the sandbox; appending is not repeated."""
    transport.request(
        "PUT",
        f"{at}/content",
        params=params,
        content=content,
        timeout_s=CONTENT_S,
        repeat=params["append"] is False,
    )


def upload(
    transport: Transport, at: str, local: str, remote: str, progress: Progress | None
) -> None:
    """Copy a file or tree into the sandbox."""
    if os.path.isdir(local):
        _upload_tree(transport, at, local, remote, progress)
        return
    try:
        with open(local, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777

            def content() -> Iterator[bytes]:
                file.seek(0)
                return _counted(iter(lambda: file.read(_CHUNK), b""), local, progress)

            _put(transport, at, write_params(remote, append=False, mode=mode), content)
    except OSError as exc:
        raise host_file_error(exc.errno or 5, local) from exc


def _upload_tree(
    transport: Transport, at: str, local: str, remote: str, progress: Progress | None
) -> None:
    from ..launcher.helpers.trees import pack

    reading, writing = os.pipe()
    problems: list[OSError] = []

    def produce() -> None:
        try:
            pack(writing, local, one_file_system=False, progress=progress, is_ours=True)
        except BrokenPipeError:
            pass  # the server's own error says why it stopped reading
        except OSError as exc:
            problems.append(exc)
        finally:
            os.close(writing)

    thread = threading.Thread(target=produce, name="ringfence-upload")
    thread.start()
    try:
        with open(reading, "rb", buffering=0) as file:
            chunks = iter(lambda: file.read(_CHUNK), b"")
            transport.request(
                "PUT",
                f"{at}/tree",
                params={"path": remote},
                content=lambda: _unless(chunks, problems, local),
                headers={"content-type": "application/x-tar"},
                timeout_s=CONTENT_S,
            )
    finally:
        thread.join()


def _unless(chunks: Iterator[bytes], problems: list[OSError], local: str) -> Iterator[bytes]:
    """A tree that could not be read whole must not look as if it had ended."""
    yield from chunks
    for exc in problems:
        raise FileError(f"{exc.filename or local}: {exc.strerror}", path=exc.filename or local)


def download(
    transport: Transport,
    at: str,
    remote: str,
    local: str,
    progress: Progress | None,
    *,
    overwrite: bool,
) -> None:
    """Copy a file or tree out of the sandbox. No name in it is trusted."""
    info = FileInfo.from_json(transport.json("GET", f"{at}/stat", params={"path": remote}))
    if info.kind == DIRECTORY:
        made: set[tuple[str, ...]] = set()
        options: dict[str, Any] = {"overwrite": overwrite, "made": made}
        for attempt in range(_PATIENCE):
            try:
                return _download_tree(transport, at, remote, local, progress, options)
            except ServerUnreachable:  # again from the beginning: files in `made` are replaced
                pause(pause_s(attempt, {}))
        return _download_tree(transport, at, remote, local, progress, options)
    try:
        with unpack.created(local, overwrite=overwrite) as file:
            _fetch(transport, at, remote, file, progress)
    except OSError as exc:
        raise host_file_error(exc.errno or 5, local) from exc


def _download_tree(
    transport: Transport,
    at: str,
    remote: str,
    local: str,
    progress: Progress | None,
    options: dict[str, Any],
) -> None:
    reading, writing = os.pipe()
    problems: list[BaseException] = []

    def receive() -> None:
        try:
            with transport.stream(
                f"{at}/tree", params={"path": remote}, timeout=CONTENT_S
            ) as response:
                for chunk in response.iter_raw(_CHUNK):
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(writing, view) :]
        except BrokenPipeError:
            pass  # unpacking has given up, and says why
        except BaseException as exc:  # noqa: BLE001  told to whoever waits
            problems.append(exc)
        finally:
            os.close(writing)

    thread = threading.Thread(target=receive, name="ringfence-download")
    thread.start()
    try:
        unpack.unpack(reading, local, progress, **options)
    except IoError:
        os.close(reading)
        reading = -1
        thread.join()
        if problems and isinstance(problems[0], RingfenceError):
            raise problems[0] from None
        raise
    finally:
        if reading >= 0:
            os.close(reading)
        thread.join()
    if problems:
        raise problems[0]


def pack_tree(transport: Transport, at: str, remote: str, file: BinaryIO) -> None:
    """Write the tar stream of a directory to `file`; nothing where there is none."""
    try:
        info = FileInfo.from_json(transport.json("GET", f"{at}/stat", params={"path": remote}))
    except FileNotFound:
        return
    if info.kind != DIRECTORY:
        raise file_error(errno.ENOTDIR, remote)
    params = {"path": remote}
    with transport.stream(f"{at}/tree", params=params, timeout=CONTENT_S) as response:
        for chunk in response.iter_raw(_CHUNK):
            file.write(chunk)


def pack_snapshot(transport: Transport, snapshot_id: str, remote: str, file: BinaryIO) -> None:
    """Write the tar stream of a directory of a snapshot to `file`, by way of a sandbox of it."""
    limited = {"mode": "limited", "allowed_hosts": []}
    body = {"snapshot_id": snapshot_id, "mounts": [], "network": limited, "ttl_s": _BRIEFLY_S}
    made = transport.json("POST", "/v1/sandboxes", body=body, key=uuid.uuid4().hex)
    at = f"/v1/sandboxes/{segment(made['id'])}"
    try:
        pack_tree(transport, f"{at}/files", remote, file)
    finally:
        transport.json("DELETE", at)


def _counted(chunks: Iterator[bytes], name: str, progress: Progress | None) -> Iterator[bytes]:
    copied = 0
    for chunk in chunks:
        yield chunk
        copied += len(chunk)
        if progress:
            progress(copied, name)
