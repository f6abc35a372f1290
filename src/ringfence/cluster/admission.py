"""Quotas of owners over all nodes, and the queue of creates that wait for room. Pure: no clock, no tasks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop
from typing import Generic, TypeVar

from ..errors import QuotaExceeded, TooManyRequests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


@dataclass(frozen=True)
class Use:
    """Use of an owner, or a quota.

    Attributes:
        sandboxes: How many.
        memory_bytes: Their memory limits together.
    """

    sandboxes: int = 0
    memory_bytes: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.sandboxes + other.sandboxes, self.memory_bytes + other.memory_bytes)

    def __sub__(self, other: Use) -> Use:
        return Use(self.sandboxes - other.sandboxes, self.memory_bytes - other.memory_bytes)


class Quotas:
    """Count what each owner has on all nodes, with what was admitted since they last reported.

    Several gateways do not see each other's admissions until nodes report them. Where a quota must
    be exact, all creates of an owner go through one gateway: `placement.rendezvous(owner, gateways)`.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Mapping[str, Use]] = {}
        self._reported: dict[str, Use] = {}
        self._pending: dict[str, Use] = {}

    def used(self, owner: str) -> Use:
        """Count what an owner has, admitted creates included.

        Args:
            owner: The owner.
        """
        return self._reported.get(owner, Use()) + self._pending.get(owner, Use())

    def report(self, node_id: str, owners: Mapping[str, Use]) -> None:
        """Replace what a node has; a lost or removed node reports nothing.

        Args:
            node_id: The node.
            owners: What each owner has there.
        """
        before = self._nodes.pop(node_id, {})
        if owners:
            self._nodes[node_id] = dict(owners)
        for owner in before.keys() | owners.keys():
            change = owners.get(owner, Use()) - before.get(owner, Use())
            _change(self._reported, owner, change)

    def admit(self, owner: str, more: Use, limit: Use) -> None:
        """Count a create, until `settle`.

        Args:
            owner: Its owner.
            more: What it takes.
            limit: The owner's quota; 0 is no limit.

        Raises:
            QuotaExceeded: The owner would have more than it may; `field` names of what.
        """
        total = self.used(owner) + more
        for field in ("sandboxes", "memory_bytes"):
            most, wanted = getattr(limit, field), getattr(total, field)
            if 0 < most < wanted:
                words = field.replace("_", " ")
                raise QuotaExceeded(
                    f"this would make {wanted:,} {words} on all nodes, and {most:,} are allowed",
                    hint="end sandboxes that are not needed",
                    field=field,
                )
        _change(self._pending, owner, more)

    def settle(self, owner: str, more: Use) -> None:
        """Stop counting a create: it failed, or its node has reported it.

        Args:
            owner: As in `admit`.
            more: As in `admit`.
        """
        _change(self._pending, owner, Use() - more)


def _change(uses: dict[str, Use], owner: str, change: Use) -> None:
    total = uses.get(owner, Use()) + change
    if total == Use():
        uses.pop(owner, None)
    else:
        uses[owner] = total


@dataclass
class _Waiting(Generic[T]):
    item: T
    cost: float
    expires_at: float


class FairQueue(Generic[T]):
    """Creates that wait for room: owners take turns by cost, and each owner's are in order.

    Start-time fair queueing (Goyal, 1996): an owner who sends a thousand waits behind each of its
    own, and delays another owner by one at most. An owner whose next does not fit is passed over,
    so one large create stops nobody; it expires if room for it never comes.

    Args:
        most: How many may wait.
        most_each: How many of one owner may wait.
    """

    def __init__(self, most: int = 10_000, most_each: int = 1_000) -> None:
        self._most, self._most_each = most, most_each
        self._queues: dict[str, deque[_Waiting[T]]] = {}
        self._starts: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, owner: str, item: T, *, expires_at: float, cost: float = 1.0) -> None:
        """Let an item wait.

        Args:
            owner: Whose turn it uses.
            item: What `pop` returns.
            expires_at: When `expire` removes it.
            cost: How much of a turn it uses, above 0.

        Raises:
            TooManyRequests: As many wait as may.
        """
        queue = self._queues.get(owner, ())
        for count, most, whose in (
            (len(queue), self._most_each, "of this owner "),
            (self._count, self._most, ""),
        ):
            if count >= most:
                raise TooManyRequests(f"{count:,} creates {whose}wait for room already")
        if not queue:
            queue = self._queues[owner] = deque()
            # An owner that comes back keeps no credit, and still pays for what it just had.
            self._starts[owner] = max(self._now, self._starts.get(owner, 0.0))
        assert isinstance(queue, deque)
        queue.append(_Waiting(item, cost, expires_at))
        self._count += 1

    def pop(self, fits: Callable[[T], bool] = lambda _item: True) -> tuple[str, T] | None:
        """Remove the next item, with its owner; None if nothing that waits first of its owner fits.

        Args:
            fits: Whether there is room for an item.
        """
        turns = [(self._starts[owner], owner) for owner in self._queues]
        heapify(turns)
        while turns:
            start, owner = heappop(turns)
            first = self._queues[owner][0]
            if fits(first.item):
                self._now = max(self._now, start)
                self._starts[owner] = start + first.cost
                self._remove_first(owner)
                return owner, first.item
        return None

    def expire(self, now: float) -> list[tuple[str, T]]:
        """Remove and return what has waited too long.

        Args:
            now: By the clock of `expires_at`.
        """
        expired: list[tuple[str, T]] = []
        for owner, queue in [*self._queues.items()]:
            late = [each for each in queue if each.expires_at <= now]
            if late:
                expired += [(owner, each.item) for each in late]
                self._count -= len(late)
                left = deque(each for each in queue if each.expires_at > now)
                self._replace(owner, left)
        return expired

    def _remove_first(self, owner: str) -> None:
        self._queues[owner].popleft()
        self._count -= 1
        self._replace(owner, self._queues[owner])

    def _replace(self, owner: str, queue: deque[_Waiting[T]]) -> None:
        if queue:
            self._queues[owner] = queue
        else:
            del self._queues[owner]
            if len(self._starts) > 2 * len(self._queues) + 100:
                # Starts before the present mean nothing any more.
                self._starts = {
                    each: start
                    for each, start in self._starts.items()
                    if each in self._queues or start > self._now
                }
