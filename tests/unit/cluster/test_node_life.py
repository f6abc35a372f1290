"""What gateways make of nodes that are silent, gone, drain or come, and what a shard leaves on its machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cluster.nodes_there import form_of
from tests.unit.cluster.stored import Stored

from ringfence.cluster import nodes as module
from ringfence.cluster import tls
from ringfence.cluster.bindings import HOME, KEEP_S, Binding, id_name, prune
from ringfence.cluster.directory import Directory
from ringfence.cluster.draining import Draining
from ringfence.cluster.moved import KEEP_S as MOVED_S
from ringfence.cluster.moved import MOVED, Moved
from ringfence.cluster.node import Node, Shard, _environment, make_private
from ringfence.cluster.nodes import (
    ANSWERS,
    LOST_S,
    NOTHING,
    REFUSED,
    SILENT_S,
    Known,
    Nodes,
    NoNodes,
    await_gateways,
    probe,
)
from ringfence.cluster.scaler import Scaler, _drain_of
from ringfence.cluster.scaling import Decision
from ringfence.daemon.membership import Scaling

pytestmark = pytest.mark.anyone
A, B = "0000000a", "0000000b"


def nodes_of(store: Stored, started: list[str] | None = None) -> Nodes:
    return Nodes(cast("Directory", store), (started if started is not None else []).append)


def put(store: Stored, tag: str, **changes: Any) -> None:
    form = form_of(tag, Path("/none"), **changes)
    store.put(f"node/{tag}", json.dumps(form).encode())
    store.living[form["ray_id"]] = ("127.0.0.1", 1)


def known(nodes: Nodes, tag: str) -> Known:
    found = nodes.find(tag)
    assert found is not None
    return found


class TestSilence:
    @pytest.mark.parametrize(
        ("silent_s", "raylet", "is_lost"),
        [
            (SILENT_S - 0.5, REFUSED, False),
            (SILENT_S + 0.1, REFUSED, True),
            (SILENT_S + 0.1, NOTHING, False),
            (LOST_S - 1.0, NOTHING, False),
            (LOST_S + 0.1, NOTHING, True),
            (LOST_S + 100, ANSWERS, False),
        ],
    )
    def test_a_silent_node_is_lost_once_its_raylet_is_gone(
        self, silent_s: float, raylet: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Stored()
        put(store, A)
        nodes = nodes_of(store)
        nodes.look()
        monkeypatch.setattr(module, "probe", lambda _host, _port: raylet)
        known(nodes, A).heard_at -= silent_s
        nodes.look()

        assert is_lost == nodes.is_lost(A)
        assert is_lost == (nodes.find(A) is None)
        assert is_lost == (f"lost/{A}" in store.values)
        assert is_lost == (f"node/{A}" not in store.values)

    def test_what_another_gateway_gave_up_is_lost_here_with_its_reason(self) -> None:
        store = Stored()
        put(store, A)
        nodes = nodes_of(store)
        nodes.look()
        store.put(f"lost/{A}", b"1.0 released")
        store.put(f"lost/{B}", b"1.0")
        nodes.look()
        assert nodes.is_lost(A)
        assert nodes.is_lost(B)
        assert ["released", "the cluster gave it up"] == [nodes._lost[t].why for t in (A, B)]

    def test_a_beat_makes_it_ready_and_forgets_what_was_pending(self) -> None:
        store = Stored()
        put(store, A)
        nodes = nodes_of(store)
        nodes.look()
        node = known(nodes, A)
        node.heard_at -= SILENT_S + 1
        node.pending = 5
        assert [] == nodes.ready()
        assert [node] == nodes.all()
        assert node is nodes.any(), "the silent one, where there is no other"
        put(store, A, beat="2-2", load=3.0)
        nodes.look()
        assert [node] == nodes.ready()
        assert (0, 3.0) == (node.pending, node.state().load)

    def test_without_any_there_is_no_node(self) -> None:
        with pytest.raises(NoNodes):
            nodes_of(Stored()).any()

    def test_creates_that_were_sent_count_at_once(self) -> None:
        store = Stored()
        put(store, A, max_sandboxes=3, active=1, load=0.5)
        nodes = nodes_of(store)
        nodes.look()
        from ringfence.cluster.placement import Need

        for pending in (1, 2):
            node = nodes.choose(Need())
            state = node.state()
            assert (pending, 2 - pending, 0.5 + pending) == (node.pending, state.room, state.load)
        with pytest.raises(Exception, match="room"):
            nodes.choose(Need())

    @pytest.mark.parametrize(
        ("machine", "is_there", "is_near"),
        [(True, True, True), (True, False, False), (False, True, False)],
    )
    def test_the_unix_socket_is_for_the_same_machine(
        self, machine: bool, is_there: bool, is_near: bool, tmp_path: Path
    ) -> None:
        path = tmp_path / "s"
        if is_there:
            path.touch()
        changes = {} if machine else {"machine": "another"}
        found = Known(A, form_of(A, path, **changes), 0.0).address
        assert (f"unix:{path}" if is_near else "https://127.0.0.1:1") == found

    def test_a_probe_tells_a_refusal_from_silence(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert ANSWERS == probe("127.0.0.1", port)
        assert REFUSED == probe("127.0.0.1", port)
        assert NOTHING == probe("no such host.invalid", port)


class TestActors:
    def test_each_silent_ray_node_is_started_once_in_a_while(self) -> None:
        store, started = Stored(), list[str]()
        put(store, A)
        store.living |= {"new": ("127.0.0.1", 1), "gone": ("127.0.0.1", 1)}
        store.put("released/gone", b"")
        nodes = nodes_of(store, started)
        nodes.look()
        assert [f"ray-{A}", "gone", "new"] != sorted(started)
        assert {"new", f"ray-{A}"} == {*started}, "nothing was heard of any yet"
        started.clear()
        nodes.look()
        assert [] == started
        nodes._started = dict.fromkeys(nodes._started, time.monotonic() - 21.0)
        nodes.look()
        assert ["new"] == started, "of the other one it hears"

    def test_an_actor_that_cannot_be_started_stops_no_look(self) -> None:
        store = Stored()
        put(store, A)
        store.living["new"] = ("127.0.0.1", 1)

        def start(_ray_id: str) -> None:
            raise RuntimeError("Ray says no")

        nodes = Nodes(cast("Directory", store), start)
        nodes.look()
        assert nodes.find(A) is not None


class TestGateways:
    def test_it_has_a_beat_with_what_waits_until_it_leaves(self) -> None:
        store = Stored()
        nodes = nodes_of(store)
        nodes.waiting = 3
        nodes.look()
        nodes.look()
        key = f"gateway/{nodes.gateway}"
        assert b"2 3" == store.values[key]
        nodes._looked_at -= SILENT_S + 1
        nodes.leave()
        assert key in store.values, "without Ray's head it would block for minutes"
        nodes.look()
        nodes.leave()
        assert key not in store.values

    def test_whether_the_cluster_may_grow_is_read_where_it_scales(self) -> None:
        for scaling in (None, {"max_nodes": 2, "wait_s": 7.0}):
            store = Stored(scale=b'{"may_grow": true}')
            store.config = lambda scaling=scaling: {"scaling": scaling}  # type: ignore[method-assign, misc]
            nodes = nodes_of(store)
            assert 0.0 == nodes.wait_s
            nodes.look()
            assert (7.0 if scaling else 0.0) == nodes.wait_s
            store.put("scale", b'{"may_grow": false}')
            nodes.look()
            assert 0.0 == nodes.wait_s

    def test_troubles_are_told_by_node(self) -> None:
        store = Stored(**{f"trouble/{B}": b"no disk", f"trouble/{A}": b"no port"})
        nodes = nodes_of(store)
        nodes.look()
        assert f"node {A}: no port; node {B}: no disk" == nodes.troubles()

    @pytest.mark.parametrize(("beats", "waits"), [((2, 2), False), ((2, 1), True), ((1, 2), True)])
    def test_it_waits_until_each_gateway_has_looked_anew(
        self, beats: tuple[int, int], waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The look that ends first may have begun before."""
        store = Stored(**{"gateway/a": b"10 0", "gateway/b": b"20 0", "gateway/c": b"1 0"})
        naps: list[float] = []

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            store.values |= {"gateway/a": b"12 0", "gateway/b": b"22 0"}

        real = store.many
        looks = iter(range(100))

        def many(prefix: str) -> dict[str, bytes]:
            if next(looks) == 1:
                store.values |= {"gateway/a": b"%d 0" % (10 + beats[0])}
                store.values |= {"gateway/b": b"%d 0" % (20 + beats[1])}
                store.values.pop("gateway/c")  # it has left
            return real(prefix)

        monkeypatch.setattr(store, "many", many)
        monkeypatch.setattr(time, "sleep", sleep)
        await_gateways(cast("Directory", store))
        assert waits == bool(naps)

    def test_a_silent_gateway_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

        def sleep(seconds: float) -> None:
            now[0] += seconds

        monkeypatch.setattr(time, "sleep", sleep)
        await_gateways(cast("Directory", Stored(**{"gateway/a": b"1 0"})))
        assert SILENT_S <= now[0] - 100.0 < SILENT_S + 1

    def test_those_that_restore_are_the_idlest_first(self) -> None:
        store = Stored()
        memory = {"memory": {"gvisor": "v"}}
        put(store, A, load=2.0, **memory)
        put(store, B, load=1.0, **memory)
        put(store, "0000000c", load=0.0, memory={})
        put(store, "0000000d", load=0.0, is_draining=True, **memory)
        nodes = nodes_of(store)
        nodes.look()
        facts = {"owner": "", "snapshot": "", "name": "", "timeouts": {}, "metadata": {}}
        moved = Moved(**facts, backend="gvisor", needs="v", image=None, left="", at=0)  # type: ignore[arg-type]
        assert [B, A] == [each.tag for each in nodes.restoring(moved)]


