"""Contenders run in turns, warm-ups do not count, and who breaks down is named."""

from __future__ import annotations

import gc

import pytest

from ringfence.bench.turns import OURS, take_turns

pytestmark = pytest.mark.anyone


class Watch:
    """A clock that goes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def worker(self, name: str, *seconds: float) -> object:
        """A contender that takes these times, one a call, the last for ever."""
        left = list(seconds)

        def work() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_contenders_alternate_and_the_order_turns_round() -> None:
    watch = Watch()

    take_turns({"a": watch.worker("a", 1), "b": watch.worker("b", 1)}, 4, warm_up=0, clock=watch)  # type: ignore[dict-item]

    assert ["a", "b", "b", "a", "a", "b", "b", "a"] == watch.calls


def test_median_is_of_each_contender_without_warm_ups() -> None:
    watch = Watch()
    ours = watch.worker(OURS, 100, 1, 9, 2)
    peer = watch.worker("peer", 100, 4, 4, 40)

    samples = take_turns({OURS: ours, "peer": peer}, 3, warm_up=1, clock=watch)  # type: ignore[dict-item]

    assert [1, 9, 2] == samples.seconds[OURS]
    assert 2000 == samples.median_ms(OURS)
    assert 4000 == samples.median_ms("peer")


def test_pauses_are_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, pauses = Watch(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        watch.now += seconds

    monkeypatch.setattr("time.sleep", pause)
    ours = watch.worker(OURS, 1)
    samples = take_turns({OURS: ours}, 2, warm_up=0, pause_s=5, clock=watch)  # type: ignore[dict-item]

    assert [5, 5] == pauses
    assert [1, 1] == samples.seconds[OURS]


def test_a_contender_with_its_own_watch_is_believed() -> None:
    samples = take_turns({"peer": lambda: 0.25}, 3)

    assert [0.25] * 3 == samples.seconds["peer"]


def test_a_peer_that_breaks_down_is_out_and_says_why() -> None:
    runs = []

    def flaky() -> None:
        runs.append(1)
        if len(runs) == 2:
            raise OSError("no more")

    samples = take_turns({OURS: lambda: None, "peer": flaky}, 5, warm_up=0)

    assert {"peer": "no more"} == samples.failed
    assert 2 == len(runs)
    assert samples.median_ms("peer") is None
    assert 5 == len(samples.seconds[OURS])


def test_our_own_failure_is_not_a_number() -> None:
    def fail() -> None:
        raise AssertionError("true failed")

    with pytest.raises(AssertionError, match="true failed"):
        take_turns({OURS: fail, "peer": lambda: None}, 3)


def test_the_collector_is_off_while_it_counts_and_on_again() -> None:
    seen = []

    take_turns({"a": lambda: seen.append(gc.isenabled())}, 2, warm_up=0)

    assert [False, False] == seen
    assert gc.isenabled()
