"""The nodes of a cluster as a gateway sees them: who is there, who is silent, who is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import socket
import time
from dataclasses import dataclass, field, replace
from functools import cache

from ..daemon.membership import Scaling
from ..errors import RingfenceError, SandboxLost, ServerUnreachable
from .draining import can_restore
from .moved import MOVED
from .placement import PACK, Fleet, NodeState, rendezvous

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from ..api.access.caller import Caller
    from .directory import Directory, KeyRing
    from .moved import Moved
    from .placement import Need

LOOK_S = 0.5
KEYS_S = 0.1
"""Between two looks whether keys were changed."""
UNREACHED_S = 5.0
"""After a failed connection: new sandboxes go elsewhere. The node may be well, and cut off from here."""
SILENT_S = 2.5
"""Without a beat: nothing new is placed there."""
LOST_S = 8.0
"""Without a beat, and its machine does not answer: its sandboxes are lost."""
ANSWERS, REFUSED, NOTHING = "answers", "refused", "nothing"
GATEWAY = "gateway/"
"""Beginning of the keys in which gateways have their beats."""
STALE_S = 10.0
"""Without an answer of Ray's head: a gateway takes no keys then."""
_PROBE_S = 1.0
_START_AGAIN_S = 20.0
_MOST_LOST = 1000

logger = logging.getLogger("ringfence.cluster")


@dataclass
class Known:
    """A node.

    Attributes:
        beat: Text that changes while its actor lives; clocks of different machines are not compared.
        heard_at: When it last changed, by this machine's monotonic clock.
        pending: Creates that were sent there since.
        unreached_at: When this gateway could not connect to it, although it lives.
    """

    tag: str
    form: dict[str, Any]
    heard_at: float
    pending: int = 0
    unreached_at: float = float("-inf")

    @property
    def address(self) -> str:
        """Where its daemon listens: the unix socket if it is on this machine, else TLS."""
        near: str = self.form["socket"]
        if self.form["machine"] == machine() and os.path.exists(near):
            return f"unix:{near}"
        far: str = self.form["address"]
        return far

    def state(self) -> NodeState:
        form = self.form
        return NodeState(
            node_id=self.tag,
            address=self.address,
            tiers=tuple(form["tiers"]),
            backends=tuple(form["backends"]),
            free_memory_bytes=form["free_memory_bytes"],
            cpus=float(form["cpus"]),
            # The kernel's load lags by a minute; sandboxes that were just placed count at once.
            load=form["load"] + self.pending,
            room=form["max_sandboxes"] - form["active"] - self.pending,
            warm=form["warm"],
            images=frozenset(form["images"]),
            labels=form["labels"],
            is_draining=form["is_draining"],
            sampled_at=self.heard_at,
        )


@dataclass
class Lost:
    """A node that is gone, and what was known of its sandboxes, by id of sandbox and session."""

    tag: str
    why: str
    sandboxes: dict[str, dict[str, Any]] = field(default_factory=dict)


class NoNodes(ServerUnreachable):
    """None answers now: nothing was sent to any."""


