"""A cluster in one process and in simulated time, to see what placement makes of it.

`python -m tests.unit.cluster.simulation` prints what the test asserts.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from statistics import mean, quantiles

from ringfence.cluster.placement import Fleet, Need, NodeState
from ringfence.errors import ResourceExhausted

_GIB = 1 << 30
GATEWAYS = 3
SAMPLE_S = 1.0
NOTICED_S = 3.0
"""A lost node is offered for so long."""
LIFE_S = 20.0
CPUS_EACH = 0.5
IMAGES, IMAGES_PER_NODE, POOLS = 200, 20, 4
ATTEMPTS = 4

Choose = Callable[[Fleet, Need, Random], NodeState]


@dataclass
class _Node:
    state: NodeState
    images: list[str]
    is_lost: bool = False
    running: dict[int, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of it."""

    created: int = 0
    rejected: int = 0
    lost: int = 0
    fetched: int = 0  # images, each a cold start of seconds
    had_pool: int = 0
    missed_pool: int = 0  # a pool has such sandboxes, and none was warm there
    decisions: int = 0
    seconds: float = 0.0
    p99: list[float] = field(default_factory=list)
    top: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.created:,} created, {self.rejected:,} rejected, {self.lost:,} on lost nodes; "
            f"pressure p99 {mean(self.p99):.2f} and most {mean(self.top):.2f} times the mean; "
            f"{self.fetched / self.created:.1%} fetched an image, "
            f"{self.missed_pool / self.had_pool:.1%} of {self.had_pool:,} found no warm one; "
            f"{self.decisions / self.seconds:,.0f} decisions/s"
        )


