"""A helper inside a native sandbox, at the other end of a pipe."""

from __future__ import annotations

import errno
import os
import threading

from ...errors import SandboxLost, file_error
from ...model.state import State
from ..local.agents.guest_trees import killed_inside
from ..local.agents.streams import grow
from ..local.answers import Refused
from .inner import replay, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .live import LiveSandbox


def remove(sandbox: LiveSandbox, path: str) -> None:
    """Remove a tree, by a helper: PID 1 must not be kept busy by however many files there are."""
    sandbox.require_awake()
    request = _request(sandbox, "remove", path, as_root=False)
    try:
        send(sandbox, request, [], None)
    except Refused as exc:
        raise file_error(exc.errno or errno.EIO, path) from exc


def _request(
    sandbox: LiveSandbox, direction: str, path: str, *, as_root: bool, options: str = ""
) -> dict[str, Any]:
    return {
        "op": "tree",
        "plan": replay(sandbox),
        "direction": direction,
        "path": path,
        "as_root": as_root,
        "options": options,
        # Written data counts as the sandbox's memory; a reader must not be frozen with the sandbox.
        "cgroup_dirs": [] if direction.endswith("out") else sandbox.group.directories,
    }


class Helper:
    """A helper inside, at the other end of a pipe; it dies with the sandbox."""

    def __init__(
        self,
        sandbox: LiveSandbox,
        direction: str,
        path: str,
        *,
        as_root: bool = False,
        options: str = "",
        also: Sequence[int] = (),
    ) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        grow(read)
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

    def _run(self, sandbox: LiveSandbox, request: dict[str, Any], *, theirs: int) -> None:
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
            raise killed_inside(path) from self._problem
        if self._problem is not None:
            raise self._problem

    def abandon(self) -> None:
        """Stop; another error is on its way."""
        self._close()

    def _close(self) -> None:
        os.close(self.stream)
        self._thread.join()
