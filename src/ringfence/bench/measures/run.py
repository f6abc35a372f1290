"""run: `ringfence run -- true` as a whole process, the way scripts use it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

from ..rows import Row, Target
from ..turns import OURS, take_turns
from .create import rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..settings import Settings

WHAT = "`ringfence run -- true`, whole process"
BARE = "python3 -c pass"


def measure(settings: Settings) -> Iterator[Row]:
    """Beside the same interpreter doing nothing."""
    target = Target(must=2.5, aim=2.0)
    ours = [*_command(), "run", "--", "true"]
    problem = _problem(ours)
    if problem:
        yield Row("run", WHAT, "ms", None, BARE, target=target, note=problem)
        return
    bare = [sys.executable, "-c", "pass"]
    samples = take_turns({OURS: _process(ours), BARE: _process(bare)}, settings.rounds // 2)
    yield from rows(WHAT, "run", samples, [BARE], {BARE: target})


def _command() -> list[str]:
    """The installed command of this interpreter; without one, the package itself."""
    script = os.path.join(sysconfig.get_path("scripts"), "ringfence")
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-m", "ringfence"]


def _environment() -> dict[str, str]:
    # Run from a source tree, the child must find the same package; nothing else of our path,
    # which would make the interpreter beside us slower or faster than it is.
    parent = os.path.dirname(
        os.path.dirname(os.path.abspath(sys.modules["ringfence"].__file__ or ""))
    )
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([parent, given] if given else [parent])}


def _problem(argv: list[str]) -> str:
    done = subprocess.run(
        argv, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"exit status {done.returncode}: {lines[-1][:200] if lines else 'no message'}"


def _process(argv: list[str]) -> Callable[[], None]:
    environment = _environment()

    def run() -> None:
        subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, check=True)

    return run
