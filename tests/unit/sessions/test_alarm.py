"""A time to wake at that others may change, and that wakes nobody before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.unit.sessions.test_pool import Bench

from ringfence import SandboxSpec
from ringfence.sessions.pools.pool import Alarm

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


@pytest.mark.parametrize("after_s", [0.0, -1.0, 0.001])
def test_it_rings(alarm: Alarm, after_s: float) -> None:
    alarm.set(after_s)

    alarm.wait()


def test_the_last_word_counts(alarm: Alarm) -> None:
    """Also for who waits already: without it this one would wait for an hour."""
    alarm.set(3600.0)
    rung = threading.Event()

    def wait() -> None:
        alarm.wait()
        rung.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not rung.is_set()
    alarm.set(0.0)

    assert rung.wait(PATIENCE_S)


def test_what_rang_before_it_was_set_again_is_forgotten(alarm: Alarm) -> None:
    alarm.set(0.0)
    alarm.wait()
    alarm.set(0.0)
    alarm.set(3600.0)
    alarm.set(0.0)

    alarm.wait()


class Noted(Alarm):
    """What it was set to."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def set(self, after_s: float) -> None:
        self.times.append(after_s)


def test_a_claim_leaves_the_pool_asleep_until_the_lull_unless_half_are_gone() -> None:
    bench, alarm = Bench(min_warm=4, max_warm=4), Noted()
    bench.pool.tend()
    bench.pool._alarm = alarm

    for _ in range(3):
        assert bench.pool.claim(SandboxSpec(), "unconfined") is not None

    assert [0.025, 0.025, 0.0] == alarm.times