class _Silent:
    async def ask(self, *_: Any) -> Any:
        return {"items": [], "next_cursor": ""}


async def test_homes_and_records_are_forgotten_once_they_are_old() -> None:
    now = 1_800_000_000.0
    store = Stored()
    put(store, A)
    store.put(f"lost/{B}", b"")
    nodes = nodes_of(store)
    nodes.look()
    old, new = now - KEEP_S - 1, now - KEEP_S + 60
    for name, node, at in (("lives", A, old), ("lost old", B, old), ("lost new", B, new)):
        store.put(f"{HOME}{name}", Binding(node, at).written())
    facts: dict[str, Any] = {
        "owner": "a",
        "snapshot": "s",
        "name": "",
        "timeouts": {},
        "metadata": {},
    }
    facts |= {"backend": "gvisor", "needs": "", "image": None, "left": B}
    records = {
        "waits": ("", now - MOVED_S + 60),
        "waited": ("", now - MOVED_S - 1),
        "elsewhere": (A, new),
        "ended elsewhere": (A, old),
        "bound": (A, old),
    }
    for name, (node, at) in records.items():
        moved = Moved(**facts, at=at, node=node)
        store.put(f"{MOVED}{name}", moved.written())
    store.put(f"bind/{id_name('bound')}", Binding("0000000f", old, "bound").written())
    # Its binding is forgotten just now, and so the record may go.
    store.put(f"{MOVED}unbound", Moved(**facts, at=old, node=A).written())
    store.put(f"bind/{id_name('unbound')}", Binding(B, old, "unbound").written())

    await prune(cast("Directory", store), nodes, cast("Any", _Silent()), now)

    assert ["lives", "lost new"] == [each.removeprefix(HOME) for each in store.list(HOME)]
    assert ["bound", "elsewhere", "waits"] == [
        each.removeprefix(MOVED) for each in store.list(MOVED)
    ]


