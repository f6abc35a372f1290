"""exec: `true` and a cell in a sandbox that lives already."""

from __future__ import annotations

import subprocess
import sys

from ...sandbox import Sandbox
from ..peers import gather
from ..rows import VALUE, Row, Target
from ..turns import OURS, take_turns
from .create import rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...contexts import Context
    from ..rows import Missing
    from ..settings import Settings

WHAT = "exec of /bin/true in a live sandbox"
CELL = "a cell x + 1 in a live context"
FIRST = "create, context and its first cell"
BARE, PYTHON = "subprocess.run", "python3 -c pass"
_FASTER = Target(must=1.0, aim=0.1)
_TARGETS = {BARE: Target(must=2.0, aim=1.3)} | dict.fromkeys(gather.LIVE, _FASTER)
_CELL = {"": Target(by=VALUE, must=1.5, aim=0.5)}
# Each is measured apart from the others: what a heavy peer leaves to the kernel is its own.
_GROUPS = (("sandlock",), ("runc",), ("runsc",), ("docker",))


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Beside a bare subprocess, and with `peers` beside each way into something that lives."""
    with Sandbox.create() as sandbox:
        ours = true_in(sandbox)
        samples = take_turns({OURS: ours, BARE: bare_true}, settings.rounds * 2, warm_up=5)
        yield from rows(WHAT, "exec", samples, [BARE], _TARGETS)
        with sandbox.context() as context:
            samples = take_turns({OURS: cell_in(context)}, settings.rounds * 2, warm_up=5)
            yield from rows(CELL, "exec", samples, [""], _CELL)
        samples = take_turns({OURS: first_cell, PYTHON: bare_python}, settings.slow_rounds)
        yield from rows(FIRST, "exec", samples, [PYTHON], {PYTHON: Target(must=2.0, aim=1.2)})
        if settings.peers:
            for group in _GROUPS:
                yield from _beside(group, ours, settings)


def _beside(
    names: tuple[str, ...], ours: Callable[[], None], settings: Settings
) -> Iterator[Row | Missing]:
    with gather.Gathered({name: gather.LIVE[name] for name in names}) as gathered:
        yield from gathered.missing
        if gathered.peers:
            contenders = {name: peer.run_true for name, peer in gathered.peers.items()}
            samples = take_turns({OURS: ours, **contenders}, settings.slow_rounds * 2)
            yield from rows(WHAT, "exec", samples, list(contenders), _TARGETS)


def true_in(sandbox: Sandbox) -> Callable[[], None]:
    """Return a function that runs an exec and checks its result."""

    def run() -> None:
        result = sandbox.exec(["/bin/true"])
        if not result.ok:
            raise AssertionError(f"`true` failed in the sandbox: {result}")

    return run


def cell_in(context: Context) -> Callable[[], None]:
    """Return a function that runs a cell and checks its value."""
    context.run("x = 1")

    def run() -> None:
        if (result := context.run("x + 1")).text != "2":
            raise AssertionError(f"x + 1 failed in the context: {result}")

    return run


def first_cell() -> None:
    with Sandbox.create() as sandbox:
        if (result := sandbox.run_code("1 + 1")).text != "2":
            raise AssertionError(f"1 + 1 failed in a new context: {result}")


def bare_python() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def bare_true() -> None:
    subprocess.run(["/bin/true"], check=True)
