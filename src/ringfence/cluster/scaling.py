"""The size of a cluster: how many nodes to ask Ray for, which to drain and which to release. Pure.

Ray counts a node with an actor as busy, and ends one that has been idle for its own timeout. So the actor
of each node keeps it, and a node is released by ending the actor. Ray is asked for nodes only while some
are missing: it keeps any node that it was asked for, also one that was released.
"""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..daemon.membership import Scaling

BY_OPERATOR, BY_SCALING = "operator", "scaling"
_START_S = 180.0
"""A node of Ray that has said nothing for so long is not counted on any more."""


@dataclass(frozen=True)
class Sample:
    """A node of Ray.

    Attributes:
        is_known: Its daemons have told how they are.
        is_fresh: They did so just now.
        is_head: Ray's head, which is never released.
        is_released: Its actor was ended: Ray ends the node, too.
        fits: It has the resources by which nodes are asked for: a head often has none.
        active: Clients' sandboxes.
        waiting: Creates that wait for room there.
        room: Sandboxes that it could still take.
        size: Sandboxes that it could have, were no other program busy there.
        keeps: Whether it has what would be lost with it, such as snapshots in no shared store.
        drain: Whether and why it takes nothing new: `operator`, `scaling` or nothing.
        is_empty: It drains, has no sandbox and makes none.
    """

    ray_id: str
    is_known: bool = True
    is_fresh: bool = True
    is_head: bool = False
    is_released: bool = False
    fits: bool = True
    active: int = 0
    waiting: int = 0
    room: int = 0
    size: int = 1
    keeps: bool = False
    drain: str = ""
    is_empty: bool = False

    @property
    def is_needed(self) -> bool:
        """Return whether it stays, however few nodes are wanted."""
        return bool(self.active or self.waiting or self.is_head or self.keeps or not self.is_fresh)


@dataclass(frozen=True)
class Decision:
    """Actions to take now.

    Attributes:
        wanted: Nodes that take sandboxes, those that start counted.
        asked: Bundles of a node's resources to ask Ray for in all; 0: none, what is there is kept by its actor.
        drain, undrain, release, reclaim: Nodes of Ray, by id.
    """

    wanted: int
    asked: int = 0
    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    reclaim: tuple[str, ...] = ()


class Policy:
    """Decides; keeps how long each node has been idle, or has been starting."""

    def __init__(self, config: Scaling) -> None:
        self._config = config
        self._idle_since: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}

    def decide(self, samples: Sequence[Sample], waiting: int, now: float) -> Decision:
        """Decide on the size.

        Args:
            samples: Every node of Ray that lives.
            waiting: Creates that wait at gateways for a node.
            now: In seconds, by a clock that only goes on.
        """
        self._note(samples, now)
        usable = [each for each in samples if _is_usable(each)]
        starting = [each for each in samples if self._starts(each, now)]
        size = max([each.size for each in usable], default=1) or 1
        needed = waiting + sum(each.waiting for each in usable) + self._config.spare
        kept, room = self._kept(usable, needed - size * len(starting), len(starting))
        missing = needed - room - size * len(starting)
        present = len(kept) + len(starting)
        wanted = max(present + max(0, -(-missing // size)), self._config.min_nodes)
        released = [each.ray_id for each in samples if each.is_released]
        reclaim = released[: max(0, wanted - present)]
        free = max(0, self._config.max_nodes - len(samples))
        more = min(max(0, wanted - present - len(reclaim)), free)
        rest = [each for each in usable if each not in kept]
        return Decision(
            wanted=present + len(reclaim) + more,
            asked=sum(each.fits for each in samples) + more if more or starting else 0,
            # At once: a node that new sandboxes fall on now and then would never be idle for long.
            drain=tuple(each.ray_id for each in rest if not each.drain),
            undrain=tuple(each.ray_id for each in kept if each.drain == BY_SCALING),
            release=tuple(e.ray_id for e in rest if e.drain and self._is_over(e, now)),
            reclaim=tuple(reclaim),
        )

    def _note(self, samples: Sequence[Sample], now: float) -> None:
        there = {each.ray_id for each in samples}
        idle = {each.ray_id for each in samples if each.is_known and not each.is_needed}
        self._seen_at = {name: self._seen_at.get(name, now) for name in there}
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}

    def _starts(self, sample: Sample, now: float) -> bool:
        new = not sample.is_known and not sample.is_released
        return new and now - self._seen_at[sample.ray_id] < _START_S

    def _is_over(self, sample: Sample, now: float) -> bool:
        idle_s = now - self._idle_since.get(sample.ray_id, now)
        return sample.is_empty and idle_s >= self._config.idle_s

    def _kept(self, usable: Sequence[Sample], needed: int, others: int) -> tuple[list[Sample], int]:
        """Choose nodes that stay, those first that must: the fewest with the room; and their room."""
        kept = [each for each in usable if each.is_needed]
        room = sum(each.room for each in kept)
        idle = [each for each in usable if not each.is_needed]
        for each in sorted(idle, key=lambda it: (it.drain == BY_SCALING, it.ray_id)):
            if room < needed or len(kept) + others < self._config.min_nodes:
                kept.append(each)
                room += each.room
        return kept, room


def _is_usable(sample: Sample) -> bool:
    return sample.is_known and not sample.is_released and sample.drain != BY_OPERATOR


def room_of(form: dict[str, Any], config: Scaling) -> tuple[int, int]:
    """Reckon how many more sandboxes the node of a report could take; and without its load."""
    slots = form["max_sandboxes"] - form["active"] if form["backends"] else 0
    room = max(0, min(slots, form["free_memory_bytes"] // (config.memory_mb << 20)))
    is_busy = config.load and form["load"] > config.load * form["cpus"]
    return 0 if is_busy else room, room


__all__ = ["BY_OPERATOR", "BY_SCALING", "Decision", "Policy", "Sample", "room_of"]