class TestDrains:
    def draining(self, ask: Any, *, has_store: bool = True) -> Draining:
        return Draining(ask, has_store=has_store, obstacle=lambda _: None, publish=lambda *_: None)

    def sandbox(self, **changes: Any) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": "sbx-1", "owner": "ann", "name": "", "timeouts": {}}
        facts |= {"session_state": "active", "last_active_at": 10.0, "metadata": {}, "reason": ""}
        return {**facts, **changes}

    def test_one_that_was_used_is_saved_again_after_a_while_and_the_old_one_removed(self) -> None:
        asked: list[str] = []
        count = iter(range(1, 10))

        def ask(method: str, path: str, _body: bytes | None) -> Any:
            asked.append(f"{method} {path}")
            if method == "POST":
                return {"id": f"snap-{next(count)}"}
            return self.sandbox(last_active_at=10.5)

        drain = self.draining(ask)
        drain._save(self.sandbox())
        assert (10.5, "snap-1") == drain.saved["sbx-1"]
        asked.clear()
        drain._save(self.sandbox(last_active_at=10.5))
        drain._save(self.sandbox(last_active_at=20.0))
        assert [] == asked, "unused, or saved just now"
        drain._saved_at["sbx-1"] -= 31.0
        drain._save(self.sandbox(last_active_at=10.5))
        assert [] == asked
        drain._save(self.sandbox(last_active_at=20.0))

        assert "DELETE /v1/snapshots/snap-1" == asked[-1]
        assert "snap-2" == drain.snapshot_of("sbx-1")
        assert {} == drain.kept(self.sandbox(id="sbx-2"))
        kept = drain.kept(self.sandbox(last_active_at=10.5, timeouts={"t": 1}, metadata={"m": "1"}))
        assert ({"t": 1}, {"m": "1"}, True) == (
            kept["timeouts"],
            kept["metadata"],
            kept["is_whole"],
        )
        assert {"snapshot", "is_whole"} == {*drain.kept(self.sandbox(last_active_at=99.0))}

    def test_an_eviction_removes_the_snapshot_of_before(self) -> None:
        asked: list[str] = []

        def ask(method: str, path: str, _body: bytes | None) -> Any:
            asked.append(f"{method} {path}")
            return {"snapshot_id": "snap-9"}

        drain = self.draining(ask)
        drain.saved["sbx-1"] = (1.0, "snap-1")
        drain._evict(self.sandbox())
        assert ["POST /v1/sandboxes/sbx-1/evict", "DELETE /v1/snapshots/snap-1"] == asked
        assert {} == drain.saved
        assert "snap-9" == drain.moved["sbx-1"]["snapshot"]

    def test_every_page_is_settled(self) -> None:
        def ask(_method: str, path: str, _body: bytes | None) -> Any:
            if "terminated" in path:
                return {"items": [], "next_cursor": None}
            name = "sbx-2" if "cursor=next" in path else "sbx-1"
            return {
                "items": [self.sandbox(id=name)],
                "next_cursor": None if "next" in path else "next",
            }

        found = self.draining(ask, has_store=False).settle()
        assert [("sbx-1", "stays"), ("sbx-2", "stays")] == [(e["id"], e["outcome"]) for e in found]

    @pytest.mark.parametrize("error", [OSError("x"), http.client.HTTPException("x")])
    def test_a_snapshot_that_fails_leaves_the_sandbox_where_it_is(self, error: Exception) -> None:
        def ask(method: str, path: str, _body: bytes | None) -> Any:
            if method == "POST":
                raise error
            if path.endswith("/execs") or "terminated" in path:
                return {"items": [], "next_cursor": None}
            return {"items": [self.sandbox()], "next_cursor": None}

        [settled] = self.draining(ask).settle()
        assert ("stays", "", "it cannot be saved: x") == (
            settled["outcome"],
            settled["snapshot"],
            settled["why"],
        )


