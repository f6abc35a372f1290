"""landlock: the backend without namespaces, beside sandlock, bubblewrap and the same program outside."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial

from ...backends.registry import backend_named
from ...errors import RingfenceError
from ...sandbox import Sandbox
from .. import traffic
from ..peers import gather
from ..rows import VALUE, Missing, Row, Target
from ..turns import OURS, take_turns
from .create import WHAT as LIFE
from .create import one_life, rows
from .exec import BARE, bare_true, true_in
from .exec import WHAT as EXEC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings

NAME = "landlock"
BUILD = "a build: 10,000 opens, 1,000 of them of new files"
CONNECTION = "new connection by a rule, added to the host's own"
# Half of what a compiler does to files; the other half, its own work, would hide what a sandbox costs.
_BUILD = """
import os
os.makedirs("include", exist_ok=True)
for number in range(100):
    with open(f"include/{number}.h", "w") as file: file.write("x" * 2000)
for unit in range(1000):
    text = []
    for header in range(9):
        with open(f"include/{(unit + header) % 100}.h") as file: text.append(file.read())
    with open(f"{unit}.o", "w") as file: file.write("".join(text)[:4000])
for unit in range(1000): os.unlink(f"{unit}.o")
"""
_PEERS = {"sandlock": Target(must=0.7), "bwrap": Target(must=0.8)}
_PYTHON = "/usr/bin/python3"
_PAUSE_S = 0.02


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Each row in turns with one other alone."""
    try:
        one_life(backend_named(NAME))
    except RingfenceError as exc:
        yield Missing(f"backend {NAME}", exc.message)
        return
    openers = {"sandlock": gather.ONCE["sandlock"], **gather.BUBBLEWRAP}
    for name, opener in openers.items():
        with gather.Gathered({name: opener}) as gathered:
            yield from gathered.missing
            peers = {peer: each.run_true for peer, each in gathered.peers.items()}
            ours = {OURS: partial(one_life, backend_named(NAME))}
            samples = take_turns({**ours, **peers}, settings.rounds, pause_s=_PAUSE_S)
            yield from rows(f"{NAME}: {LIFE}", NAME, samples, list(peers) or [""], _PEERS)
    with Sandbox.create(backend=NAME) as sandbox:
        contenders = {OURS: true_in(sandbox), BARE: bare_true}
        samples = take_turns(contenders, settings.rounds * 2, warm_up=5)
        yield from rows(f"{NAME}: {EXEC}", NAME, samples, [BARE], {BARE: Target(must=2.0)})
        yield from _builds(sandbox, settings)
    yield _connections(settings)


def _builds(sandbox: Sandbox, settings: Settings) -> Iterator[Row]:
    # On the file system that the sandbox's home is on.
    home = os.path.dirname(os.path.dirname(sandbox.exec(["pwd"]).text))
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir=home) as directory:

        def ours() -> None:
            result = sandbox.exec([_PYTHON, "-c", _BUILD])
            if not result.ok:
                raise AssertionError(f"the build failed in the sandbox: {result}")

        def bare() -> None:
            subprocess.run([_PYTHON, "-c", _BUILD], cwd=directory, check=True)

        samples = take_turns({OURS: ours, BARE: bare}, settings.slow_rounds * 2, warm_up=1)
    yield from rows(f"{NAME}: {BUILD}", NAME, samples, [BARE], {BARE: Target(must=1.1)})


def _connections(settings: Settings) -> Row:
    """Connect, one byte there and back, close; the median of each run."""
    count = 200 if settings.quick else 1000
    with ExitStack() as stack:
        port = stack.enter_context(traffic.Server()).port
        command = traffic.client("connections", "127.0.0.1", port, count)
        sandbox = stack.enter_context(Sandbox.create(backend=NAME, network=[f"127.0.0.1:{port}"]))

        def ours() -> float:
            result = sandbox.exec(command, timeout_s=300)
            if not result.ok:
                raise AssertionError(f"no connection from the sandbox: {result}")
            return statistics.median(traffic.seconds(result.stdout))

        def bare() -> float:
            told = subprocess.run(command, check=True, capture_output=True).stdout
            return statistics.median(traffic.seconds(told))

        samples = take_turns({OURS: ours, BARE: bare}, settings.slow_rounds, warm_up=1)
    inside, outside = samples.median_ms(OURS), samples.median_ms(BARE)
    added = inside - outside if inside is not None and outside is not None else None
    return Row(
        NAME,
        f"{NAME}: {CONNECTION}",
        "ms",
        added,
        target=Target(VALUE, must=0.5),
        samples=count * settings.slow_rounds,
        note=samples.failed.get(BARE) or f"{inside:.2f} ms inside, {outside:.2f} ms outside",
    )