class Simulation:
    """Nodes of three sizes; gateways that see samples of up to a second and each other's work late."""

    def __init__(self, nodes: int, choose: Choose = Fleet.choose, seed: int = 20) -> None:
        self.random, self.choose, self.outcome = Random(seed), choose, Outcome()
        self._fleets = [Fleet() for _ in range(GATEWAYS)]
        self._nodes: dict[str, _Node] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now, self._duration, self._number = 0.0, 0.0, 0
        self._popular = [f"image{number}" for number in range(IMAGES)]
        self._weights = [*accumulate(1 / (rank + 1) for rank in range(IMAGES))]
        for _ in range(nodes):
            self._join()

    def run(self, sandboxes: int) -> Outcome:
        """Create so many at a steady rate, and lose, drain and add nodes meanwhile."""
        count = len(self._nodes)
        self._duration = sandboxes / count
        rate = count * 1.0
        for share, event in ((0.3, self._lose), (0.5, self._drain), (0.7, self._join)):
            for number in range(count // 50):
                self._at(self._duration * share + number * 0.05, event)
        self._at(self._duration * 0.2, self._measure)
        for number in range(sandboxes):
            self._at(number / rate, self._arrive)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, event))

    def _join(self) -> None:
        cpus = self.random.choice([8, 16, 32])
        name = f"node{len(self._nodes)}"
        images = self.random.choices(self._popular, cum_weights=self._weights, k=IMAGES_PER_NODE)
        state = NodeState(
            name,
            name,
            tiers=("light", "strong") if self.random.random() < 0.3 else ("light",),
            backends=("native",),
            free_memory_bytes=cpus * 4 * _GIB,
            cpus=float(cpus),
            warm={f"pool{self.random.randrange(POOLS)}": 2},
            images=frozenset(images),
            sampled_at=self._now,
        )
        self._nodes[name] = _Node(state, list(dict.fromkeys(images)))
        for fleet in self._fleets:
            fleet.put(state)
        self._at(self._now + self.random.random() * SAMPLE_S, lambda: self._sample(name))

    def _sample(self, name: str) -> None:
        node = self._nodes[name]
        if node.is_lost:
            return
        node.state = replace(node.state, sampled_at=self._now)
        for fleet in self._fleets:
            fleet.put(node.state)
        if self._now < self._duration:
            self._at(self._now + SAMPLE_S, lambda: self._sample(name))

    def _lose(self) -> None:
        name, node = self.random.choice([*self._nodes.items()])
        if not node.is_lost:
            node.is_lost = True
            self.outcome.lost += len(node.running)
            self._at(self._now + NOTICED_S, lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        for fleet in self._fleets:
            fleet.remove(name)

    def _drain(self) -> None:
        node = self.random.choice([*self._nodes.values()])
        node.state = replace(node.state, is_draining=True)

    def _arrive(self) -> None:
        random, number = self.random, self._number
        pool = f"pool{random.randrange(POOLS)}" if random.random() < 0.3 else ""
        image = None if pool else random.choices(self._popular, cum_weights=self._weights)[0]
        need = Need(
            tier="strong" if random.random() < 0.1 else "light",
            backend="native",
            image=image,
            memory_bytes=random.choice([1, 2, 4]) * _GIB // 2,
            pool_key=pool,
            pulls_image=True,
        )
        self._place(need, number, random.choice(self._fleets))

    def _place(self, need: Need, number: int, fleet: Fleet) -> None:
        for _ in range(ATTEMPTS):
            start = time.perf_counter()
            try:
                seen = self.choose(fleet, need, self.random)
            except ResourceExhausted:
                break
            finally:
                self.outcome.seconds += time.perf_counter() - start
                self.outcome.decisions += 1
            node = self._nodes[seen.node_id]
            state = node.state
            if (
                not (node.is_lost or state.is_draining)
                and state.free_memory_bytes >= need.memory_bytes
            ):
                fleet.put(_with(seen, need))
                self._start(node, need, number)
                return
            need = replace(need, avoid=need.avoid | {seen.node_id})
        self.outcome.rejected += 1

    def _start(self, node: _Node, need: Need, number: int) -> None:
        self.outcome.created += 1
        node.running[number] = need.memory_bytes
        if need.pool_key:
            self.outcome.had_pool += 1
            if node.state.warm.get(need.pool_key, 0) > 0:
                self._at(self._now + 1.0, lambda: self._refill(node, need.pool_key))
            else:
                self.outcome.missed_pool += 1
        node.state = _with(node.state, need)
        if need.image and need.image not in node.images:
            self.outcome.fetched += 1
            node.images = [*node.images[-IMAGES_PER_NODE + 1 :], need.image]
            node.state = replace(node.state, images=frozenset(node.images))
        life = self.random.expovariate(1 / LIFE_S)
        self._at(self._now + life, lambda: self._end(node, number))

    def _refill(self, node: _Node, key: str) -> None:
        warm = node.state.warm
        node.state = replace(node.state, warm={**warm, key: warm.get(key, 0) + 1})

    def _end(self, node: _Node, number: int) -> None:
        memory, state = node.running.pop(number), node.state
        free = state.free_memory_bytes + memory
        node.state = replace(state, free_memory_bytes=free, load=state.load - CPUS_EACH)

    def _measure(self) -> None:
        up = [n.state for n in self._nodes.values() if not (n.is_lost or n.state.is_draining)]
        pressures = [state.pressure for state in up]
        self.outcome.p99.append(quantiles(pressures, n=100)[98] / mean(pressures))
        self.outcome.top.append(max(pressures) / mean(pressures))
        if self._now < self._duration - SAMPLE_S:
            self._at(self._now + SAMPLE_S, self._measure)


def _with(state: NodeState, need: Need) -> NodeState:
    """The state once this sandbox has been placed there."""
    warm = state.warm
    if warm.get(need.pool_key, 0) > 0:
        warm = {**warm, need.pool_key: warm[need.pool_key] - 1}
    return replace(
        state,
        load=state.load + CPUS_EACH,
        free_memory_bytes=state.free_memory_bytes - need.memory_bytes,
        warm=warm,
    )


def choose_at_random(fleet: Fleet, need: Need, random: Random) -> NodeState:
    """The control: any node that meets the hard needs."""
    able = fleet._able(fleet._scope(need), need)
    if not able:
        raise ResourceExhausted("none")
    return random.choice(able)


if __name__ == "__main__":
    print(Simulation(1_000).run(100_000))
    print("200 nodes, at random:", Simulation(200, choose_at_random).run(20_000))
    print("200 nodes:", Simulation(200).run(20_000))
