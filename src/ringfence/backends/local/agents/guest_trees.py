"""A helper that an agent inside starts, at the other end of a pipe."""

from __future__ import annotations

import errno
import os

from ....errors import IoError, SandboxLost, file_error
from ....model.state import State
from ..answers import Refused, answer
from .streams import grow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .guest import GuestSandbox


def killed_inside(path: str) -> IoError:
    """The error for a helper that said nothing to its end."""
    return IoError(
        f"{path}: the helper inside was killed",
        hint="for lack of memory, by a program of the sandbox's, or after 30 s with one pattern: a simpler "
        "one, or a smaller directory, may do",
        retryable=True,
    )


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
            raise killed_inside(path) from exc
        finally:
            self._reply.close()

    def abandon(self) -> None:
        """Stop; another error is on its way."""
        os.close(self.stream)
        self._reply.close()
