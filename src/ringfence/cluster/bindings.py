"""Names that clients chose, bound to nodes: what they stand for, and when they are forgotten."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass

from ..api.access.caller import ADMIN, Caller
from ..errors import RingfenceError
from .moved import KEEP_S as MOVED_S
from .moved import MOVED, Moved
from .nodes import GATEWAY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from .directory import Directory
    from .nodes import Known, Nodes
    from .scatter import Scatter

KEEP_S = 86_400.0
"""As long as a server can tell of ended sessions: until then, an idempotency key gives the same one."""
MOST = 100_000
"""Bindings of ended sandboxes; the oldest are forgotten first."""
HOME = "home/"
"""Keys of the nodes where clients build templates."""
_YOUNG_S = 600.0  # what is being made is on no list yet, and clocks of gateways differ
_EVERY_S = 600.0
_PAGE = 1000

logger = logging.getLogger("ringfence.cluster")


@dataclass(frozen=True)
class Binding:
    """A name's node.

    Attributes:
        bound_at: In seconds since 1970.
        made: Id of what was made under the name; empty while it is being made.
    """

    node: str
    bound_at: float
    made: str = ""

    def written(self) -> bytes:
        return f"{self.node} {self.bound_at:.0f} {self.made}".encode()

    @classmethod
    def read(cls, value: bytes) -> Binding:
        node, bound_at, made = [*value.decode().split(" "), "", ""][:3]
        return cls(node, float(bound_at or 0), made)


def id_name(any_id: str) -> str:
    """The binding of an id that a client chose; none for one that names its node."""
    return f"id/{hashlib.sha256(any_id.encode()).hexdigest()}" if any_id else ""


def forgotten(
    bindings: dict[str, Binding], living: dict[str, set[str]], now: float, most: int = MOST
) -> list[str]:
    """Choose what to forget: what is over, and old or one of too many.

    Args:
        living: Ids that live, by node; of a node that is missing here, nothing is known.
        most: How many bindings of what is over are kept.
    """
    over = [
        (each.bound_at, name)
        for name, each in bindings.items()
        if each.node in living
        and each.made not in living[each.node]
        and each.bound_at < now - _YOUNG_S
    ]
    over.sort(reverse=True)
    return [name for i, (at, name) in enumerate(over) if i >= most or at < now - KEEP_S]


async def keep_pruning(directory: Directory, nodes: Nodes, scatter: Scatter) -> None:
    beats: dict[str, bytes] = {}
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            loop = asyncio.get_running_loop()
            beats = await loop.run_in_executor(None, forget_gateways, directory, beats)
            await prune(directory, nodes, scatter, time.time())
        except RingfenceError as exc:
            logger.warning("bindings are not pruned: %s", exc)


def forget_gateways(directory: Directory, before: dict[str, bytes]) -> dict[str, bytes]:
    """Remove the keys of gateways that have ended; the beats of the others.

    Args:
        before: The beats of the last look, minutes ago. A gateway that lives, and was cut off for so
            long, writes its key again.
    """
    beats = directory.many(GATEWAY)
    for name in [each for each, beat in beats.items() if before.get(each) == beat]:
        directory.remove(name)
        del beats[name]
    return beats


async def prune(directory: Directory, nodes: Nodes, scatter: Scatter, now: float) -> int:
    """Forget bindings of what is over; how many.

    Raises:
        RingfenceError: A node does not answer: what lives there is not known.
    """
    loop = asyncio.get_running_loop()
    values = await loop.run_in_executor(None, directory.many, "bind/")
    bindings = {name: Binding.read(value) for name, value in values.items()}
    here = {each.node for each in bindings.values()}
    living: dict[str, set[str]] = {tag: set() for tag in here if nodes.is_lost(tag)}
    for node in nodes.all():
        if node.tag in here:
            living[node.tag] = await _living(scatter, node)
    names = forgotten(bindings, living, now)
    for name in names:
        # It may have been bound anew since.
        if await loop.run_in_executor(None, directory.get, name) == values[name]:
            await loop.run_in_executor(None, directory.remove, name)
    homes = await loop.run_in_executor(None, directory.many, HOME)
    for name, value in homes.items():
        home = Binding.read(value)
        if nodes.is_lost(home.node) and home.bound_at < now - KEEP_S:
            await loop.run_in_executor(None, directory.remove, name)
    await _prune_moved(directory, values.keys() - {*names}, now)
    return len(names)


async def _prune_moved(directory: Directory, bound: Collection[str], now: float) -> None:
    """Forget evicted sandboxes that were not asked for in a month, or have ended elsewhere."""
    loop = asyncio.get_running_loop()
    for key, value in (await loop.run_in_executor(None, directory.many, MOVED)).items():
        moved, name = Moved.read(value), f"bind/{id_name(key.removeprefix(MOVED))}"
        if name not in bound and moved.at < now - (KEEP_S if moved.node else MOVED_S):
            await loop.run_in_executor(None, directory.remove, key)


async def _living(scatter: Scatter, node: Known) -> set[str]:
    scope = {"state": {"caller": Caller("gateway", ADMIN), "request_id": "prune"}}
    found: set[str] = set()
    cursor = ""
    while True:
        target = f"/v1/sandboxes?limit={_PAGE}&cursor={cursor}".encode()
        page = await scatter.ask(node, scope, "GET", target)
        found.update(each[name] for each in page["items"] for name in ("id", "session_id"))
        if not (cursor := page["next_cursor"]):
            return found


__all__ = ["HOME", "Binding", "forget_gateways", "forgotten", "id_name", "keep_pruning", "prune"]
