"""Trees in and out of a sandbox: tar streams between this process and a helper inside."""

from __future__ import annotations

import errno
import os
import shutil

from ....client import unpack
from ....errors import FileError, FileNotFound, IoError
from ....model.files import FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .files import LocalFiles

    Progress = Callable[[int, str], None]


def upload(files: LocalFiles, local: str, remote: str, progress: Progress | None) -> None:
    """Copy a host directory to `remote`. Files keep mode and time; owners become the sandbox's user."""
    from ....launcher.helpers.trees import pack

    if not os.path.lexists(local):
        hint = "give a path on this host; a relative path starts at the current directory"
        what = f"{local}: no such file or directory on this host"
        raise FileNotFound(what, path=local, hint=hint)
    if not os.path.isdir(local):
        files.make_dir(os.path.dirname(remote))
        with open(local, "rb") as source, files.open_write(remote) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return
    helper = files.start_helper("in", remote)
    problem: BaseException | None = None
    try:
        pack(helper.stream, local, one_file_system=False, progress=progress, is_ours=True)
    except BrokenPipeError:
        pass  # the helper's own error says why it stopped reading
    except BaseException as exc:  # noqa: BLE001
        problem = exc
    try:
        helper.finish(remote)
    except FileError:
        if problem is None:  # else the helper only says that the stream broke off
            raise
    if isinstance(problem, OSError) and problem.errno == errno.EINVAL and problem.filename:
        raise FileError(
            f"{problem.filename}: {problem.strerror}", path=problem.filename
        ) from problem
    if problem is not None:
        raise IoError(f"{local}: {problem}") from problem


def download(
    files: LocalFiles, remote: str, local: str, progress: Progress | None, *, overwrite: bool
) -> None:
    """Copy a directory of the sandbox to the host, without trusting a name in it."""
    if files.stat(remote).kind == FILE:
        with (
            files.open_read(remote) as source,
            unpack.created(local, overwrite=overwrite) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        return
    helper = files.start_helper("out", remote, "ours")
    try:
        unpack.unpack(helper.stream, local, progress, overwrite=overwrite)
    except BaseException as exc:
        if isinstance(exc, IoError) and exc.retryable:  # the stream broke off: the helper knows why
            helper.finish(remote)
        else:
            helper.abandon()
        raise
    helper.finish(remote)
