"""Names bound to nodes are forgotten once what they stand for is over, never before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.cluster.bindings import KEEP_S, Binding, forget_gateways, forgotten, prune
from ringfence.cluster.nodes import Nodes

pytestmark = pytest.mark.anyone
NOW = 1_800_000_000.0
OLD, RECENT, YOUNG = NOW - KEEP_S - 1, NOW - 3600, NOW - 60


def test_a_binding_is_read_as_it_was_written() -> None:
    for each in (Binding("0a1b2c3d", NOW), Binding("0a1b2c3d", NOW, "native-1")):
        assert each == Binding.read(each.written())
    assert Binding("n", NOW) == Binding.read(b"n %d" % NOW)


def test_what_lives_or_was_not_asked_about_is_kept_however_old() -> None:
    bindings = {
        "lives": Binding("n0", OLD, "a"),
        "over": Binding("n0", OLD, "b"),
        "never made": Binding("n0", OLD),
        "recent": Binding("n0", RECENT, "c"),
        "unknown": Binding("n1", OLD, "d"),
        "lost": Binding("n2", OLD, "e"),
    }

    found = forgotten(bindings, {"n0": {"a"}, "n2": set()}, NOW)

    assert {"over", "never made", "lost"} == {*found}


def test_of_too_many_the_oldest_are_forgotten_but_none_that_is_being_made() -> None:
    bindings = {f"b{i}": Binding("n0", RECENT + i, "x") for i in range(10)}
    bindings |= {f"y{i}": Binding("n0", YOUNG) for i in range(10)}

    found = forgotten(bindings, {"n0": set()}, NOW, most=4)

    assert {f"b{i}" for i in range(6)} == {*found}


class _Directory:
    """A store in memory."""

    def __init__(self, **values: bytes) -> None:
        self.values = {f"gateway/{name}": value for name, value in values.items()}

    def many(self, prefix: str) -> dict[str, bytes]:
        return {name: each for name, each in self.values.items() if name.startswith(prefix)}

    def remove(self, name: str) -> None:
        del self.values[name]


def test_a_gateway_is_forgotten_once_its_beat_stands_still() -> None:
    directory: Any = _Directory(lives=b"1 0", dead=b"7 3")
    beats = forget_gateways(directory, {})
    assert {"gateway/lives", "gateway/dead"} == {*directory.values}  # the first look knows none

    directory.values |= {"gateway/lives": b"2 0", "gateway/comes": b"1 0"}
    beats = forget_gateways(directory, beats)
    assert {"gateway/lives", "gateway/comes"} == {*directory.values} == {*beats}


class _Node:
    """A node on which nothing lives; `asked` is called while a gateway asks it."""

    def __init__(self, asked: Callable[[], None]) -> None:
        self._asked = asked

    async def ask(self, *_: Any) -> Any:
        self._asked()
        return {"items": [], "next_cursor": ""}


async def test_a_name_that_is_bound_anew_meanwhile_is_kept() -> None:
    form = {"node": "n0", "ray_id": "r0", "beat": "1", "backends": []}
    directory: Any = Stored(**{"node/n0": json.dumps(form).encode()})
    directory.living = {"r0": ("127.0.0.1", 1)}
    nodes = Nodes(directory, lambda _: None)
    nodes.look()
    over, anew = Binding("n0", OLD, "a").written(), Binding("n0", NOW, "b").written()
    directory.values |= {"bind/over": over, "bind/anew": over}

    scatter: Any = _Node(lambda: directory.put("bind/anew", anew))
    assert 2 == await prune(directory, nodes, scatter, NOW)

    assert {"bind/anew": anew} == directory.many("bind/")


class _Pages:
    """A node whose list of sandboxes has two pages."""

    def __init__(self) -> None:
        self.targets: list[bytes] = []

    async def ask(self, _node: Any, _scope: Any, _method: str, target: bytes) -> Any:
        self.targets.append(target)
        number, cursor = (2, "") if b"cursor=next" in target else (1, "next")
        item = {"id": f"sbx-{number}", "session_id": f"sess-{number}"}
        return {"items": [item], "next_cursor": cursor}


async def test_what_lives_is_known_from_every_page_by_either_id() -> None:
    form = {"node": "n0", "ray_id": "r0", "beat": "1", "backends": []}
    directory: Any = Stored(**{"node/n0": json.dumps(form).encode(), "lost/n1": b""})
    directory.living = {"r0": ("127.0.0.1", 1)}
    nodes = Nodes(directory, lambda _: None)
    nodes.look()
    living = ("sbx-1", "sess-1", "sbx-2", "sess-2")
    for made in (*living, "sbx-3"):
        directory.put(f"bind/{made}", Binding("n0", OLD, made).written())
    directory.put("bind/lost", Binding("n1", OLD, "sbx-4").written())
    directory.put("bind/silent", Binding("n2", OLD, "sbx-5").written())
    scatter: Any = _Pages()
    assert 2 == await prune(directory, nodes, scatter, NOW)
    assert {*living, "silent"} == {each.removeprefix("bind/") for each in directory.list("bind/")}
    assert 2 == len(scatter.targets)
