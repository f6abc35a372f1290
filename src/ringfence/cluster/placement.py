"""Choice of a node for each new sandbox. Pure: no Ray, no clock, no randomness but what the caller passes.

A node must meet every hard need. Of those that do, a few are drawn and the cheapest is taken: two of
all ("power of two choices": gateways that see equally old loads do not all run to the idlest node), two
that have the image, and two that have a warm sandbox. So a popular image stays where it is until its
nodes are busier than others by what fetching it is worth.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from ..errors import BackendUnavailable, ImageNotFound, ResourceExhausted, RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from random import Random

    _Trait = tuple[str, str]

SPREAD, PACK = "spread", "pack"
IMAGE_WORTH = 0.5
"""How much busier a node may be for having the image: half of its processors."""
WARM_WORTH = 0.25
"""The same for a warm sandbox."""
STALE_S = 3.0
"""Samples older than the newest by more are used only if no fresher node was drawn."""
PACK_LIMIT = 1.0
"""Packing fills a node up to this pressure; beyond it, the idlest is taken."""
_DRAWS = 8
"""Random draws for one of the two, before all nodes are looked at."""


@dataclass(frozen=True)
class NodeState:
    """State of a node, as far as it is known.

    Attributes:
        node_id: Its name in the cluster.
        address: Where its daemon is reached.
        tiers: The tiers that it offers.
        backends: The backends that work there.
        free_memory_bytes: Memory that sandboxes may still take.
        cpus: Its processors.
        load: Processors in use: by what runs, and by what was placed there since the sample.
        warm: Prebuilt sandboxes by the key of their pool.
        images: Images on its disk.
        labels: Labels that operators gave it, such as `gpu` or `zone`.
        is_draining: Whether it takes nothing new.
        sampled_at: When this was measured, by the clock of whoever compares samples.
        room: How many more sandboxes it may have; None for no bound.
        groups: Anti-affinity groups of which a sandbox runs there.
    """

    node_id: str
    address: str
    tiers: Collection[str] = ()
    backends: Collection[str] = ()
    free_memory_bytes: int = 0
    cpus: float = 1.0
    load: float = 0.0
    warm: Mapping[str, int] = field(default_factory=dict)
    images: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False
    sampled_at: float = 0.0
    room: int | None = None
    groups: frozenset[str] = frozenset()

    @property
    def pressure(self) -> float:
        """Load for each processor: 0 is idle, 1 is busy, above 1 work waits."""
        return self.load / self.cpus if self.cpus > 0 else float("inf")


@dataclass(frozen=True)
class Need:
    """Needs of a sandbox. An empty one asks for nothing.

    Attributes:
        tier: A tier that the node must offer.
        backend: A backend that must work there.
        image: An image to start from.
        labels: Labels that the node must have with these values.
        memory_bytes: Memory that must be free.
        pool_key: Key of the pool that could serve it.
        anti_affinity: A group of which no sandbox may run there yet.
        strategy: `spread` over idle nodes, or `pack` busy ones and leave others to be released.
        pulls_image: Whether a node without the image fetches it; otherwise the image is a hard need.
        avoid: Nodes that have refused it already.
    """

    tier: str = ""
    backend: str = ""
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    pool_key: str = ""
    anti_affinity: str = ""
    strategy: str = SPREAD
    pulls_image: bool = False
    avoid: frozenset[str] = frozenset()


def rendezvous(key: str, nodes: Iterable[str], count: int = 1) -> list[str]:
    """Order nodes for a key: every gateway finds the same, and a lost node moves only its own keys.

    Args:
        key: A name, an idempotency key or an owner.
        nodes: Ids of nodes.
        count: How many to return: the first is responsible, the next take over in turn.
    """
    seed = blake2b(key.encode(), digest_size=16).digest()
    weighed = sorted(
        (blake2b(node.encode(), key=seed, digest_size=8).digest(), node) for node in nodes
    )
    return [node for _weight, node in weighed[-1 : -count - 1 : -1]]


class Fleet:
    """The nodes to choose from, indexed by what they have: a decision looks at few of them.

    Args:
        nodes: The first states; `put` adds and replaces.
    """

    def __init__(self, nodes: Iterable[NodeState] = ()) -> None:
        self._states: dict[str, NodeState] = {}
        self._having: dict[_Trait, _Bag] = {}
        self._all = _Bag()
        self._by_pressure: list[tuple[float, str]] = []
        self._newest = float("-inf")
        for each in nodes:
            self.put(each)

    def __len__(self) -> int:
        return len(self._states)

    def get(self, node_id: str) -> NodeState | None:
        """The state of a node, None for an unknown one.

        Args:
            node_id: Its id.
        """
        return self._states.get(node_id)

    def put(self, state: NodeState) -> None:
        """Add a node, or replace what is known of it.

        Args:
            state: What is known now, with what was placed there since.
        """
        node_id, old = state.node_id, self._states.get(state.node_id)
        self._states[node_id] = state
        self._newest = max(self._newest, state.sampled_at)
        if old is None:
            self._all.add(node_id)
        else:
            self._unrank(old)
        insort(self._by_pressure, (state.pressure, node_id))
        if old is None or not _same(state, old):
            self._index(node_id, _traits(old) if old else set(), _traits(state))
        if old is None or state.warm != old.warm:
            self._index(node_id, _warm(old) if old else set(), _warm(state))

    def _index(self, node_id: str, before: set[_Trait], after: set[_Trait]) -> None:
        for trait in before - after:
            bag = self._having[trait]
            bag.discard(node_id)
            if not len(bag):
                del self._having[trait]
        for trait in after - before:
            self._having.setdefault(trait, _Bag()).add(node_id)

    def remove(self, node_id: str) -> None:
        """Forget a node; an unknown one is no error.

        Args:
            node_id: Its id.
        """
        if state := self._states.pop(node_id, None):
            self._all.discard(node_id)
            self._unrank(state)
            self._index(node_id, _traits(state) | _warm(state), set())

    def choose(self, need: Need, random: Random) -> NodeState:
        """Choose a node for a sandbox.

        Args:
            need: What it must have.
            random: Where draws come from; seeded, the choice is repeatable.

        Raises:
            BackendUnavailable: No node offers the tier, the backend or the labels; `field` names which.
            ImageNotFound: No node that does has the image, and none may fetch it.
            ResourceExhausted: Every node that does is draining or full, or runs one of the group.
        """
        scope = self._scope(need)
        if need.strategy == PACK:
            drawn = self._fullest(need)
        else:
            drawn = self._draw(scope, need, random) + self._near(need, scope, random)
        if not drawn or (len(drawn) < 2 and need.strategy != PACK):
            able = self._able(scope, need)
            drawn = random.sample(able, min(2, len(able)))
        if not drawn:
            raise _refusal(need, self._states.values())
        return _best(drawn, need, self._newest)

    def _scope(self, need: Need) -> _Bag:
        """The fewest nodes that a hard need leaves."""
        bags = [self._having.get(trait, _EMPTY) for trait in _hard_traits(need)]
        return min([self._all, *bags], key=len)

    def _near(self, need: Need, scope: _Bag, random: Random) -> list[NodeState]:
        near: list[NodeState] = []
        for trait in (("image", need.image or ""), ("warm", need.pool_key)):
            bag = self._having.get(trait)
            if bag is not None and len(bag) < len(scope):
                near += self._draw(bag, need, random)
        return near

    def _draw(self, bag: _Bag, need: Need, random: Random) -> list[NodeState]:
        """Up to two different nodes that meet the need, by a bounded number of draws."""
        drawn: list[NodeState] = []
        size, states = len(bag), self._states
        for _ in range(min(_DRAWS, 2 * size)):
            state = states[bag.items[int(random.random() * size)]]
            if _meets(need, state) and not (drawn and state is drawn[0]):
                drawn.append(state)
                if len(drawn) == 2:
                    break
        return drawn

    def _able(self, bag: _Bag, need: Need) -> list[NodeState]:
        least, states = need.memory_bytes, self._states
        roomy = [
            state
            for state in map(states.__getitem__, bag.items)
            if state.free_memory_bytes >= least and not state.is_draining
        ]
        return [state for state in roomy if _meets(need, state)]

    def _fullest(self, need: Need) -> list[NodeState]:
        """The first few nodes below the limit that meet the need, busiest first."""
        found: list[NodeState] = []
        for place in range(bisect_left(self._by_pressure, (PACK_LIMIT, "")) - 1, -1, -1):
            state = self._states[self._by_pressure[place][1]]
            if _meets(need, state):
                found.append(state)
                if len(found) == _DRAWS:
                    break
        return found

    def _unrank(self, state: NodeState) -> None:
        del self._by_pressure[bisect_left(self._by_pressure, (state.pressure, state.node_id))]


class _Bag:
    """A set that a random member is drawn from in constant time."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        self.items: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: str) -> None:
        self._places[item] = len(self.items)
        self.items.append(item)

    def discard(self, item: str) -> None:
        place, last = self._places.pop(item), self.items.pop()
        if last != item:
            self.items[place] = last
            self._places[last] = place


