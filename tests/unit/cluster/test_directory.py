"""The cluster's store, with a key-value store in memory in the place of Ray's head."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringfence.cluster.directory import Directory
from ringfence.errors import InvalidRequest, ServerUnreachable

pytestmark = pytest.mark.anyone


class Head:
    """Ray's head: values by namespace and key, and the nodes that it knows."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}
        self.nodes: list[dict[str, Any]] = []

    def get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.values.get((namespace, key))

    def put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> bool:
        was_there = (namespace, key) in self.values
        if overwrite or not was_there:
            self.values[namespace, key] = value
        return was_there

    def remove(self, key: bytes, *, del_by_prefix: bool, namespace: bytes) -> None:
        for space, each in [*self.values]:
            if space == namespace and (each.startswith(key) if del_by_prefix else each == key):
                del self.values[space, each]

    def keys(self, prefix: bytes, *, namespace: bytes) -> list[bytes]:
        found = [key for space, key in self.values if space == namespace and key.startswith(prefix)]
        return found[::-1]

    def internal_kv_multi_get(self, keys: list[bytes], namespace: bytes) -> dict[bytes, bytes]:
        return {key: self.values[namespace, key] for key in keys}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    """Have `import ray` find this head."""
    made = Head()
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: made.nodes
    worker = SimpleNamespace(global_worker=SimpleNamespace(gcs_client=made))
    ray._private = SimpleNamespace(worker=worker)
    experimental: Any = ModuleType("ray.experimental")
    kv: Any = ModuleType("ray.experimental.internal_kv")
    kv._internal_kv_get, kv._internal_kv_put = made.get, made.put
    kv._internal_kv_del, kv._internal_kv_list = made.remove, made.keys
    ray.experimental, experimental.internal_kv = experimental, kv
    for module in (ray, experimental, kv):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_the_first_value_stays_for_all_who_come_later(head: Head) -> None:
    first, second = Directory("a"), Directory("a")

    assert b"one" == first.put_first("key", b"one")
    assert b"one" == second.put_first("key", b"two") == first.get("key")
    second.put("key", b"three")
    assert b"three" == first.get("key")
    assert first.secret() == second.secret() == first.secret()
    assert first.secret() != Directory("b").secret()
    assert 3 == len(head.values)


@pytest.mark.usefixtures("head")
def test_clusters_of_one_head_are_apart() -> None:
    one, other = Directory("a"), Directory("ab")
    for each in (one, other):
        for key in ("x/2", "x/1", "x", "y/1"):
            each.put(key, f"{each.name} {key}".encode())

    assert ["x/1", "x/2"] == one.list("x/")
    assert {"x/1": b"a x/1", "x/2": b"a x/2"} == one.many("x/")
    assert {} == one.many("z/")
    one.remove("x")
    assert ["x/1", "x/2", "y/1"] == one.list("")
    one.remove("x", prefix=True)
    assert ["y/1"] == one.list("")
    one.remove("", prefix=True)
    assert [] == one.list("")
    assert ["x", "x/1", "x/2", "y/1"] == other.list("")


def test_nodes_that_ray_has_lost_are_none(head: Head) -> None:
    for name, is_alive in (("lives", True), ("gone", False)):
        place = {"NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7, "Resources": {"CPU": 4.0}}
        head.nodes.append({"NodeID": name, "Alive": is_alive, **place})

    assert {"lives": ("10.0.0.1", 7)} == Directory("a").ray_nodes()
    assert {"lives": {"CPU": 4.0}} == Directory("a").ray_resources()


def test_a_head_that_does_not_answer_is_told_in_one_way(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Exception] = [RuntimeError("no head"), InvalidRequest("of our own")]

    def refuse(*_: object, **__: object) -> None:
        raise asked.pop(0)

    monkeypatch.setattr(sys.modules["ray.experimental.internal_kv"], "_internal_kv_get", refuse)
    with pytest.raises(ServerUnreachable, match="head does not answer: no head"):
        Directory("a").get("key")
    with pytest.raises(InvalidRequest, match="of our own"):
        Directory("a").get("key")
    assert not head.values
