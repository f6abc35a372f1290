"""create: made, one command run in it, gone; nothing kept warm."""

from __future__ import annotations

from ...sandbox import Sandbox
from ..peers import gather
from ..rows import Row, Target
from ..turns import OURS, take_turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..peers.peer import Peer
    from ..rows import Missing
    from ..settings import Settings
    from ..turns import Samples

WHAT = "create, first exec, terminate (library, no pool)"
ALONE = "the same, one alone and not one after the other"
# Both clear up a little after they have said that they are done. Far less than what ends a burst.
_PAUSE_S = 0.02
_ALONE_S = 0.4  # after so long nothing is ready for the next one: decisions 16 and 109
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
    """In a burst the next sandbox is built ahead; whoever makes a single one waits for all of it."""
    contenders = {name: peer.run_true for name, peer in peers.items()}
    samples = take_turns({OURS: one_life, **contenders}, settings.rounds, pause_s=_ALONE_S)
    yield from rows(ALONE, "create", samples, list(contenders) or [""], _TARGETS)


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
