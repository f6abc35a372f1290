"""Trees in and out of a gVisor sandbox: tar streams between this process and a helper inside."""

from __future__ import annotations

import errno
import os
import shutil

from ...client import unpack
from ...errors import FileError, FileNotFound, IoError, SandboxLost, file_error
from ...model.files import FILE
from ...model.state import State
from .answers import Refused, answer
from .streams import grow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .guest import GuestSandbox

    Progress = Callable[[int, str], None]


def upload(sandbox: GuestSandbox, local: str, remote: str, progress: Progress | None) -> None:
    """Copy a host directory to `remote`. Files keep mode and time; owners become the sandbox's user."""
    from ...launcher.trees import pack

    sandbox.require_awake()
    if not os.path.lexists(local):
        raise FileNotFound(f"{local}: no such file or directory on this host", path=local)
    if not os.path.isdir(local):
        sandbox.files.make_dir(os.path.dirname(remote))
        with open(local, "rb") as source, sandbox.files.open_write(remote) as target:
            shutil.copyfileobj(source, target, 1 << 20)
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


def download(sandbox: GuestSandbox, remote: str, local: str, progress: Progress | None) -> None:
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


class Helper:
    """A helper inside, at the other end of a pipe; it dies with the sandbox.

    Args:
        what: One of `guest.trees.OPERATIONS`.
        options: In JSON, where it takes any.
    """

    def __init__(self, sandbox: GuestSandbox, what: str, path: str, options: str = "") -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        grow(read)
        theirs, self.stream = (read, write) if what == "in" else (write, read)
        self._sandbox = sandbox
        try:
            args = [path, options] if options else [path]
            self._reply = sandbox.request("tree", (what, args), (theirs,))
        except BaseException:
            os.close(self.stream)
            raise
        finally:
            os.close(theirs)

    def finish(self, path: str) -> None:
        """Wait for the helper's word that all went well.

        Raises:
            FileError: As the guest's kernel told the helper.
        """
        os.close(self.stream)
        try:
            answer(self._reply, None)
        except Refused as exc:
            raise file_error(exc.errno or errno.EIO, path, exc.strerror or "") from exc
        except SandboxLost as exc:
            if self._sandbox.state == State.TERMINATED:
                raise self._sandbox.lost_error() from exc
            text = f"{path}: the process that copies was killed inside"
            raise IoError(text, retryable=True) from exc
        finally:
            self._reply.close()

    def abandon(self) -> None:
        """Stop; another error is on its way."""
        os.close(self.stream)
        self._reply.close()
