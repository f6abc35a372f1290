"""Trees in and out of a native sandbox: tar streams between this process and a helper inside."""

from __future__ import annotations

import errno
import os
import shutil
import threading

from ...client import unpack
from ...errors import FileError, FileNotFound, IoError, SandboxLost, file_error
from ...model.files import FILE
from ...model.state import State
from ..local.answers import Refused
from .inner import replay, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .sandbox import NativeSandbox

    Progress = Callable[[int, str], None]


def upload(sandbox: NativeSandbox, local: str, remote: str, progress: Progress | None) -> None:
    """Copy a host directory to `remote`. Files keep mode and time; owners become the sandbox's user."""
    from ...launcher.trees import pack

    sandbox.require_awake()
    if not os.path.lexists(local):
        raise FileNotFound(f"{local}: no such file or directory on this host", path=local)
    if not os.path.isdir(local):
        _upload_file(sandbox, local, remote)
        return
    helper = Helper(sandbox, "in", remote)
    problem: BaseException | None = None
    try:
        pack(helper.stream, local, one_file_system=False, progress=progress)
    except BrokenPipeError:
        pass  # the helper's own error says why it stopped reading
    except BaseException as exc:  # noqa: BLE001
        problem = exc
    helper.finish(remote)
    if isinstance(problem, OSError) and problem.errno == errno.EINVAL and problem.filename:
        raise FileError(
            f"{problem.filename}: {problem.strerror}", path=problem.filename
        ) from problem
    if problem is not None:
        raise IoError(f"{local}: {problem}") from problem


def _upload_file(sandbox: NativeSandbox, local: str, remote: str) -> None:
    sandbox.files.make_dir(os.path.dirname(remote))
    with open(local, "rb") as source, sandbox.files.open_write(remote) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def download(sandbox: NativeSandbox, remote: str, local: str, progress: Progress | None) -> None:
    """Copy a directory of the sandbox to the host, without trusting a name in it."""
    if sandbox.files.stat(remote).kind == FILE:
        with sandbox.files.open_read(remote) as source, open(local, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return
    helper = Helper(sandbox, "out", remote)
    try:
        unpack.unpack(helper.stream, local, progress)
    except BaseException:
        helper.abandon()
        raise
    helper.finish(remote)


def remove(sandbox: NativeSandbox, path: str) -> None:
    """Remove a tree, by a helper: PID 1 must not be kept busy by however many files there are."""
    sandbox.require_awake()
    request = _request(sandbox, "remove", path, as_root=False)
    try:
        send(sandbox, request, [], None)
    except Refused as exc:
        raise file_error(exc.errno or errno.EIO, path) from exc


def _request(
    sandbox: NativeSandbox, direction: str, path: str, *, as_root: bool, options: str = ""
) -> dict[str, Any]:
    return {
        "op": "tree",
        "plan": replay(sandbox),
        "direction": direction,
        "path": path,
        "as_root": as_root,
        "options": options,
        # What is written counts as the sandbox's memory; a reader must not be frozen with it.
        "cgroup_dirs": [] if direction.endswith("out") else sandbox.group.directories,
    }


class Helper:
    """A helper inside, moving one tree through a pipe; it dies with the sandbox."""

    def __init__(
        self,
        sandbox: NativeSandbox,
        direction: str,
        path: str,
        *,
        as_root: bool = False,
        options: str = "",
        also: Sequence[int] = (),
    ) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        theirs, self.stream = (read, write) if direction == "in" else (write, read)
        self._also = also  # more descriptors for the helper
        self._sandbox = sandbox
        self._problem: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(sandbox, _request(sandbox, direction, path, as_root=as_root, options=options)),
            kwargs={"theirs": theirs},
        )
        self._thread.start()

    def _run(self, sandbox: NativeSandbox, request: dict[str, Any], *, theirs: int) -> None:
        try:
            try:
                send(sandbox, request, [theirs, *self._also], None)
            finally:
                os.close(theirs)
        except BaseException as exc:  # noqa: BLE001
            self._problem = exc

    def finish(self, path: str) -> None:
        """Wait for the helper's word that all went well.

        Raises:
            FileError: As the kernel told the helper.
        """
        self._close()
        if isinstance(self._problem, Refused):
            raise file_error(
                self._problem.errno or 5, path, self._problem.strerror or ""
            ) from self._problem
        if isinstance(self._problem, SandboxLost) and self._sandbox.state != State.TERMINATED:
            raise IoError(
                f"{path}: the process that copies was killed inside", retryable=True
            ) from self._problem
        if self._problem is not None:
            raise self._problem

    def abandon(self) -> None:
        """Stop; another error is on its way."""
        self._close()

    def _close(self) -> None:
        os.close(self.stream)
        self._thread.join()
