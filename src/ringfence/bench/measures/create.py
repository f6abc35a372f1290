"""create: made, one command run in it, gone; nothing kept warm."""

from __future__ import annotations

from ...sandbox import Sandbox
from ..peers import gather
from ..rows import Row, Target
from ..turns import OURS, take_turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..rows import Missing
    from ..settings import Settings
    from ..turns import Samples

WHAT = "create, first exec, terminate (library, no pool)"
_TARGETS = {"bwrap": Target(must=0.8, aim=0.5)}
_SLOW = {"runc", "runsc", "docker"}


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Full hardening, beside bubblewrap as a process, and with `peers` beside every other."""
    openers = {**gather.BUBBLEWRAP, **(gather.ONCE if settings.peers else {})}
    with gather.Gathered(openers) as gathered:
        yield from gathered.missing
        fast = {n: p.run_true for n, p in gathered.peers.items() if n not in _SLOW}
        slow = {n: p.run_true for n, p in gathered.peers.items() if n in _SLOW}
        samples = take_turns({OURS: one_life, **fast}, settings.rounds)
        yield from rows(WHAT, "create", samples, list(fast) or [""], _TARGETS)
        if slow:
            samples = take_turns({OURS: one_life, **slow}, settings.slow_rounds)
            yield from rows(WHAT, "create", samples, list(slow), _TARGETS)


def one_life() -> None:
    """A sandbox from nothing to nothing."""
    sandbox = Sandbox.create()
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
