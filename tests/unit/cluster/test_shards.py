"""A shard of a node from its first look to its release: what it starts, tells, keeps and takes along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.cluster import node as module
from ringfence.cluster.node import Node, Shard
from ringfence.daemon import succession
from ringfence.daemon.membership import DRAINED
from ringfence.store.directory import StateDirectory

pytestmark = pytest.mark.anyone
A = "0000000a"


class Ticks:
    """The event of a shard's end, which comes after so many waits, or once it is set."""

    def __init__(self, waits: int = 0) -> None:
        self.left, self.is_over = waits, False

    def wait(self, _seconds: float) -> bool:
        self.left -= 1
        return self.is_over or self.left < 0

    def set(self) -> None:
        self.is_over = True


def shard_of(store: Stored, base: Path, **parts: Any) -> Any:
    made: Any = Shard.__new__(Shard)
    made._directory, made._base, made._above, made._tag = store, str(base), str(base), A
    made._ray_id, made._count, made._config, made._tag_key = "ray-a", 1, {}, "tag/ray-a"
    made._facts, made._facts_at, made._drains, made._listed = {}, 0.0, False, []
    made._raylet, made._beat, made._started_at, made._changed = os.getppid(), 0, 0, {}
    made._draining = SimpleNamespace(moved={}, kept=lambda _: {})
    made._thread = SimpleNamespace(join=lambda _: None)
    made._lock, made._ended, made._heard_at = threading.Lock(), Ticks(), time.monotonic()
    vars(made).update(parts)
    return made


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `import ray` find a node at an address of IPv6, with two labels."""
    made: Any = ModuleType("ray")
    made.util = SimpleNamespace(get_node_ip_address=lambda: "fd00::1")
    labels = {"zone": "z", "ray.io/x": "y"}
    made.get_runtime_context = lambda: SimpleNamespace(get_node_labels=lambda: labels)
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


class TestLooks:
    def shard(self, store: Stored, base: Path, **parts: Any) -> tuple[Any, list[str]]:
        made, did = shard_of(store, base, **parts), list[str]()
        made._state = lambda: {"node": A}
        made._start = lambda: did.append("start")
        return made, did

    def test_it_says_how_it_is_with_another_beat_each_time(self, tmp_path: Path) -> None:
        store = Stored()
        shard, did = self.shard(store, tmp_path)
        beats = []
        for _ in range(2):
            shard._look()
            beats.append(json.loads(store.values[f"node/{A}"])["beat"])
        assert beats[0] != beats[1]
        assert [] == did
        assert 0o700 == (tmp_path / A).stat().st_mode & 0o777

    def test_what_a_drain_has_moved_is_forgotten_with_the_drain(self, tmp_path: Path) -> None:
        store = Stored(**{f"drain/{A}": b"operator"})
        shard, _ = self.shard(store, tmp_path)
        shard._draining.moved["sbx-1"] = {}
        shard._look()
        assert (True, {"sbx-1": {}}) == (shard._drains, shard._draining.moved)
        store.remove(f"drain/{A}")
        shard._look()
        assert (False, {}) == (shard._drains, shard._draining.moved)

    def test_a_daemon_is_started_where_none_answers_and_none_holds_the_directory(
        self, tmp_path: Path
    ) -> None:
        def refuse() -> Any:
            raise ConnectionRefusedError

        store = Stored()
        shard, did = self.shard(store, tmp_path)
        shard._state = refuse
        shard._look()
        assert ["start"] == did
        held = StateDirectory(str(tmp_path / A))
        try:
            shard._look()
            assert ["start"] == did, "it starts, is busy, or ends"
        finally:
            held.close()
        shard._look()
        assert ["start", "start"] == did
        assert f"node/{A}" not in store.values

    def test_a_directory_that_cannot_be_made_is_told_as_its_trouble(self, tmp_path: Path) -> None:
        store, base = Stored(), tmp_path / "file"
        base.touch()
        shard, did = self.shard(store, base)
        shard._look()
        assert store.values[f"trouble/{A}"].startswith(b"state directory: ")
        assert ([], [f"trouble/{A}"]) == (did, [*store.values])

    def test_without_its_raylet_it_is_lost_and_ends(self, tmp_path: Path) -> None:
        store = Stored(**{f"node/{A}": b"{}"})
        shard, did = self.shard(store, tmp_path, _raylet=-1)
        (tmp_path / A).mkdir()
        shard._look()
        assert shard._ended.is_over
        assert [f"lost/{A}"] == [*store.values]
        assert ([], []) == (did, os.listdir(tmp_path))

    @pytest.mark.parametrize(
        ("silent_s", "raylet", "renews"), [(0.0, 0, 1), (61.0, 0, 0), (59.0, 0, 1), (0.0, -1, 0)]
    )
    def test_a_lease_is_renewed_while_the_cluster_knows_of_it(
        self, silent_s: float, raylet: int, renews: int, tmp_path: Path
    ) -> None:
        renewed: list[int] = []
        shard = shard_of(Stored(), tmp_path, _ended=Ticks(1), _renew=lambda: renewed.append(1))
        shard._heard_at -= silent_s
        shard._raylet = raylet or shard._raylet
        shard._hold()
        assert renews == len(renewed)

    def test_the_list_of_its_sandboxes_is_told_where_it_has_changed(self, tmp_path: Path) -> None:
        store = Stored()
        shard = shard_of(store, tmp_path)
        names = ("id", "session_id", "owner", "name", "state", "created_at", "labels", "more")
        page = {"items": [{name: name for name in names}]}
        shard._get = lambda _: page
        shard._draining.kept = lambda each: {"snapshot": f"snap of {each['id']}"}
        shard._tell_of_sandboxes()
        [told] = json.loads(store.values[f"list/{A}"])
        assert ("owner", "snap of id") == (told["owner"], told["snapshot"])
        assert "more" not in told
        store.remove(f"list/{A}")
        shard._tell_of_sandboxes()
        assert f"list/{A}" not in store.values
        page["items"] = []
        shard._tell_of_sandboxes()
        assert b"[]" == store.values[f"list/{A}"]


@pytest.mark.usefixtures("ray")
class TestStarts:
    def started(
        self, shard: Any, monkeypatch: pytest.MonkeyPatch, code: int = 0, said: bytes = b""
    ) -> Any:
        """Start a daemon that ends so; the form that it was started with."""
        forms: list[Any] = []

        def run(command: list[str], **_: Any) -> Any:
            forms.append(json.loads(Path(command[-1]).read_text(encoding="utf-8")))
            return subprocess.CompletedProcess(command, code, b"", said)

        os.makedirs(shard._place, exist_ok=True)
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(module, "identity", lambda _: ("certificate", "key"))
        shard._directory.secret = lambda: b"secret"
        shard._start()
        return forms[0]

    def test_shards_divide_what_a_node_may_have(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = {"manager": {"max_sandboxes": 100, "wait_s": 1.0}, "snapshot_store": "x"}
        shard = shard_of(Stored(), tmp_path, _count=3, _config=config)
        form = self.started(shard, monkeypatch)
        assert {"max_sandboxes": 34, "wait_s": 1.0} == form["manager"]
        assert ("x", "[fd00::1]:0") == (form["snapshot_store"], form["listen"])
        assert (A, str(tmp_path / A)) == (form["membership"]["node"], form["state_dir"])
        assert 100 == config["manager"]["max_sandboxes"]  # type: ignore[index]
        assert b"secret" == (tmp_path / A / "gateway.secret").read_bytes()

    def test_one_that_starts_is_not_drained_and_takes_every_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Stored(**{f"trouble/{A}": b"before"})
        shard = shard_of(store, tmp_path, _beat=70, _changed={"changed/PUT /x": b"1"})
        (tmp_path / A).mkdir()
        (tmp_path / A / DRAINED).touch()
        self.started(shard, monkeypatch)
        assert not (tmp_path / A / DRAINED).exists()
        assert (70, {}) == (shard._started_at, shard._changed)
        assert {} == store.values

    def test_one_that_does_not_start_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Stored()
        shard = shard_of(store, tmp_path, _beat=70, _changed={"changed/PUT /x": b"1"})
        self.started(shard, monkeypatch, 1, b"x" * 2000 + b"no port\n")
        assert store.values[f"trouble/{A}"].endswith(b"xno port")
        assert 1000 == len(store.values[f"trouble/{A}"])
        assert 0 == shard._started_at

    def test_it_tells_what_works_here_and_its_part_of_the_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def backend(name: str, tier: str, works: bool, memory: bool) -> dict[str, Any]:
            can = {"name": "memory_snapshot", "available": memory, "reason": f"{name} 1"}
            form = {"backend": name, "available": works, "tiers": [tier], "capabilities": [can]}
            return {**form, "capabilities": [can, {**can, "name": "mount", "reason": "no"}]}

        info = {
            "backends": [
                backend("native", "light", True, False),
                backend("gvisor", "strong", True, True),
                backend("microvm", "virtual", False, True),
            ]
        }
        stats = {"active_sandboxes": 1, "max_sandboxes": 9, "waiting": 2, "pool_size": 3}
        answers = {"/v1/info": info, "/v1/stats": stats}
        monkeypatch.setattr(module, "_images", lambda: ["x"])
        monkeypatch.setattr(module, "_free_memory", lambda: 9000)
        shard = shard_of(Stored(), tmp_path, _count=3, _address=lambda: "https://x:1")
        shard._get = lambda path: answers.get(path, {"items": []})
        found = shard._state()
        assert (["light", "strong"], ["native", "gvisor"]) == (found["tiers"], found["backends"])
        assert {"gvisor": "gvisor 1"} == found["memory"]
        assert ({"zone": "z"}, ["x"]) == (found["labels"], found["images"])
        assert (3000, 1, 9, 2) == (
            found["free_memory_bytes"],
            found["active"],
            found["max_sandboxes"],
            found["waiting"],
        )
        assert len(os.sched_getaffinity(0)) == pytest.approx(found["cpus"] * 3)
        answers["/v1/info"] = {"backends": []}
        assert found["tiers"] == shard._state()["tiers"], "looked at now and then"
        shard._facts_at -= 16.0
        assert [] == shard._state()["tiers"]


class TestReleases:
    def test_gateways_know_before_anything_is_gone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Stored(**{f"{kind}/{A}": b"x" for kind in ("drain", "list", "claim", "node")})
        shard = shard_of(store, tmp_path, _drains=True)
        (tmp_path / A).mkdir()
        (tmp_path / A / DRAINED).touch()
        seen: list[set[str]] = []

        def wait(_directory: object) -> None:
            assert (tmp_path / A).is_dir()
            seen.append({*store.values})

        monkeypatch.setattr(module, "await_gateways", wait)
        assert shard.release()
        assert [{f"{kind}/{A}" for kind in ("drain", "list", "claim", "node", "lost")}] == seen
        assert [f"lost/{A}"] == [*store.values]
        assert store.values[f"lost/{A}"].endswith(b" released")
        assert [] == os.listdir(tmp_path)
        assert shard._ended.is_over

    @pytest.mark.parametrize("may_go", [True, False])
    def test_a_node_goes_with_all_its_shards_and_once(self, may_go: bool, ray: Any) -> None:
        did: list[str] = []
        ray.actor = SimpleNamespace(exit_actor=lambda: did.append("exit"))
        node: Any = Node.__new__(Node)

        def shard(name: str, goes: bool) -> Any:
            def release() -> bool:
                did.append(name)
                return True

            return SimpleNamespace(may_go=lambda: goes, release=release)

        node._shards, node._release = [shard("one", True), shard("two", may_go)], threading.Lock()
        for _ in range(2):
            node.release()
        assert (["one", "two", "exit"] if may_go else []) == did

    def test_what_a_daemon_holds_is_not_swept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped: list[str] = []
        monkeypatch.setattr(succession, "stop", stopped.append)
        held = StateDirectory(str(tmp_path / "held"))
        try:
            (tmp_path / "left").mkdir()
            shard_of(Stored(), tmp_path)._sweep()
        finally:
            held.close()
        assert (["held"], [str(tmp_path / "left")]) == (os.listdir(tmp_path), stopped)


def test_each_shard_of_a_node_keeps_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = Stored()
    store.config = lambda: {"base": str(tmp_path)}
    monkeypatch.setattr(module, "Directory", lambda _: store)
    for name in ("_live", "_hold"):
        monkeypatch.setattr(Shard, name, lambda _: None)
    first = [Shard("c", "ray-a", index, 2).tag for index in range(2)]
    assert 2 == len({*first})
    assert [f"claim/{each}" for each in sorted(first)] == store.list("claim/")
    other = Shard("c", "ray-b", 0, 2).tag
    assert other not in first
    store.put("tag/ray-a", b"11111111")
    store.put("tag/ray-a/1", b"22222222")
    again = [Shard("c", "ray-a", index, 2).tag for index in range(2)]
    assert ["11111111", "22222222"] == again, "an actor that was started again is the same"
