"""What a gateway knows of nodes while they are lost."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.cluster.bindings import Binding, id_name
from ringfence.cluster.directory import Directory
from ringfence.cluster.moved import Moved
from ringfence.cluster.nodes import UNREACHED_S, Nodes, NoNodes, keep_reading
from ringfence.cluster.placement import Need
from ringfence.cluster.placing import Placer
from ringfence.cluster.proxy import Proxy
from ringfence.cluster.reviving import revive
from ringfence.cluster.scatter import Scatter
from ringfence.cluster.turns import Turns
from ringfence.cluster.upstream import Pool
from ringfence.errors import SandboxLost, ServerUnreachable

pytestmark = pytest.mark.anyone

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


class _Directory(Stored):
    """`asked` is called while a gateway reads what was on a node."""

    def __init__(self) -> None:
        lists = json.dumps([{**MADE, "created_at": 1.0}]).encode()
        super().__init__(**{"node/n0": json.dumps(FORM).encode(), "list/n0": lists})
        self.living = {"r0": ("127.0.0.1", 1)}
        self.asked: Any = lambda: None

    def get(self, key: str) -> bytes | None:
        self.asked()
        return super().get(key)


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


def test_what_was_lost_is_told_to_its_owner_alone() -> None:
    """Others hear what they hear of an id that nobody has: neither a name nor a snapshot."""
    directory = _Directory()
    kept = {"name": "secret", "snapshot": "snap-1", "created_at": 1.0}
    directory.values["list/n0"] = json.dumps([{**MADE, **kept}]).encode()
    nodes = Nodes(cast("Directory", directory), lambda _: None)
    nodes.look()
    nodes.check_lost("sbx-1", "n0", "ann")  # its node lives
    directory.living = {}
    nodes.look()

    for sees in ("ann", None):
        for any_id in ("sbx-1", "ses-1"):
            with pytest.raises(SandboxLost, match="secret") as lost:
                nodes.check_lost(any_id, "n0", sees)
            assert "snap-1" in lost.value.hint
    nodes.check_lost("sbx-1", "n0", "bob")
    nodes.check_lost("sbx-1", "n1", "ann")
    with pytest.raises(SandboxLost) as unknown:
        nodes.check_lost("sbx-2", "n0", "bob")
    assert "secret" not in unknown.value.message + unknown.value.hint


async def test_a_lost_sandbox_is_resumed_for_its_owner_alone() -> None:
    """No node is there to restore it: whose request gets as far as that may resume it."""
    directory: Any = _Directory()
    saved = {"snapshot": "snap-1", "is_whole": True, "timeouts": {}, "metadata": {}}
    whole = {**MADE, **saved, "created_at": 1.0}
    used = {**whole, "id": "sbx-2", "session_id": "ses-2", "is_whole": False}
    directory.values["list/n0"] = json.dumps([whole, used]).encode()
    nodes = Nodes(directory, lambda _: None)
    nodes.look()
    directory.living = {}
    nodes.look()
    proxy, turns = Proxy(Pool(), b"secret"), Turns(directory, nodes)
    scatter = Scatter(directory, nodes, proxy, cast("Any", None))
    placer = Placer(directory, nodes, proxy, scatter, turns)
    # The node is bound by name: the ids of this file name none.
    for each in ("sbx-1", "sbx-2"):
        directory.put(f"bind/{id_name(each)}", Binding("n0", 1.0).written())

    for caller in (Caller("ann", USER), Caller("root", ADMIN)):
        with pytest.raises(NoNodes):
            await revive("sbx-1", caller, nodes, placer)
        await revive("sbx-2", caller, nodes, placer)  # it was used since: its owner chooses
    await revive("sbx-1", Caller("bob", USER), nodes, placer)


def _nodes(directory: Any) -> Nodes:
    return Nodes(cast("Directory", directory), lambda _: None)


def test_of_the_nodes_that_are_gone_the_last_ones_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringfence.cluster.nodes._MOST_LOST", 2)
    nodes = _nodes(Stored())
    for tag in ("n1", "n2", "n3"):
        nodes._lose(tag, "it is gone")
    assert [False, True, True] == [nodes.is_lost(tag) for tag in ("n1", "n2", "n3")]


def test_what_any_node_may_do_is_done_by_one_that_was_heard_of_just_now() -> None:
    directory = Stored()
    for tag in ("n1", "n2"):
        form = {**FORM, "node": tag, "ray_id": tag, "memory": {"gvisor": "x"}}
        directory.put(f"node/{tag}", json.dumps(form).encode())
        directory.living[tag] = ("127.0.0.1", 1)
    nodes = _nodes(directory)
    nodes.shares_snapshots = True
    nodes.look()
    nodes._lose("n3", "it is gone")
    facts: dict[str, Any] = {"owner": "a", "snapshot": "s", "name": "", "timeouts": {}}
    facts |= {"metadata": {}, "backend": "gvisor", "needs": "x", "image": None}
    moved = Moved(**facts, left="n3", at=1.0)
    ids = [f"snap-{number}" for number in range(30)]

    def chosen() -> list[set[str]]:
        heirs = {each.tag for any_id in ids if (each := nodes.heir(any_id, "n3")) is not None}
        anyone = {nodes.any().tag for _ in range(40)}
        return [heirs, anyone, {each.tag for each in nodes.restoring(moved)}]

    assert [{"n1", "n2"}] * 3 == chosen()
    known = nodes.find("n1")
    assert known is not None
    known.heard_at -= 100.0
    assert [{"n2"}] * 3 == chosen()


@pytest.mark.parametrize(("scales", "expected"), [(False, "idle"), (True, "busy")])
def test_a_cluster_that_scales_fills_its_nodes_one_after_the_other(
    scales: bool, expected: str
) -> None:
    """Others get empty, and are released."""
    directory = Stored()
    scaling = {"min_nodes": 1, "max_nodes": 2}
    directory.config = lambda: {"scaling": scaling} if scales else {}  # type: ignore[method-assign]
    for tag, load in (("idle", 0.0), ("busy", 0.5)):
        form = {**FORM, "node": tag, "ray_id": tag, "backends": ["native"], "load": load}
        form |= {"max_sandboxes": 100, "cpus": 100}
        directory.put(f"node/{tag}", json.dumps(form).encode())
        directory.living[tag] = ("127.0.0.1", 1)
    nodes = _nodes(directory)
    nodes.look()
    assert expected == nodes.choose(Need()).tag
    gone = nodes._known.pop(expected)
    assert expected != nodes.choose(Need()).tag, "one that is gone since is none"
    nodes._known[expected] = gone


async def test_keys_whose_change_could_not_be_applied_are_read_again() -> None:
    """Else a removed key would go on opening this gateway."""
    calls: list[bytes] = []
    done = asyncio.Event()

    class Ring:
        def version(self) -> bytes:
            return b"1"

    def changed() -> None:
        calls.append(b"1")
        if len(calls) < 3:
            raise ServerUnreachable("no answer")
        loop.call_soon_threadsafe(done.set)

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(keep_reading(cast("Any", Ring()), changed))
    await asyncio.wait_for(done.wait(), 30.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 3 == len(calls)
