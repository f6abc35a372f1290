"""Files of a sandbox with an agent inside: pipes of ours that it copies to and from, as the sandbox's user."""

from __future__ import annotations

import errno
import heapq
import io
import os

from ....errors import FileError, SandboxLost, file_error
from ....model.files import FileInfo
from ..answers import Refused, answer
from .files import LocalFiles, described
from .streams import grow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from ....launcher import wire
    from .guest import GuestSandbox
    from .guest_trees import Helper

    Progress = Callable[[int, str], None]

_OPEN_S = 30.0
_BUFFER = 1 << 18
_LONGEST, _MOST_LISTED = 1 << 16, 1 << 30  # bytes of a name and of a listing: a million entries fit


class GuestFiles(LocalFiles):
    def __init__(self, sandbox: GuestSandbox) -> None:
        super().__init__(sandbox)
        self._sandbox = sandbox

    def open_read(self, path: str) -> BinaryIO:
        where = self._absolute(path)
        pipe, reply = self._stream("read", where, (), out=True)
        return io.BufferedReader(_Reading(pipe, reply, where), _BUFFER)

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        where = self._absolute(path)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        pipe, reply = self._stream("write", where, (flags, mode), out=False)
        return io.BufferedWriter(_Writing(pipe, reply, where), _BUFFER)

    def start_helper(self, what: str, path: str, options: str = "") -> Helper:
        from .guest_trees import Helper

        self._sandbox.require_awake()
        return Helper(self._sandbox, what, self._absolute(path), options)

    def list(self, path: str, after: str = "", most: int | None = None) -> list[FileInfo]:
        base = self._absolute(path)
        self._sandbox.require_awake()
        body = os.memfd_create("listing", os.MFD_CLOEXEC)
        try:
            self._answered(self._sandbox.request("list", (base,), (body,)), base)
            with open(body, "rb", closefd=False) as file:
                file.seek(0)
                entries = (each for each in _entries(file, base) if each[0] > after)
                first = sorted(entries) if most is None else heapq.nsmallest(most, entries)
        finally:
            os.close(body)
        try:
            return [described(f"{base.rstrip('/')}/{name}", name, words) for name, words in first]
        except ValueError as exc:
            raise _nonsense(base) from exc

    def move(self, src: str, dst: str) -> None:
        source, target = self._absolute(src), self._absolute(dst)
        try:
            self._ask(source, "move", source, target)
        except FileError as exc:
            if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.EXDEV:
                raise
            self._ask(source, "tree", "move", [source, target], timeout_s=None)

    # -- inner ------------------------------------------------------------------------------

    def _remove_tree(self, path: str) -> None:
        self._ask(path, "tree", "remove", [path], timeout_s=None)

    def _ask(self, path: str, verb: str, *args: object, timeout_s: float | None = _OPEN_S) -> bytes:
        self._sandbox.require_awake()
        return self._answered(self._sandbox.request(verb, args), path, timeout_s)

    def _answered(self, reply: wire.Socket, path: str, timeout_s: float | None = _OPEN_S) -> bytes:
        try:
            return answer(reply, timeout_s)[0]
        except Refused as exc:
            raise file_error(exc.errno or errno.EIO, path) from exc
        except SandboxLost:
            raise self._sandbox.lost_error() from None
        finally:
            reply.close()

    def _stream(
        self, verb: str, path: str, args: tuple[object, ...], *, out: bool
    ) -> tuple[int, wire.Socket]:
        """A pipe that the agent copies `path` to or from, once it has opened it."""
        self._sandbox.require_awake()
        read, write = os.pipe2(os.O_CLOEXEC)
        grow(read)
        ours, theirs = (read, write) if out else (write, read)
        try:
            try:
                reply = self._sandbox.request(verb, (path, *args), (theirs,))
            finally:
                os.close(theirs)
            try:
                answer(reply, _OPEN_S)
            except BaseException:
                reply.close()
                raise
        except Refused as exc:
            os.close(ours)
            raise file_error(exc.errno or errno.EIO, path, exc.strerror or "") from exc
        except BaseException:
            os.close(ours)
            raise
        reply.settimeout(None)
        return ours, reply


def _entries(file: BinaryIO, path: str) -> Iterator[tuple[str, bytes]]:
    """Names and what is said of them. The agent may be a hostile one: no more than a piece is held."""
    left, name = b"", None
    while data := file.read(_BUFFER):
        *parts, left = (left + data).split(b"\0")
        if len(left) > _LONGEST or file.tell() > _MOST_LISTED:
            raise _nonsense(path)
        for part in parts:
            if name is None:
                name = os.fsdecode(part)
            else:
                yield name, part
                name = None


def _nonsense(path: str) -> FileError:
    return FileError(f"{path}: the agent inside sent an invalid directory listing", path=path)


class _Stream(io.RawIOBase):
    """Our end of a copy that the agent makes. Its word at the end tells whether it was whole."""

    def __init__(self, pipe: int, reply: wire.Socket, path: str) -> None:
        self._pipe, self._reply, self._path = pipe, reply, path
        self._told = False

    def _outcome(self) -> None:
        """Wait for the agent's last word.

        Raises:
            OSError: As the guest's kernel told it; EIO where it is gone.
        """
        if self._told:
            return
        self._told = True
        try:
            answer(self._reply, None)
        except Refused as exc:
            raise OSError(
                exc.errno or errno.EIO, os.strerror(exc.errno or errno.EIO), self._path
            ) from exc
        except SandboxLost as exc:
            raise OSError(errno.EIO, "the sandbox ended", self._path) from exc

    def fileno(self) -> int:
        return self._pipe

    def close(self) -> None:
        if self.closed:
            return
        try:
            os.close(self._pipe)
            self._end()
        finally:
            self._reply.close()
            super().close()

    def _end(self) -> None:
        """Called when the pipe has been closed."""


class _Reading(_Stream):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        count = os.readv(self._pipe, [buffer])  # type: ignore[list-item]
        if count == 0:
            self._outcome()  # an end that was not the file's must not look like one
        return count


class _Writing(_Stream):
    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        try:
            return os.write(self._pipe, data)  # type: ignore[arg-type]
        except BrokenPipeError:
            self._outcome()
            raise

    def _end(self) -> None:
        self._outcome()