_EMPTY = _Bag()
_LATER = "try again later, end other sandboxes, or add nodes"
_OTHERWISE = "ask for less, or add a node that has it: `ringfence nodes` lists what each has"


def _refusal(need: Need, nodes: Collection[NodeState]) -> RingfenceError:
    """Name the first hard need that no node meets, of those that meet the ones before it."""
    if not nodes:
        return ResourceExhausted("the cluster has no node", hint=_LATER)
    left: Collection[NodeState] = nodes
    for hard in _hard_needs(need):
        able = [state for state in left if hard.meets(state)]
        if not able:
            which = "node" if len(left) == len(nodes) else "suitable node"
            message = f"none of {len(left):,} {which}s {hard.words}"
            hint = _LATER if issubclass(hard.error, ResourceExhausted) else _OTHERWISE
            return hard.error(message, hint=hint, field=hard.field)
        left = able
    raise AssertionError("a node meets every hard need")


def _best(drawn: list[NodeState], need: Need, newest: float) -> NodeState:
    fresh = [each for each in drawn if newest - each.sampled_at <= STALE_S] or drawn
    if need.strategy == PACK and (below := [e for e in fresh if e.pressure < PACK_LIMIT]):
        return max(below, key=lambda each: (each.pressure - _cost(each, need), each.node_id))
    return min(fresh, key=lambda each: each.pressure + _cost(each, need))