class Nodes:
    """All nodes. Read on the event loop; `look` runs in a thread, twice a second.

    Attributes:
        gateway: A name of this gateway, of which the store has a beat.
        waiting: Creates that wait here for a node.
        may_grow: Whether Ray is asked for a node where none has room.
        shares_snapshots: Whether every node reads what another one has saved.
    """

    def __init__(self, directory: Directory, start: Callable[[str], Any]) -> None:
        self._directory, self._start = directory, start
        self._known: dict[str, Known] = {}
        self._lost: dict[str, Lost] = {}
        self._started: dict[str, float] = {}
        self._random = random.Random()
        self._fleet = Fleet()
        self.gateway, self._beats = secrets.token_hex(8), 0
        self._looked_at = 0.0
        self._troubles: dict[str, str] = {}
        self._moved: frozenset[str] = frozenset()
        config = directory.config()
        self.shares_snapshots = bool(config.get("snapshot_store"))
        manager = config.get("manager", {})
        self._most_of_client: int | None = manager.get("max_of_client")
        scaling = config.get("scaling")
        self._scaling = None if scaling is None else Scaling.from_json(scaling)
        self.waiting, self.may_grow = 0, False

    # -- looking --------------------------------------------------------------------------------

    def look(self) -> None:
        ray_nodes = self._directory.ray_nodes()
        released = {key.removeprefix("released/") for key in self._directory.list("released/")}
        self._start_actors(ray_nodes.keys() - released)
        lost = {key.removeprefix("lost/") for key in self._directory.list("lost/")}
        now = time.monotonic()
        for text in self._directory.many("node/").values():
            form = json.loads(text)
            tag = form["node"]
            known = self._known.get(tag)
            if tag in lost:
                self._lose(tag, "")
            elif form["ray_id"] not in ray_nodes:
                self._give_up(tag, "its Ray node is gone")
            elif known is None:
                self._known[tag] = Known(tag, form, now)
            elif known.form["beat"] != form["beat"]:
                known.form, known.heard_at, known.pending = form, now, 0
            elif now - known.heard_at > SILENT_S:
                self._judge(known, ray_nodes[form["ray_id"]], now - known.heard_at)
        for tag in lost - self._lost.keys():
            self._lose(tag, "")
        self._beats += 1
        told = f"{self._beats} {self.waiting}"
        self._directory.put(f"{GATEWAY}{self.gateway}", told.encode())
        if self._scaling is not None:
            state = json.loads(self._directory.get("scale") or b"{}")
            self.may_grow = state.get("may_grow", False)
        self._rank()
        self._looked_at = now
        moved = (key.removeprefix(MOVED) for key in self._directory.list(MOVED))
        self._moved = frozenset(moved)
        found = self._directory.many("trouble/")
        self._troubles = {
            key.removeprefix("trouble/"): value.decode(errors="replace")
            for key, value in found.items()
        }

    def _rank(self) -> None:
        """Let the ready nodes be chosen from, as they are now; none on which no backend works."""
        fleet = Fleet(each.state() for each in self.ready() if each.form["backends"])
        self._fleet = fleet  # at once: the event loop chooses meanwhile

    def _judge(self, known: Known, raylet: tuple[str, int], silent_s: float) -> None:
        """Give up a silent node, if its raylet is gone: Ray itself takes 15 s to say so.

        While the raylet lives, Ray starts the actor again.
        """
        found = probe(*raylet)
        if found == REFUSED:
            self._give_up(known.tag, "its raylet is gone")
        elif found == NOTHING and silent_s > LOST_S:
            self._give_up(known.tag, f"its machine has been silent for {silent_s:.0f} s")

    def _start_actors(self, ray_nodes: Collection[str]) -> None:
        """Start the actor of each Ray node of which nothing is heard; where it runs, that is nothing."""
        heard, now = {each.form["ray_id"] for each in self._known.values()}, time.monotonic()
        for ray_id in ray_nodes:
            since = now - self._started.get(ray_id, -_START_AGAIN_S)
            if ray_id in heard or since < _START_AGAIN_S:
                continue
            self._started[ray_id] = now
            try:
                self._start(ray_id)
            except Exception as exc:  # noqa: BLE001  Ray raises many kinds; the next look tries again
                logger.warning("cannot start the actor of Ray node %s: %s", ray_id, exc)

    def _give_up(self, tag: str, why: str) -> None:
        """Call its sandboxes lost, for every gateway, and for its own actor should it come back."""
        self._directory.put_first(f"lost/{tag}", repr(time.time()).encode())
        self._lose(tag, why)
        self._directory.remove(f"node/{tag}")

    def _lose(self, tag: str, why: str) -> None:
        if tag not in self._lost:
            found = json.loads(self._directory.get(f"list/{tag}") or b"[]")
            sandboxes = {each[name]: each for each in found for name in ("id", "session_id")}
            why = why or self._why_lost(tag)
            self._lost[tag] = Lost(tag, why, sandboxes)
            level = logging.WARNING if found else logging.INFO
            logger.log(level, "node %s is gone with %d sandboxes: %s", tag, len(found), why)
            while len(self._lost) > _MOST_LOST:
                del self._lost[next(iter(self._lost))]
        # Last: who asks meanwhile, on the event loop, must find it here or there.
        self._known.pop(tag, None)

    def _why_lost(self, tag: str) -> str:
        """Read why a node was given up."""
        value = (self._directory.get(f"lost/{tag}") or b"").decode()
        return value.partition(" ")[2] or "the cluster gave it up"

    def leave(self) -> None:
        """Remove this gateway's beat: it ends. One that cannot is forgotten by the others."""
        # Without Ray's head, its store blocks for minutes.
        if time.monotonic() - self._looked_at < SILENT_S:
            with contextlib.suppress(RingfenceError):
                self._directory.remove(f"{GATEWAY}{self.gateway}")

    # -- reading --------------------------------------------------------------------------------

    def check_fresh(self) -> None:
        """Refuse to go on with what may have changed long ago: keys may have been removed.

        Raises:
            ServerUnreachable: Ray's head has not answered for a while.
        """
        if time.monotonic() - self._looked_at > STALE_S:
            hint = "use another gateway; `ray status` shows how the cluster is"
            raise ServerUnreachable("this gateway is cut off from the cluster's head", hint=hint)

    def all(self) -> list[Known]:
        """Every node that is not lost, in the order of their names."""
        return sorted(self._known.values(), key=lambda each: each.tag)

    def ready(self) -> list[Known]:
        """Nodes that were heard of just now."""
        before = time.monotonic() - SILENT_S
        return [each for each in self.all() if each.heard_at >= before]

    def any(self) -> Known:
        """Some node, for what each answers alike.

        Raises:
            ServerUnreachable: There is none.
        """
        if found := self.ready() or self.all():
            return self._random.choice(found)
        raise self._none()

    def bounded(self, caller: Caller) -> Caller:
        """The caller with the lower of its key's bound of sandboxes and that of every client."""
        bounds = [each for each in (caller.max_sandboxes, self._most_of_client) if each is not None]
        return replace(caller, max_sandboxes=min(bounds, default=None))

    @property
    def wait_s(self) -> float:
        """How long a create waits for a node that was asked for."""
        return self._scaling.wait_s if self._scaling is not None and self.may_grow else 0.0

    def unreached(self) -> set[str]:
        """Nodes that this gateway could not connect to just now."""
        before = time.monotonic() - UNREACHED_S
        return {each.tag for each in self._known.values() if each.unreached_at > before}

    def troubles(self) -> str:
        """Say which nodes' daemons do not start, and why; empty where all do."""
        return "; ".join(f"node {tag}: {why}" for tag, why in sorted(self._troubles.items()))

    def heir(self, any_id: str, tag: str) -> Known | None:
        """The node that takes over a snapshot of a lost one from the shared store."""
        if not self.shares_snapshots or tag not in self._lost or not any_id.startswith("snap-"):
            return None
        ready = {each.tag: each for each in self.ready()}
        # Each gateway finds the same one, so that two restores fetch it once.
        return next((ready[each] for each in rendezvous(any_id, ready)), None)

    def saved(self, sandbox_id: str, tag: str) -> dict[str, Any] | None:
        """A sandbox of a lost node that its drain has saved, and that was not used since; else None."""
        lost = self._lost.get(tag)
        known = lost.sandboxes.get(sandbox_id) if lost is not None else None
        return known if known is not None and known.get("is_whole") else None

    def is_moved(self, sandbox_id: str) -> bool:
        """Return whether a sandbox was evicted from the node that its id names, or is bound to."""
        return sandbox_id in self._moved

    def restoring(self, moved: Moved) -> list[Known]:
        """Nodes that can restore an evicted sandbox, the idlest first."""
        able = [
            each
            for each in self.ready()
            if can_restore(each.form, moved.backend, moved.needs, moved.image)
        ]
        return sorted(able, key=lambda each: each.state().pressure)

    def saved_by(self, any_id: str) -> str | None:
        """Return the owner of a lost sandbox that can be resumed under its id; None: there is none."""
        for lost in list(self._lost.values()):  # another thread looks for lost nodes meanwhile
            known = lost.sandboxes.get(any_id, {})
            if known.get("is_whole"):
                return str(known["owner"])
        return None

    def is_lost(self, tag: str) -> bool:
        """Return whether the node of this name is gone for good."""
        return tag in self._lost

    def find(self, tag: str) -> Known | None:
        return self._known.get(tag)

    def check_lost(self, any_id: str, tag: str, sees: str | None) -> None:
        """Raise what a caller is told of a sandbox that went with its node.

        Args:
            sees: The client whose sandboxes the caller may hear of; None: every one's.

        Raises:
            SandboxLost: It did.
        """
        lost = self._lost.get(tag)
        if lost is None:
            return
        known = lost.sandboxes.get(any_id)
        if known is not None and sees not in (None, known["owner"]):
            return
        raise lost_sandbox(any_id, known)

    def _none(self) -> RingfenceError:
        # Paths of a host are for its operators: they are in the gateway's log, and `ringfence nodes`.
        hint = "`ringfence nodes` lists them; try again"
        return NoNodes("the cluster has no node that answers", hint=hint)

    def choose(self, need: Need) -> Known:
        """Choose a node for a new sandbox.

        Raises:
            RingfenceError: See `Fleet.choose`.
            ServerUnreachable: There is no node at all.
        """
        fleet = self._fleet
        if self._scaling is not None:  # others get empty, and are released
            need = replace(need, strategy=PACK)
        while len(fleet):
            chosen = fleet.choose(need, self._random)
            if (known := self._known.get(chosen.node_id)) is None:
                fleet.remove(chosen.node_id)
                continue
            known.pending += 1
            fleet.put(known.state())
            return known
        raise self._none()


