"""Descriptors of whoever starts a program, as places to start it in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

from ...errors import RingfenceError
from ..probes.kit import Outcome, escaped, held
from .register import NAIVE, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...sandbox.sync import Sandbox
    from ..lab import Lab

_MOST = 16  # who starts programs inside has fewer than ten
_PATIENCE_S = 60.0
_PYTHON = "/usr/bin/python3"
_LINKS = "import os, sys; [os.symlink('/proc/self/fd/' + n, 'd' + n) for n in sys.argv[1:]]"
# 3: where it was started is no place of the root's.
_LOOK = """
import os, sys
try:
    os.stat(os.getcwd())
except OSError:
    sys.exit(3)
"""


@probe("files.working-directory", "high", NAIVE)
def working_directory(lab: Lab) -> Outcome:
    """No program may be started in a directory that only a descriptor leads to, such as the runtime's own."""
    if not lab.protected:
        return _started_naively()
    with lab.sandbox() as sandbox:
        found = entered(sandbox)
    if found:
        return escaped(f"started in what its descriptors {found} were, and no path leads to")
    return held(f"{_MOST - 3} descriptors, none could be entered")


def entered(sandbox: Sandbox) -> list[int]:
    """The descriptors of whoever starts programs there in which one could be started, and no path leads to."""
    numbers = map(str, range(3, _MOST))
    sandbox.exec([_PYTHON, "-I", "-S", "-c", _LINKS, *numbers], cwd="/home/sandbox")
    return [number for number in range(3, _MOST) if _is_outside(sandbox, number)]


def _is_outside(sandbox: Sandbox, number: int) -> bool:
    with contextlib.suppress(RingfenceError):
        look = [_PYTHON, "-I", "-S", "-c", _LOOK]
        result = sandbox.exec(look, cwd=f"/home/sandbox/d{number}", timeout_s=_PATIENCE_S)
        return result.exit_code == 3
    return False


def _started_naively() -> Outcome:
    """A directory that has been removed stands for one of another root: no path leads there either."""
    with tempfile.TemporaryDirectory(prefix="ringfence-attack-") as directory:
        removed = f"{directory}/removed"
        os.mkdir(removed)
        place = os.open(removed, os.O_RDONLY | os.O_DIRECTORY)
        os.rmdir(removed)
    try:
        started = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LOOK],
            cwd=f"/proc/self/fd/{place}",
            pass_fds=[place],
            check=False,
        )
    finally:
        os.close(place)
    return escaped("started there") if started.returncode == 3 else held("refused")
