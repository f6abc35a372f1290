"""The starter: one interpreter that has loaded the agent, and forks a guardian for each sandbox.

It serves the host process on descriptor 3 and ends with it. It runs nothing of a sandbox, and knows nothing
of one: a guardian is a child of the host process and reads its settings from its own control socket.
"""

from __future__ import annotations

import gc
import os

from ...launcher import wire
from ...launcher.helpers import tars, trees
from ...launcher.parent import CONTROL_FD, rename_process
from ...launcher.pid1 import file_locks
from ...linux import files, namespaces
from .. import trees as requests_about_trees
from . import landlocked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# An agent imports these when they are needed; Landlock may keep it from their files by then.
_LATER = (file_locks, requests_about_trees, tars, trees)


def main() -> None:
    """Fork on request until the host process is gone."""
    files.close_from(CONTROL_FD + 1)
    os.set_inheritable(CONTROL_FD, False)
    os.umask(0o022)
    rename_process(b"ringfence-guard")
    # Frozen objects are not touched by the collector, so children share their pages.
    gc.disable()
    gc.freeze()
    host = wire.adopt(CONTROL_FD)
    while True:
        message, fds = wire.receive(host)
        if message is None:
            os._exit(0)
        reply, control, errors, *tasks = fds
        try:
            pid = namespaces.clone_sibling()
            if pid == 0:
                os.close(CONTROL_FD)
                os.close(reply)
                _guard(control, errors, tasks)
            wire.answer(wire.adopt(reply), b"O%d" % pid)
        except OSError as exc:
            wire.refuse(wire.adopt(reply), exc, "fork")
        for fd in (control, errors, *tasks):
            os.close(fd)


def _guard(control: int, errors: int, tasks: list[int]) -> NoReturn:
    """Become a guardian, with its last words going to the descriptor `errors`.

    Args:
        tasks: Of `launcher.cgroups.open_tasks`.
    """
    try:
        for fd in tasks:
            os.write(fd, b"0")
            os.close(fd)
        os.setsid()
        for standard in (1, 2):
            os.dup2(errors, standard)
        os.close(errors)
        gc.enable()
        landlocked.main(wire.adopt(control))
    finally:
        os._exit(1)