def lost_sandbox(any_id: str, known: dict[str, Any] | None) -> SandboxLost:
    """The error for a sandbox whose node is gone, with what was known of it."""
    told, hint = "", "create it again: another node takes it"
    if known and known.get("snapshot"):
        hint = f"it was saved before: create it again with snapshot_id={known['snapshot']!r}"
        if known.get("is_whole"):
            hint = f"resume it: another node restores its files, of {known['snapshot']!r}"
    if known:
        named = f" {known['name']!r}" if known["name"] else ""
        told = f":{named} it was {known['state']}, made at {known['created_at']:.0f}"
    return SandboxLost(f"sandbox {any_id} went with its node{told}", hint=hint, retryable=True)


@cache
def machine() -> str:
    """The boot id of this machine: the same in all its containers, and of no other."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


async def keep_looking(nodes: Nodes) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            await loop.run_in_executor(None, nodes.look)
        except RingfenceError as exc:
            logger.warning("cannot look at the cluster: %s", exc)
        await asyncio.sleep(LOOK_S)


async def keep_reading(keys: KeyRing, changed: Callable[[], None]) -> None:
    """Call `changed`, in a thread, whenever any gateway has changed a key."""
    loop, version = asyncio.get_running_loop(), b""
    while True:
        with contextlib.suppress(RingfenceError):  # `keep_looking` says so
            found = await loop.run_in_executor(None, keys.version)
            if found != version:
                await loop.run_in_executor(None, changed)
                version = found
        await asyncio.sleep(KEYS_S)


def await_gateways(directory: Directory) -> None:
    """Return once every gateway has looked anew at all that the directory has now, or is silent."""
    began, first = time.monotonic(), _beats(directory)
    while time.monotonic() - began < SILENT_S:
        now = _beats(directory)
        # The first look that ends after this began may have read before it.
        if all(now.get(name, beat + 2) >= beat + 2 for name, beat in first.items()):
            return
        time.sleep(LOOK_S / 2)


def _beats(directory: Directory) -> dict[str, int]:
    return {name: int(told.split()[0]) for name, told in directory.many(GATEWAY).items()}


def probe(host: str, port: int) -> str:
    """Look whether anything listens at an address; a machine that is gone does not even refuse."""
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return NOTHING
    return ANSWERS