def _same(state: NodeState, old: NodeState) -> bool:
    """Tell that nothing changed that lasts: most samples change loads alone."""
    return (
        state.images == old.images
        and state.tiers == old.tiers
        and state.backends == old.backends
        and state.labels == old.labels
    )


def _traits(state: NodeState) -> set[_Trait]:
    return {
        *(("tier", each) for each in state.tiers),
        *(("backend", each) for each in state.backends),
        *(("image", each) for each in state.images),
        *(("label", f"{key}={value}") for key, value in state.labels.items()),
    }


def _warm(state: NodeState) -> set[_Trait]:
    return {("warm", key) for key, count in state.warm.items() if count > 0}


def _hard_traits(need: Need) -> list[_Trait]:
    traits = [("label", f"{key}={value}") for key, value in need.labels.items()]
    if need.tier:
        traits.append(("tier", need.tier))
    if need.backend:
        traits.append(("backend", need.backend))
    if need.image and not need.pulls_image:
        traits.append(("image", need.image))
    return traits


def _meets(need: Need, state: NodeState) -> bool:
    """Test every hard need; `_HARD` has the same one by one, with their names."""
    return (
        state.free_memory_bytes >= need.memory_bytes
        and not state.is_draining
        and (state.room is None or state.room > 0)
        and (not need.tier or need.tier in state.tiers)
        and (not need.backend or need.backend in state.backends)
        and (not need.image or need.pulls_image or need.image in state.images)
        and (not need.labels or _labelled(need, state))
        and (not need.anti_affinity or need.anti_affinity not in state.groups)
        and state.node_id not in need.avoid
    )


def _labelled(need: Need, state: NodeState) -> bool:
    return all(state.labels.get(key) == value for key, value in need.labels.items())


def _cost(state: NodeState, need: Need) -> float:
    """Weigh what the node lacks, as pressure."""
    cost = 0.0
    if need.image and need.image not in state.images:
        cost += IMAGE_WORTH
    if need.pool_key and state.warm.get(need.pool_key, 0) <= 0:
        cost += WARM_WORTH
    return cost


class _Hard(NamedTuple):
    """A hard need that is asked for, so that a refusal can name it."""

    field: str
    words: str
    meets: Callable[[NodeState], bool]
    error: type[RingfenceError] = ResourceExhausted


def _hard_needs(need: Need) -> list[_Hard]:
    """List the hard needs, those first that no later node load changes; `_meets` asks for the same."""
    hard = []
    if need.tier:
        words = f"offers tier {need.tier!r}"
        hard.append(_Hard("tier", words, lambda node: need.tier in node.tiers, BackendUnavailable))
    if need.backend:
        words = f"has backend {need.backend!r}"
        hard.append(
            _Hard("backend", words, lambda node: need.backend in node.backends, BackendUnavailable)
        )
    if need.labels:
        words = "has " + ", ".join(f"{key}={value}" for key, value in sorted(need.labels.items()))
        hard.append(_Hard("labels", words, lambda node: _labelled(need, node), BackendUnavailable))
    if need.image and not need.pulls_image:
        words = f"has image {need.image!r}"
        hard.append(_Hard("image", words, lambda node: need.image in node.images, ImageNotFound))
    if need.anti_affinity:
        words = f"is without a sandbox of group {need.anti_affinity!r}"
        hard.append(
            _Hard("anti_affinity", words, lambda node: need.anti_affinity not in node.groups)
        )
    hard.append(_Hard("", "takes new sandboxes: all drain", lambda node: not node.is_draining))
    words = f"has {need.memory_bytes:,} bytes of memory free"
    hard.append(
        _Hard("memory_bytes", words, lambda node: node.free_memory_bytes >= need.memory_bytes)
    )
    hard.append(
        _Hard("", "has room for another sandbox", lambda node: node.room is None or node.room > 0)
    )
    words = f"is left beside the {len(need.avoid)} that refused"
    hard.append(_Hard("", words, lambda node: node.node_id not in need.avoid))
    return hard
