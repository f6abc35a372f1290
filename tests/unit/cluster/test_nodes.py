"""What a gateway knows of nodes while they are lost."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest

from ringfence.cluster.directory import Directory
from ringfence.cluster.nodes import UNREACHED_S, Nodes, NoNodes
from ringfence.cluster.placement import Need
from ringfence.errors import SandboxLost

MADE = {"id": "sbx-1", "session_id": "ses-1", "owner": "ann", "name": "", "state": "ready"}
FORM = {
    "node": "n0",
    "ray_id": "r0",
    "beat": "1-1",
    "socket": "/nowhere",
    "machine": "another",
    "address": "127.0.0.1:1",
    "tiers": [],
    "backends": [],
    "free_memory_bytes": 1,
    "cpus": 1,
    "load": 0.0,
    "max_sandboxes": 1,
    "active": 0,
    "warm": {},
    "images": [],
    "labels": {},
    "is_draining": False,
}


class _Directory:
    """A store in memory: `asked` is called while a gateway reads what was on a node."""

    def __init__(self) -> None:
        self.values = {
            "node/n0": json.dumps(FORM).encode(),
            "list/n0": json.dumps([{**MADE, "created_at": 1.0}]).encode(),
        }
        self.living = {"r0": ("127.0.0.1", 1)}
        self.asked: Any = lambda: None

    def config(self) -> dict[str, Any]:
        return {}

    def ray_nodes(self) -> dict[str, tuple[str, int]]:
        return self.living

    def list(self, prefix: str) -> list[str]:
        return [each for each in self.values if each.startswith(prefix)]

    def many(self, prefix: str) -> dict[str, bytes]:
        return {each: self.values[each] for each in self.list(prefix)}

    def get(self, key: str) -> bytes | None:
        self.asked()
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def put_first(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def remove(self, key: str) -> None:
        self.values.pop(key, None)


def test_a_node_is_known_or_lost_at_every_moment() -> None:
    """Else a request that comes between goes to another node, which has never heard of its sandbox."""
    directory = _Directory()
    nodes = Nodes(cast("Directory", directory), lambda _: None)
    nodes.look()
    asked = []

    def ask() -> None:
        asked.append(nodes.find("n0") is not None or nodes.is_lost("n0"))

    directory.asked = ask
    directory.living = {}
    nodes.look()

    assert asked
    assert all(asked)
    assert nodes.find("n0") is None
    with pytest.raises(SandboxLost, match="went with its node"):
        nodes.check_lost("sbx-1", "n0", "ann")


@pytest.mark.parametrize(("kept", "owner"), [({}, None), ({"is_whole": True}, "ann")])
def test_the_id_of_what_can_be_resumed_is_its_owners(kept: dict[str, Any], owner: Any) -> None:
    directory = _Directory()
    directory.values["list/n0"] = json.dumps([{**MADE, "owner": "ann", **kept}]).encode()
    nodes = Nodes(cast("Directory", directory), lambda _: None)
    nodes.look()
    assert nodes.saved_by(MADE["id"]) is None, "its node lives"
    directory.living = {}
    nodes.look()

    assert owner == nodes.saved_by(MADE["id"])
    assert nodes.saved_by("sbx-of-nobody") is None


def test_a_node_without_user_namespaces_is_never_chosen() -> None:
    """No backend works there. Three of them would use up the tries of a create that others could serve."""
    directory = _Directory()
    for i in range(1, 6):
        backends = ["native"] if i == 5 else []
        form = {**FORM, "node": f"n{i}", "max_sandboxes": 100, "backends": backends}
        directory.values[f"node/n{i}"] = json.dumps(form).encode()
    nodes = Nodes(cast("Directory", directory), lambda _: None)
    nodes.look()

    assert {"n5"} == {nodes.choose(Need()).tag for _ in range(50)}
    directory.values["node/n5"] = json.dumps({**FORM, "node": "n5", "beat": "2"}).encode()
    nodes.look()
    with pytest.raises(NoNodes):  # one of them is asked then, which says what is missing
        nodes.choose(Need())


def test_a_node_that_cannot_be_reached_from_here_is_avoided_for_a_while() -> None:
    directory = _Directory()
    nodes = Nodes(cast("Directory", directory), lambda _: None)
    nodes.look()
    known = nodes.find("n0")
    assert known is not None
    assert set() == nodes.unreached()
    known.unreached_at = time.monotonic()
    assert {"n0"} == nodes.unreached()
    known.unreached_at -= UNREACHED_S
    assert set() == nodes.unreached()
