"""What an operator's commands and the scaler ask of Ray, which is scripted here."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.cluster import admin, node, scaler
from ringfence.errors import ServerUnreachable

pytestmark = pytest.mark.anyone
A = "0000000a"


class RayError(Exception):
    """What Ray raises of an actor."""


class GetTimeoutError(RayError):
    """It took too long."""


class Actor:
    """An actor, whose methods answer so, or fail so."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked = answer, list[Any]()
        self.stop = SimpleNamespace(remote=lambda: self._note("stop"))
        self.settle = SimpleNamespace(remote=lambda tag: self._note(f"settle {tag}"))

    def _note(self, what: str) -> Any:
        self.asked.append(what)
        return self.answer


class Cluster(Stored):
    """A store of which all can be removed."""

    name = "c"

    def remove(self, key: str, *, prefix: bool = False) -> None:
        for each in self.list(key) if prefix else [key]:
            super().remove(each)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `import ray` find one whose actors answer at once."""

    def get(answer: Any, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    made: Any = ModuleType("ray")
    made.get, made.killed, made.actors = get, [], {}
    made.exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    made.kill = made.killed.append

    def find(_cluster: str, ray_id: str) -> Any:
        if ray_id not in made.actors:
            raise ValueError("there is none")
        return made.actors[ray_id]

    made.get_actor = lambda name, namespace: find(namespace, name)
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(node, "find", find)
    return made


def test_a_cluster_ends_with_its_scaler_all_nodes_and_its_store(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(scaler, "end", ended.append)
    directory: Any = Cluster(**{"config": b"{}", f"node/{A}": b"{}"})
    directory.living = dict.fromkeys(("one", "gone", "none"), ("127.0.0.1", 1))
    ray.actors = {"one": Actor(), "gone": Actor(RayError("its machine is gone"))}
    assert 2 == admin.down(directory)
    assert [["stop"]] * 2 == [each.asked for each in ray.actors.values()]
    assert [*ray.actors.values()] == ray.killed
    assert (["c"], {}) == (ended, directory.values)


def test_a_node_that_does_not_end_keeps_its_cluster(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaler, "end", lambda _: None)
    directory: Any = Cluster(config=b"{}")
    directory.living = {"one": ("127.0.0.1", 1)}
    ray.actors = {"one": Actor(GetTimeoutError())}
    with pytest.raises(ServerUnreachable, match="does not end"):
        admin.down(directory)
    assert ([], {"config": b"{}"}) == (ray.killed, directory.values)


def test_a_node_is_asked_to_save_its_own_sandboxes(ray: Any) -> None:
    form = {"node": A, "ray_id": "one"}
    directory: Any = Cluster(**{f"node/{A}": json.dumps(form).encode()})
    ray.actors = {"one": Actor([{"id": "sbx-1"}])}
    assert [{"id": "sbx-1"}] == admin.settle(directory, A)
    assert [f"settle {A}"] == ray.actors["one"].asked
    for actors in ({}, {"one": Actor(RayError("away"))}):
        ray.actors = actors
        with pytest.raises(ServerUnreachable, match=f"node {A} does not answer"):
            admin.settle(directory, A)


def test_ray_is_asked_for_what_all_clusters_need(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    sdk: Any = ModuleType("ray.autoscaler.sdk")

    def request_resources(*, bundles: list[Any]) -> None:
        asked.append(bundles)

    sdk.request_resources = request_resources
    for name, module in (("ray.autoscaler", ModuleType("ray.autoscaler")), (sdk.__name__, sdk)):
        monkeypatch.setitem(sys.modules, name, module)
    store = Cluster()
    monkeypatch.setattr(scaler, "Directory", lambda _: store)
    scaler.ask("a", [{"CPU": 1.0}] * 2)
    scaler.ask("b", [{"CPU": 4.0}])
    assert [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 4.0}] == asked[-1]
    ray.actors = {"scaler": "actor"}
    scaler.end("a")
    assert (["actor"], [{"CPU": 4.0}], ["b"]) == (ray.killed, asked[-1], [*store.values])
    ray.actors = {}
    scaler.end("b")
    assert 3 == len(asked), "it has none"
