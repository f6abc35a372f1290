"""Input and output of a built-in program."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

_PIECE = 65_536


class Stream:
    """An open file of a process. `wake` is a fd that ends a wait early."""

    def read(self, wake: int) -> bytes | None:
        """Some bytes, b"" at the end, None when woken."""
        raise NotImplementedError

    def write(self, data: bytes, wake: int) -> int:
        """How many bytes were taken; 0 when woken."""
        raise NotImplementedError

    def dup(self) -> Stream:
        """A second handle, closed on its own."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the handle back."""
        raise NotImplementedError


class PipeStream(Stream):
    """An end of an os pipe, owned."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    def read(self, wake: int) -> bytes | None:
        if not _wait(self._fd, select.POLLIN, wake):
            return None
        try:
            return os.read(self._fd, _PIECE)
        except BlockingIOError:
            return None

    def write(self, data: bytes, wake: int) -> int:
        if not _wait(self._fd, select.POLLOUT, wake):
            return 0
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0

    def dup(self) -> Stream:
        return PipeStream(os.dup(self._fd))

    def close(self) -> None:
        os.close(self._fd)


class FileStream(Stream):
    """A file of the tree, opened when a process is handed it and shared by its copies."""

    def __init__(self, file: BinaryIO, holders: list[None] | None = None) -> None:
        self._file = file
        self._holders = holders if holders is not None else []
        self._holders.append(None)

    def read(self, wake: int) -> bytes | None:  # noqa: ARG002 (a file never waits)
        return self._file.read(_PIECE)

    def write(self, data: bytes, wake: int) -> int:  # noqa: ARG002
        return self._file.write(data)

    def dup(self) -> Stream:
        return FileStream(self._file, self._holders)

    def close(self) -> None:
        self._holders.pop()
        if not self._holders:
            self._file.close()


def pipe() -> tuple[PipeStream, PipeStream]:
    """The reading and the writing end of a new pipe."""
    reader, writer = os.pipe()
    return PipeStream(reader), PipeStream(writer)


def write_all(stream: Stream, data: bytes, wake: int, check: Callable[[], None]) -> None:
    """Write everything; `check` is called before each piece and may raise."""
    view = memoryview(data)
    while view:
        check()
        view = view[stream.write(bytes(view[:_PIECE]), wake) :]


def _wait(fd: int, event: int, wake: int) -> bool:
    """Wait until `fd` is ready; False if `wake` was written to first."""
    waiting = select.poll()
    waiting.register(fd, event)
    waiting.register(wake, select.POLLIN)
    return any(ready == fd for ready, _ in waiting.poll())