class TestScaler:
    def scaler(self, store: Stored) -> Any:
        made: Any = Scaler.__new__(Scaler)
        made._directory, made._nodes = store, nodes_of(store)
        made._config, made._waiting = Scaling(max_nodes=3), {}
        made._nodes.look()
        made.released = []
        made._release = made.released.append
        return made

    def test_a_drain_of_an_operator_is_the_nodes(self) -> None:
        assert ["", "scaling", "operator", "operator"] == [
            _drain_of(why)
            for why in ([], [b"scaling"] * 2, [b"operator"], [b"scaling", b"operator"])
        ]

    def test_what_was_released_stays_so_unless_it_takes_or_keeps_something(self) -> None:
        facts = {"keeps": False, "is_draining": True}
        store = Stored()
        put(store, A, **facts)
        put(store, B, **{**facts, "is_draining": False})
        put(store, "0000000c", **{**facts, "keeps": True})
        for tag in (A, B, "0000000c", "0000000d"):
            store.put(f"released/ray-{tag}", b"")
        scaler = self.scaler(store)
        alive = [f"ray-{tag}" for tag in (A, B, "0000000c")]
        shards = {each.form["ray_id"]: [each] for each in scaler._nodes.all()}

        assert {f"ray-{A}", "ray-0000000d"} >= scaler._released(shards, alive) >= {f"ray-{A}"}

        assert [f"released/ray-{A}"] == store.list("released/")
        assert [f"ray-{A}"] == scaler.released

    def test_a_node_of_two_shards_is_what_both_are(self) -> None:
        """It is empty once both are, and keeps what one of them does."""
        store = Stored()
        facts = {"waiting": 1, "keeps": False, "is_empty": True, "active": 2, "load": 0.0}
        put(store, A, **facts)
        put(store, B, **{**facts, "ray_id": f"ray-{A}", "is_empty": False, "keeps": True})
        scaler = self.scaler(store)
        shards = scaler._nodes.all()
        sample = scaler._sample(f"ray-{A}", shards, {})
        assert (True, True, 4, 2) == (
            sample.is_known,
            sample.is_fresh,
            sample.active,
            sample.waiting,
        )
        assert (True, False, "") == (sample.keeps, sample.is_empty, sample.drain)
        assert sample.size == 4 + sample.room
        shards[1].heard_at -= 100.0
        assert not scaler._sample(f"ray-{A}", shards, {}).is_fresh
        assert not scaler._sample("other", [], {}).is_known

    def test_ray_is_asked_and_gateways_are_told_when_something_changes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And Ray again after a while: another program may have asked it for something else."""
        asked: list[int] = []
        monkeypatch.setattr(
            "ringfence.cluster.scaler.ask", lambda _name, bundles: asked.append(len(bundles))
        )
        store = Stored(config=b"{}")
        store.name = "c"  # type: ignore[attr-defined]
        store.ray_resources = lambda: {"ray-x": {}}  # type: ignore[attr-defined]
        scaler = self.scaler(store)
        scaler._asked, scaler._told = (0, 0.0), b""
        decisions = [Decision(wanted=1, asked=number) for number in (0, 2, 2, 2, 0, 0)]
        scaler._policy = SimpleNamespace(decide=lambda *_: decisions.pop(0))
        told = []
        for now in (1.0, 2.0, 3.0, 33.0, 34.0, 35.0):
            scaler._tick(now)
            told.append(json.loads(store.values["scale"])["may_grow"])
        assert [2, 2, 0] == asked
        assert [True] * 6 == told
        scaler._config = Scaling(max_nodes=1)
        for wanted, may_grow in ((Decision(wanted=1), False), (Decision(1, undrain=("x",)), True)):
            decisions.append(wanted)
            scaler._tick(36.0)
            assert may_grow == json.loads(store.values["scale"])["may_grow"]

    def test_creates_wait_at_gateways_that_live(self) -> None:
        store = Stored(**{"gateway/a": b"1 2", "gateway/b": b"1 3"})
        scaler = self.scaler(store)
        store.remove(f"gateway/{scaler._nodes.gateway}")
        assert 5 == scaler._waiting_at_gateways(100.0)
        store.put("gateway/a", b"2 4")
        assert 7 == scaler._waiting_at_gateways(100.0 + SILENT_S)
        assert 4 == scaler._waiting_at_gateways(100.1 + SILENT_S)
        store.remove("gateway/b")
        scaler._waiting_at_gateways(101.0)
        assert ["gateway/a"] == list(scaler._waiting)

    def test_a_decision_is_carried_out(self) -> None:
        store = Stored()
        for tag in (A, B):
            put(store, tag, keeps=False)
        put(store, "0000000c", ray_id=f"ray-{B}")
        scaler = self.scaler(store)
        scaler._carry_out(Decision(wanted=1, drain=(f"ray-{B}",)))
        expected = [f"drain/{B}", "drain/0000000c"]
        assert expected == store.list("drain/")
        assert {b"scaling"} == {*store.many("drain/").values()}
        store.put(f"drain/{A}", b"operator")
        scaler._carry_out(Decision(wanted=1, drain=(f"ray-{A}",)))
        assert b"operator" == store.values[f"drain/{A}"]
        scaler._carry_out(Decision(wanted=1, undrain=(f"ray-{B}",), release=(f"ray-{A}",)))
        assert [f"drain/{A}"] == store.list("drain/")
        assert [f"released/ray-{A}"] == store.list("released/")
        assert [f"ray-{A}"] == scaler.released
        scaler._carry_out(Decision(wanted=1, reclaim=(f"ray-{A}",)))
        assert [] == store.list("released/")


class TestShards:
    def shard(self, store: Stored, base: Path, **facts: Any) -> Any:
        made: Any = Shard.__new__(Shard)
        made._directory, made._base, made._tag, made._above = store, str(base), A, str(base)
        made._facts, made._drains, made._config, made._tag_key = facts, False, {}, "tag/ray"
        made._raylet, made._beat, made._started_at, made._changed = os.getppid(), 0, 0, {}
        made._lock, made._ended, made._listed = threading.Lock(), threading.Event(), [{}]
        return made

    def test_only_what_nobody_claims_or_was_lost_is_swept(self, tmp_path: Path) -> None:
        for name in (A, B, "0000000c"):
            (tmp_path / name).mkdir()
        store = Stored(**{f"claim/{A}": b"", f"claim/{B}": b"", f"lost/{B}": b""})
        self.shard(store, tmp_path)._sweep()
        assert [A] == os.listdir(tmp_path)
        self.shard(store, tmp_path / "none")._sweep()

    def test_one_that_was_given_up_becomes_another(self, tmp_path: Path) -> None:
        (tmp_path / A).mkdir()
        (tmp_path / A / "file").touch()
        store = Stored(**{f"node/{A}": b"{}", f"claim/{A}": b""})
        shard = self.shard(store, tmp_path)
        shard._become_another()
        assert A != shard.tag
        assert 8 == len(shard.tag)
        assert shard.tag == store.values["tag/ray"].decode()
        assert f"claim/{shard.tag}" in store.values
        assert f"node/{A}" not in store.values
        assert [] == os.listdir(tmp_path)
        assert [] == shard._listed

    @pytest.mark.parametrize(
        ("drains", "marked", "is_empty"),
        [(True, True, True), (True, False, False), (False, True, False)],
    )
    def test_it_is_empty_once_it_drains_and_its_daemon_says_so(
        self, drains: bool, marked: bool, is_empty: bool, tmp_path: Path
    ) -> None:
        shard = self.shard(Stored(), tmp_path)
        shard._drains = drains
        (tmp_path / A).mkdir()
        if marked:
            (tmp_path / A / "drained").touch()
        assert is_empty == shard.is_empty()
        shard._keeps = lambda: False
        assert is_empty == shard.may_go()
        shard._keeps = lambda: True
        assert not shard.may_go()
        if not is_empty:
            assert not shard.release()

    @pytest.mark.parametrize(
        ("config", "templates", "snapshots", "keeps"),
        [
            ({}, [], [], False),
            ({}, [1], [], True),
            ({}, [], [1], True),
            ({"snapshot_store": "x"}, [1], [1], False),
        ],
    )
    def test_it_keeps_what_no_store_has(
        self, config: Any, templates: Any, snapshots: Any, keeps: bool, tmp_path: Path
    ) -> None:
        shard = self.shard(Stored(), tmp_path)
        shard._config = config
        shard._get = lambda path: {"items": templates if "templates" in path else snapshots}
        assert keeps == shard._keeps()

    def test_the_obstacle_is_that_no_other_node_restores_it(self, tmp_path: Path) -> None:
        store = Stored()
        facts = {"memory": {"gvisor": "v"}}
        shard = self.shard(store, tmp_path, **facts)
        sandbox = {"backend": "gvisor", "image": None}
        put(store, A, **facts)
        assert "gvisor by v" in shard._obstacle(sandbox), "itself is no other"
        put(store, B, **facts)
        assert "" == shard._obstacle(sandbox)
        assert "image x" in shard._obstacle({**sandbox, "image": "x"})
        assert shard._obstacle({**sandbox, "backend": "native"}) is None
        store.put(f"lost/{B}", b"")
        assert "gvisor by v" in shard._obstacle(sandbox)

    def test_what_was_evicted_is_published_with_all_that_restoring_takes(
        self, tmp_path: Path
    ) -> None:
        store = Stored()
        shard = self.shard(store, tmp_path, memory={"gvisor": "v"})
        facts = {"owner": "ann", "name": "n", "timeouts": {"t": 1}, "metadata": {"k": "v"}}
        shard._publish({**facts, "id": "sbx-1", "backend": "gvisor", "image": "i"}, "snap-1")
        moved = Moved.read(store.values[f"{MOVED}sbx-1"])
        assert facts == {name: getattr(moved, name) for name in facts}
        assert ("snap-1", "gvisor", "v", "i", A, "") == (
            moved.snapshot,
            moved.backend,
            moved.needs,
            moved.image,
            moved.left,
            moved.node,
        )
        assert abs(time.time() - moved.at) < 60

    def test_changes_at_run_time_are_applied_once_to_a_new_daemon(self, tmp_path: Path) -> None:
        store = Stored(**{"changed/PUT /v1/pools": b"1"})
        shard = self.shard(store, tmp_path)
        asked: list[tuple[str, str, bytes]] = []
        shard._ask = lambda *each: asked.append(each)
        for _ in range(2):
            shard._change()
        assert [("PUT", "/v1/pools", b"1")] == asked
        store.put("changed/PUT /v1/pools", b"2")
        shard._change()
        assert 2 == len(asked)
        shard._beat = 1000
        store.put("changed/PUT /v1/pools", b"3")
        shard._change()
        assert 2 == len(asked), "gateways ask one that is known"

    def test_the_lease_names_who_restarts_it_and_a_drain(self, tmp_path: Path) -> None:
        shard = self.shard(Stored(), tmp_path)
        (tmp_path / A).mkdir()
        for drains in (False, True):
            shard._drains = drains
            shard._renew()
            content = (tmp_path / A / "lease").read_bytes()
            assert drains == content.endswith(b" drain")
            assert str(os.getppid()).encode() in content
        assert ["lease"] == os.listdir(tmp_path / A)

    def test_secrets_are_written_for_its_user_alone(self, tmp_path: Path) -> None:
        shard = self.shard(Stored(), tmp_path)
        (tmp_path / A).mkdir()
        before = os.umask(0)
        try:
            shard._write("secret", b"x")
            make_private(str(tmp_path), str(tmp_path / "one/two"))
        finally:
            os.umask(before)
        assert 0o600 == stat.S_IMODE((tmp_path / A / "secret").stat().st_mode)
        for path in ("one", "one/two"):
            assert 0o700 == stat.S_IMODE((tmp_path / path).stat().st_mode)

    def test_a_daemon_has_nothing_of_rays_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RAY_X", "OMP_NUM_THREADS", "LD_PRELOAD", "KEPT_RAY"):
            monkeypatch.setenv(name, "1")
        found = _environment()
        assert {"KEPT_RAY"} == {"RAY_X", "OMP_NUM_THREADS", "LD_PRELOAD", "KEPT_RAY"} & found.keys()

    @pytest.mark.parametrize(
        ("status", "is_refused"),
        [(200, False), (201, False), (204, False), (202, True), (400, True), (503, True)],
    )
    async def test_what_a_daemon_refuses_is_raised(
        self, status: int, is_refused: bool, tmp_path: Path
    ) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = b"" if status == 204 else b'{"detail": "why"}'
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
            )
            writer.close()

        (tmp_path / A).mkdir()
        shard = self.shard(Stored(), tmp_path)
        from ringfence.daemon.config import SOCKET

        server = await asyncio.start_unix_server(serve, tmp_path / A / SOCKET)
        async with server:
            ask = asyncio.to_thread(shard._ask, "GET", "/v1/x")
            if is_refused:
                with pytest.raises(http.client.HTTPException, match="why"):
                    await ask
            else:
                await ask

    def test_a_settle_names_one_shard(self) -> None:
        node: Any = Node.__new__(Node)
        node._shards = [
            SimpleNamespace(tag=tag, settle=lambda tag=tag: [{"at": tag}]) for tag in (A, B)
        ]
        assert [{"at": B}] == node.settle(B)
        assert A == node.tag()


def test_the_clusters_one_certificate_is_trusted_and_no_other(tmp_path: Path) -> None:
    mine = tls.identity(cast("Directory", Stored()))
    store = Stored()
    other = tls.identity(cast("Directory", store))
    assert other == tls.identity(cast("Directory", store)), "made once"

    def handshake(shown: tuple[str, str]) -> None:
        path = tmp_path / "both.pem"
        path.write_text("".join(shown))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        near, far = socket.socketpair()
        with near, far:
            near.settimeout(30)
            far.settimeout(30)

            def serve() -> None:
                with pytest.MonkeyPatch.context(), context.wrap_socket(far, server_side=True):
                    pass

            def serve_quietly() -> None:
                try:
                    serve()
                except OSError:
                    far.close()

            thread = threading.Thread(target=serve_quietly)
            thread.start()
            try:
                with tls.client_context(mine[0]).wrap_socket(near) as sock:
                    assert "TLSv1.3" == sock.version()
            finally:
                near.close()
                thread.join()

    handshake(mine)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other)
