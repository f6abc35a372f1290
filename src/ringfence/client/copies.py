"""Copying between files of this machine and a sandbox of a server. Blocks."""

from __future__ import annotations

import os
import tempfile
import threading

from ..errors import FileError, IoError, RingfenceError, file_error
from ..model import checks
from ..model.files import DIRECTORY, FileInfo
from . import unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    from ._sync.transport import Transport

    Progress = Callable[[int, str], None]

_CHUNK = 1 << 20
_IN_MEMORY = 8 << 20
_CONTENT_S = 300.0


def write_params(path: str, *, append: bool, mode: int) -> dict[str, Any]:
    """The parameters with which a file is written."""
    checks.permissions(mode)
    return {"path": path, "append": append, "mode": f"{mode:03o}"}


def open_read(transport: Transport, at: str, path: str) -> BinaryIO:
    """A temporary file with the content of one of the sandbox."""
    file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  the caller closes it
    try:
        for chunk in _content(transport, at, path):
            file.write(chunk)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[return-value]


def _content(transport: Transport, at: str, path: str) -> Iterator[bytes]:
    with transport.stream(
        "GET", f"{at}/content", params={"path": path}, timeout=_CONTENT_S
    ) as response:
        yield from response.iter_raw(_CHUNK)


class _Upload(tempfile.SpooledTemporaryFile[bytes]):
    """Sent when it is closed, unless an error closes it."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__(_IN_MEMORY)
        self._send: Callable[[Any], None] | None = send

    def close(self) -> None:
        send, self._send = self._send, None
        try:
            if send is not None:
                self.seek(0)
                send(iter(lambda: self.read(_CHUNK), b""))
        finally:
            super().close()

    def __exit__(self, kind: object, *_exc: object) -> None:
        if kind is not None:
            self._send = None
        self.close()


def open_write(transport: Transport, at: str, path: str, *, append: bool, mode: int) -> BinaryIO:
    """A temporary file that becomes one of the sandbox when it is closed."""
    # What cannot be written is better known at once, as with a local sandbox. What is there stays.
    params = write_params(path, append=True, mode=mode)
    transport.request("PUT", f"{at}/content", params=params, content=b"")
    params = write_params(path, append=append, mode=mode)

    def send(chunks: Iterator[bytes]) -> None:
        transport.request(
            "PUT", f"{at}/content", params=params, content=chunks, timeout_s=_CONTENT_S
        )

    return _Upload(send)  # type: ignore[return-value]


def upload(
    transport: Transport, at: str, local: str, remote: str, progress: Progress | None
) -> None:
    """Copy a file or tree into the sandbox."""
    if os.path.isdir(local):
        _upload_tree(transport, at, local, remote, progress)
        return
    try:
        with open(local, "rb") as file:
            params = write_params(
                remote, append=False, mode=os.fstat(file.fileno()).st_mode & 0o777
            )
            chunks = _counted(iter(lambda: file.read(_CHUNK), b""), local, progress)
            transport.request(
                "PUT", f"{at}/content", params=params, content=chunks, timeout_s=_CONTENT_S
            )
    except OSError as exc:
        raise file_error(exc.errno or 5, local) from exc


def _upload_tree(
    transport: Transport, at: str, local: str, remote: str, progress: Progress | None
) -> None:
    from ..launcher.trees import pack

    reading, writing = os.pipe()
    problems: list[OSError] = []

    def produce() -> None:
        try:
            pack(writing, local, one_file_system=False, progress=progress, holds=True)
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
                content=_unless(chunks, problems, local),
                headers={"content-type": "application/x-tar"},
                timeout_s=_CONTENT_S,
            )
    finally:
        thread.join()


def _unless(chunks: Iterator[bytes], problems: list[OSError], local: str) -> Iterator[bytes]:
    """A tree that could not be read whole must not look as if it had ended."""
    yield from chunks
    for exc in problems:
        raise FileError(f"{exc.filename or local}: {exc.strerror}", path=exc.filename or local)


def download(
    transport: Transport, at: str, remote: str, local: str, progress: Progress | None
) -> None:
    """Copy a file or tree out of the sandbox. No name in it is trusted."""
    info = FileInfo.from_json(transport.json("GET", f"{at}/stat", params={"path": remote}))
    if info.kind == DIRECTORY:
        _download_tree(transport, at, remote, local, progress)
        return
    try:
        with open(local, "wb") as file:
            for chunk in _counted(_content(transport, at, remote), remote, progress):
                file.write(chunk)
    except OSError as exc:
        raise file_error(exc.errno or 5, local) from exc


def _download_tree(
    transport: Transport, at: str, remote: str, local: str, progress: Progress | None
) -> None:
    reading, writing = os.pipe()
    problems: list[BaseException] = []

    def receive() -> None:
        try:
            with transport.stream(
                "GET", f"{at}/tree", params={"path": remote}, timeout=_CONTENT_S
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
        unpack.unpack(reading, local, progress)
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


def _counted(chunks: Iterator[bytes], name: str, progress: Progress | None) -> Iterator[bytes]:
    copied = 0
    for chunk in chunks:
        yield chunk
        copied += len(chunk)
        if progress:
            progress(copied, name)
