"""Names bound to nodes are forgotten once what they stand for is over, never before."""

from __future__ import annotations

import pytest

from ringfence.cluster.bindings import KEEP_S, Binding, forgotten

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
