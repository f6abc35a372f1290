"""Many clients at once; and that the check of their history finds what is wrong with one."""

from __future__ import annotations

import pytest
from tools import crowd
from tools.crowd import History, Span

from ringfence.bench.daemon import Daemon

pytestmark = [pytest.mark.anyone, pytest.mark.full]


def test_a_crowd_finds_nothing_wrong() -> None:
    with Daemon(max_sandboxes=60, max_waiting=100) as daemon:
        report = crowd.run(daemon, 30, 3.0)

    assert report.ok, (report.errors[:5], report.violations[:5], report.left)
    assert report.cycles >= 10
    assert report.lists >= 3
    assert report.memory_bytes[-1] - report.memory_bytes[0] < 64 << 20


def test_nor_when_the_daemon_is_killed_meanwhile() -> None:
    """No sandbox is lost or comes back, and each ends once: whatever was asked when it was killed."""
    with Daemon(max_sandboxes=40, max_waiting=60) as daemon:
        report = crowd.run(daemon, 8, 3.0, kills=3)

    assert report.ok, (report.errors[:5], report.violations[:5], report.left)
    assert 3 == report.kills
    assert report.cycles >= 5
    assert report.lists >= 3


def history(*lists: tuple[float, float, set[str]]) -> History:
    """A sandbox that was made from 1 to 2, and deleted from 10 to 11; and what lists showed."""
    seen = [(Span(start, end), frozenset(ids)) for start, end, ids in lists]
    return History({"a": Span(1, 2)}, {"a": Span(10, 11)}, seen)


@pytest.mark.parametrize(
    "lists",
    [
        [(0.0, 0.5, set[str]()), (3.0, 4.0, {"a"}), (12.0, 13.0, set[str]())],
        [(1.5, 1.6, {"a"}), (1.7, 3.0, {"a"}), (10.5, 10.6, set[str]())],
        [(9.0, 12.0, {"a"}), (9.5, 12.0, set[str]())],
        [(3.0, 4.0, {"a", "somebody else's"})],
    ],
)
def test_what_an_order_explains_is_no_violation(lists: list[tuple[float, float, set[str]]]) -> None:
    assert [] == history(*lists).violations()


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([(0.0, 0.5, {"a"})], "before it was asked for"),
        ([(12.0, 13.0, {"a"})], "after it was deleted"),
        ([(3.0, 4.0, set[str]())], "not listed"),
        ([(10.1, 10.2, set[str]()), (10.3, 10.4, {"a"})], "came back"),
    ],
)
def test_what_none_explains_is_one(lists: list[tuple[float, float, set[str]]], said: str) -> None:
    found = history(*lists).violations()

    assert 1 == len(found)
    assert said in found[0]
