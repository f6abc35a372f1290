"""create: made, one command run in it, gone; nothing kept warm."""

from __future__ import annotations

import subprocess
import sys

from ...backends.registry import new_backend
from ...sandbox import Sandbox
from ..peers import gather
from ..rows import Row, Target
from ..turns import OURS, take_turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ...backends.protocol import Backend
    from ..peers.peer import Peer
    from ..rows import Missing
    from ..settings import Settings
    from ..turns import Samples

WHAT = "create, first exec, terminate (library, no pool)"
ALONE = "the same, one second after the last one ended"
COLD = "the same, nothing prebuilt"
FIRST = "the first one of a process"
# Both clear up a little after they have said that they are done. Far less than what ends a burst.
_PAUSE_S = 0.02
_ALONE_S = 1.0  # the next one is prebuilt by then, and hibernates: decision 176
_FIRST_LIFE = """
import time
from ringfence.bench.measures.create import one_life
began = time.perf_counter()
one_life()
print(time.perf_counter() - began)
"""
_TARGETS = {"bwrap": Target(must=0.8, aim=0.5)}
_SLOW = {"runc", "runsc", "docker"}


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Full hardening, beside bubblewrap as a process, and with `peers` beside every other."""
    openers = {**gather.BUBBLEWRAP, **(gather.ONCE if settings.peers else {})}
    for name, opener in openers.items():
        with gather.Gathered({name: opener}) as gathered:
            yield from gathered.missing
            if gathered.peers or name in gather.BUBBLEWRAP:
                yield from _beside(gathered.peers, settings)
            if name in gather.BUBBLEWRAP:
                yield from _alone(gathered.peers, settings)


def _beside(peers: Mapping[str, Peer], settings: Settings) -> Iterator[Row]:
    """In turns with one peer alone: what a third leaves to the kernel would slow both down."""
    rounds = settings.slow_rounds if _SLOW & peers.keys() else settings.rounds
    contenders = {name: peer.run_true for name, peer in peers.items()}
    samples = take_turns({OURS: one_life, **contenders}, rounds, pause_s=_PAUSE_S)
    yield from rows(WHAT, "create", samples, list(contenders) or [""], _TARGETS)


def _alone(peers: Mapping[str, Peer], settings: Settings) -> Iterator[Row]:
    """A create that does not follow another at once, one that finds nothing prebuilt, and the first."""
    contenders = {name: peer.run_true for name, peer in peers.items()}
    names, rounds = list(contenders) or [""], settings.slow_rounds
    samples = take_turns({OURS: one_life, **contenders}, rounds, pause_s=_ALONE_S)
    yield from rows(ALONE, "create", samples, names, _TARGETS)
    cold = new_backend("native", prebuilt_s=0)
    try:
        samples = take_turns({OURS: lambda: one_life(cold), **contenders}, rounds, pause_s=_PAUSE_S)
    finally:
        cold.close()
    yield from rows(COLD, "create", samples, names, {})
    samples = take_turns({OURS: first_life, **contenders}, rounds, pause_s=_PAUSE_S)
    yield from rows(FIRST, "create", samples, names, {})


def first_life() -> float:
    """The seconds of `one_life` in a process that has made no sandbox before."""
    command = [sys.executable, "-c", _FIRST_LIFE]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def one_life(backend: Backend | None = None) -> None:
    """A sandbox from nothing to nothing."""
    sandbox = Sandbox.create(backend=backend)
    try:
        result = sandbox.exec(["true"])
    finally:
        sandbox.terminate()
    if not result.ok:
        raise AssertionError(f"`true` failed in the sandbox: {result}")


def rows(
    what: str, measure: str, samples: Samples, peers: list[str], targets: dict[str, Target]
) -> Iterator[Row]:
    """A row for each peer; one without a peer for the name ""."""
    for peer in peers:
        yield Row(
            measure,
            what,
            "ms",
            samples.median_ms(OURS),
            peer,
            samples.median_ms(peer) if peer else None,
            targets.get(peer, Target()),
            len(samples.seconds[OURS]),
            samples.failed.get(peer, ""),
        )
