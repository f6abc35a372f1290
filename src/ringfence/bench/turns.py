"""Running contenders in turns, so that other load on this machine hits all of them."""

from __future__ import annotations

import gc
import statistics
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Contender = Callable[[], float | None]
    """One run. Returns the seconds that it took by its own watch, or None: then ours counts."""

OURS = "ringfence"


class Samples:
    """Samples of `take_turns`.

    Attributes:
        seconds: By contender, in the order of the rounds, warm-ups left out.
        failed: Contenders that failed, with their error.
    """

    def __init__(self, names: list[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.failed: dict[str, str] = {}

    def median_ms(self, name: str) -> float | None:
        """The median of one contender; None when it failed."""
        taken = self.seconds[name]
        return statistics.median(taken) * 1000 if taken and name not in self.failed else None


def take_turns(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    warm_up: int = 2,
    pause_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Run each contender once per round, every other round backwards, so that predecessors vary.

    A peer that raises is dropped and named in `failed`; an error of ours is raised to the caller.

    Args:
        pause_s: Between any two runs: deferred work of one is not the next one's cost.
    """
    samples = Samples(list(contenders))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(-warm_up, rounds):
            for name in _order(list(contenders), number):
                if name not in samples.failed:
                    time.sleep(pause_s)
                    _one_run(name, contenders[name], samples, clock, counts=number >= 0)
    finally:
        if collecting:
            gc.enable()
    return samples


def _order(names: list[str], number: int) -> list[str]:
    return names if number % 2 == 0 else names[::-1]


def _one_run(
    name: str, contender: Contender, samples: Samples, clock: Callable[[], float], *, counts: bool
) -> None:
    started = clock()
    try:
        own = contender()
    except Exception as exc:
        if name == OURS:
            raise
        samples.failed[name] = str(exc) or type(exc).__name__
        return
    elapsed = clock() - started if own is None else own
    if counts:
        samples.seconds[name].append(elapsed)
