"""The actor on Ray's head that asks Ray for nodes and releases them.

There is one of it, by its name; it lives as long as the head, without which Ray adds no node anyway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from dataclasses import replace

from ..daemon.membership import Scaling
from ..errors import RingfenceError
from . import node
from .directory import HEAD, Directory, namespace_of
from .nodes import GATEWAY, SILENT_S, Nodes
from .scaling import BY_OPERATOR, BY_SCALING, Policy, Sample, room_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from .nodes import Known
    from .scaling import Decision

_EVERY_S = 1.0
_ASK_AGAIN_S = 30.0
"""Another program that asks Ray replaces what was asked."""
_ASKS = ".asks"
"""Cluster whose store has what each Ringfence cluster on this Ray cluster asks for: Ray takes one request."""

logger = logging.getLogger("ringfence.cluster")


def ensure(name: str) -> Any:
    """Start the actor of a cluster, or find it. Its handle."""
    import ray

    options = {
        "name": "scaler",
        "namespace": namespace_of(name),
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": {HEAD: 0.001},
        "max_restarts": -1,
    }
    return ray.remote(**options)(Scaler).remote(name)


def end(name: str) -> None:
    """End the actor of a cluster, if it has one, and take back what it has asked for."""
    import ray

    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor("scaler", namespace=namespace_of(name)))
        ask(name, [])


def ask(name: str, bundles: list[dict[str, float]]) -> None:
    """Ask Ray for what this cluster needs in all, together with what the others do."""
    from ray.autoscaler.sdk import request_resources

    asks = Directory(_ASKS)
    asks.put(name, json.dumps(bundles).encode()) if bundles else asks.remove(name)
    every = [each for text in asks.many("").values() for each in json.loads(text)]
    request_resources(bundles=every)


class Scaler:
    """The actor. A thread looks at the nodes once a second."""

    def __init__(self, name: str) -> None:
        self._directory = Directory(name)
        self._config = Scaling.from_json(self._directory.config()["scaling"])
        self._nodes = Nodes(self._directory, lambda ray_id: node.ensure(name, ray_id))
        self._policy = Policy(self._config)
        self._waiting: dict[str, tuple[str, float]] = {}
        self._asked: tuple[int, float] = (0, 0.0)
        self._told = b""
        threading.Thread(target=self._live, name="scaler", daemon=True).start()

    def _live(self) -> None:
        while True:
            try:
                self._tick(time.monotonic())
            except RingfenceError as exc:
                logger.warning("the cluster is not scaled: %s", exc)
            except Exception:  # Ray raises many kinds; the next look tries again
                logger.exception("the cluster is not scaled")
            time.sleep(_EVERY_S)

    def _tick(self, now: float) -> None:
        self._nodes.look()
        samples = self._samples()
        decision = self._policy.decide(samples, self._waiting_at_gateways(now), now)
        self._carry_out(decision)
        if decision.asked != self._asked[0] or now - self._asked[1] > _ASK_AGAIN_S:
            ask(self._directory.name, [dict(self._config.resources)] * decision.asked)
            self._asked = (decision.asked, now)
        grows = decision.asked or decision.reclaim or decision.undrain
        may_grow = bool(grows) or len(samples) < self._config.max_nodes
        state = {"nodes": len(samples), "wanted": decision.wanted, "may_grow": may_grow}
        if (told := json.dumps(state).encode()) != self._told:
            self._directory.put("scale", told)
            self._told = told

    # -- looking --------------------------------------------------------------------------------

    def _samples(self) -> list[Sample]:
        shards: dict[str, list[Known]] = {}
        for each in self._nodes.all():
            shards.setdefault(each.form["ray_id"], []).append(each)
        drains = self._directory.many("drain/")
        alive = self._directory.ray_resources()
        released = self._released(shards, alive)
        return [
            replace(
                self._sample(ray_id, shards.get(ray_id, []), drains),
                is_head=HEAD in resources,
                is_released=ray_id in released,
                fits=all(resources.get(name, 0) >= n for name, n in self._config.resources.items()),
            )
            for ray_id, resources in alive.items()
        ]

    def _released(self, shards: dict[str, list[Known]], alive: Collection[str]) -> set[str]:
        """Nodes whose actor was told to end; not one that takes sandboxes again, or keeps some."""
        found = {key.removeprefix("released/") for key in self._directory.list("released/")}
        for ray_id in found.difference(alive):
            self._directory.remove(f"released/{ray_id}")
        for ray_id in found & shards.keys():
            forms = [each.form for each in shards[ray_id]]
            if any(form["keeps"] or not form["is_draining"] for form in forms):
                self._directory.remove(f"released/{ray_id}")
                found.discard(ray_id)
            else:
                self._release(ray_id)
        return found

    def _sample(self, ray_id: str, shards: list[Known], drains: dict[str, bytes]) -> Sample:
        forms = [each.form for each in shards]
        rooms = [room_of(form, self._config) for form in forms]
        active = sum(form["active"] for form in forms)
        why = [drains[f"drain/{each.tag}"] for each in shards if f"drain/{each.tag}" in drains]
        before = time.monotonic() - SILENT_S
        return Sample(
            ray_id,
            is_known=bool(shards),
            is_fresh=all(each.heard_at >= before for each in shards),
            active=active,
            waiting=sum(form["waiting"] for form in forms),
            room=sum(room for room, _ in rooms),
            size=active + sum(room for _, room in rooms),
            keeps=any(form["keeps"] for form in forms),
            drain=_drain_of(why),
            is_empty=all(form["is_empty"] for form in forms),
        )

    def _waiting_at_gateways(self, now: float) -> int:
        """Count creates that wait at gateways that live: those whose text in the store changes."""
        found = {name: value.decode() for name, value in self._directory.many(GATEWAY).items()}
        seen = self._waiting
        self._waiting = {
            name: seen[name] if name in seen and seen[name][0] == text else (text, now)
            for name, text in found.items()
        }
        living = [text for text, at in self._waiting.values() if now - at <= SILENT_S]
        return sum(int(text.split()[1]) for text in living)

    # -- doing ----------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        for ray_id in decision.reclaim:
            logger.info("Ray node %s is taken back", ray_id)
            self._directory.remove(f"released/{ray_id}")
        for ray_id in decision.undrain:
            for each in self._tags(ray_id):
                self._directory.remove(f"drain/{each}")
        for ray_id in decision.drain:
            logger.info("Ray node %s is not needed: it drains", ray_id)
            for each in self._tags(ray_id):
                self._directory.put_first(f"drain/{each}", BY_SCALING.encode())
        for ray_id in decision.release:
            logger.info("Ray node %s is released", ray_id)
            self._directory.put(f"released/{ray_id}", b"")  # or gateways start it again
            self._release(ray_id)

    def _tags(self, ray_id: str) -> list[str]:
        return [each.tag for each in self._nodes.all() if each.form["ray_id"] == ray_id]

    def _release(self, ray_id: str) -> None:
        with contextlib.suppress(ValueError):  # it has ended
            node.find(self._directory.name, ray_id).release.remote()


def _drain_of(why: list[bytes]) -> str:
    """An operator's drain of one shard is one of the node: it is not ours to end."""
    if not why:
        return ""
    return BY_SCALING if all(each == BY_SCALING.encode() for each in why) else BY_OPERATOR


__all__ = ["Scaler", "ask", "end", "ensure"]
