"""The shelf: filled to the least, never beyond the most, fresh, and each taken once."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.native.outside import until
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence import SandboxSpec
from ringfence.errors import InvalidRequest, IsolationError, Unsupported
from ringfence.sessions.config import PoolConfig
from ringfence.sessions.pools.pool import Pool, PooledSandbox

pytestmark = pytest.mark.anyone


class Bench:
    """A pool of unconfined sandboxes, and everything it built and discarded."""

    def __init__(self, **config: Any) -> None:
        self.clock, self.backend = FakeClock(), Unconfined()
        self.room, self.failure = 1000, None  # type: int, Exception | None
        self.built: list[PooledSandbox] = []
        self.discarded: list[PooledSandbox] = []
        self.pool = Pool(PoolConfig(**config), self.clock, self.build, self.discard)

    def build(self, profile: str) -> PooledSandbox | None:
        if self.failure is not None:
            raise self.failure
        if self.room <= 0:
            return None
        self.room -= 1
        warm = self.backend.prewarm(self.pool.config.profiles[profile])
        self.built.append(PooledSandbox(warm, "unconfined", profile, self.clock.now()))
        return self.built[-1]

    def discard(self, kept: PooledSandbox) -> None:
        self.room += 1
        kept.warm.discard()
        self.discarded.append(kept)


def test_the_defaults_are_the_contract() -> None:
    config = PoolConfig()

    assert (True, 2, 10, 600.0, ("default",)) == (
        config.enabled,
        config.min_warm,
        config.max_warm,
        config.warm_ttl_s,
        config.warm_profiles,
    )


def test_a_disabled_one_holds_nothing() -> None:
    bench = Bench(enabled=False)
    bench.pool.start()
    bench.pool.tend()

    assert [] == bench.built
    assert bench.pool.claim(SandboxSpec(), "unconfined") is None
    bench.pool.close()


def test_it_fills_up_in_the_background_and_again_after_a_claim() -> None:
    bench = Bench(min_warm=3)
    bench.pool.start()
    assert until(lambda: 3 == bench.pool.size)

    kept = bench.pool.claim(SandboxSpec(), "unconfined")

    assert kept is not None
    bench.clock.pass_by(1)
    bench.pool.wake()
    assert until(lambda: 4 == len(bench.built))
    assert until(lambda: 3 == bench.pool.size)
    bench.pool.close()
    assert 3 == len(bench.discarded)
    assert kept not in bench.discarded


def test_who_has_just_claimed_is_not_disturbed_until_half_of_them_are_gone() -> None:
    bench = Bench(min_warm=4)
    bench.pool.tend()

    for left in (3, 2):
        assert bench.pool.claim(SandboxSpec(), "unconfined") is not None
        bench.pool.tend(patient=True)
        assert left == bench.pool.size
    bench.pool.claim(SandboxSpec(), "unconfined")
    bench.pool.tend(patient=True)
    assert 2 == bench.pool.size

    bench.clock.pass_by(1)
    bench.pool.tend(patient=True)
    assert 4 == bench.pool.size


def test_what_is_too_old_is_replaced() -> None:
    bench = Bench(min_warm=2, warm_ttl_s=600)
    bench.pool.tend()
    old = list(bench.built)

    bench.clock.pass_by(599)
    bench.pool.tend()
    assert [] == bench.discarded
    bench.clock.pass_by(1)
    bench.pool.tend()

    assert old == bench.discarded
    assert 2 == bench.pool.size
    assert bench.pool.claim(SandboxSpec(), "unconfined") not in old


def test_what_has_died_is_replaced() -> None:
    bench = Bench(min_warm=2)
    bench.pool.tend()
    bench.built[0].warm.discard()

    bench.pool.tend()

    assert bench.built[0] in bench.discarded
    assert 2 == bench.pool.size


def test_each_is_taken_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(min_warm=50, max_warm=50)
    bench.pool.tend()
    taken: list[PooledSandbox] = []

    def take() -> None:
        while (kept := bench.pool.claim(SandboxSpec(), "unconfined")) is not None:
            taken.append(kept)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 50 == len(taken) == len({id(kept) for kept in taken})


def test_another_backend_or_shape_does_not_fit() -> None:
    bench = Bench(min_warm=1)
    bench.pool.tend()

    assert bench.pool.claim(SandboxSpec(), "native") is None
    with pytest.raises(InvalidRequest):
        bench.pool.claim(SandboxSpec(template="other"), "unconfined")
    assert 1 == bench.pool.size


def test_profiles_are_kept_apart() -> None:
    profiles = {"hard": SandboxSpec(profile="debug")}
    bench = Bench(min_warm=1, warm_profiles=("default", "hard"), profiles=profiles)
    bench.pool.tend()

    assert {"default", "hard"} == {kept.profile for kept in bench.built}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"warm_profiles": ("none-such",)}, "warm_profiles[0]"),
        ({"min_warm": 6, "max_warm": 5}, "min_warm"),
        ({"min_warm": -1}, "min_warm"),
        ({"warm_ttl_s": 0.0}, "warm_ttl_s"),
    ],
)
def test_a_bad_config_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        PoolConfig(**config)

    assert field == refusal.value.field


def test_without_room_it_waits_until_it_is_poked() -> None:
    bench = Bench(min_warm=2)
    bench.room = 1
    bench.pool.tend()
    bench.pool.tend()
    assert 1 == bench.pool.size

    bench.room = 1
    bench.pool.wake()
    bench.pool.tend()

    assert 2 == bench.pool.size


def test_a_backend_that_fails_is_asked_less_and_less_often() -> None:
    bench, asked = Bench(min_warm=1), 0
    bench.failure = IsolationError("not now")
    real = bench.build

    def build(profile: str) -> PooledSandbox | None:
        nonlocal asked
        asked += 1
        return real(profile)

    bench.pool._build = build
    for _ in range(600):
        bench.pool.tend()
        bench.clock.pass_by(0.1)

    assert 5 < asked < 15
    assert "not now" in bench.pool.last_error
    bench.failure = None
    bench.clock.pass_by(31)
    bench.pool.tend()
    assert (1, "") == (bench.pool.size, bench.pool.last_error)


def test_an_unexpected_error_does_not_end_it() -> None:
    bench = Bench(min_warm=1)
    bench.failure = ZeroDivisionError("a bug")
    bench.pool.start()
    assert until(lambda: "a bug" in bench.pool.last_error)

    bench.failure = None
    bench.clock.pass_by(31)
    bench.pool.wake()

    assert until(lambda: 1 == bench.pool.size)
    bench.pool.close()


def test_what_nothing_can_build_ahead_is_given_up() -> None:
    bench = Bench(min_warm=1)
    bench.failure = Unsupported(backend="unconfined", operation="prewarm")
    bench.pool.tend()
    bench.clock.pass_by(1000)
    bench.failure = None
    bench.pool.tend()

    assert 0 == bench.pool.size
    assert "default" in bench.pool.given_up

    bench.pool.change(PoolConfig(min_warm=1, max_warm=3))  # what it is built of may be another
    bench.pool.tend()
    assert (1, {}) == (bench.pool.size, bench.pool.given_up)


def test_closing_waits_for_what_is_being_built() -> None:
    bench = Bench(min_warm=1)
    began, go = threading.Event(), threading.Event()
    real = bench.build

    def build(profile: str) -> PooledSandbox | None:
        began.set()
        go.wait(20)
        return real(profile)

    bench.pool._build = build
    bench.pool.start()
    assert began.wait(20)
    closer = threading.Thread(target=bench.pool.close)
    closer.start()
    go.set()
    closer.join(20)

    assert not closer.is_alive()
    assert bench.built == bench.discarded
    assert {} == bench.backend.prebuilt


class Shelf(RuleBasedStateMachine):
    """Orders, claims, time and failures in any order: the bounds hold, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(min_warm=2, max_warm=5, warm_ttl_s=600)
        self.claimed: list[PooledSandbox] = []

    @rule()
    def tend(self) -> None:
        self.bench.pool.tend()

    @rule()
    def claim(self) -> None:
        kept = self.bench.pool.claim(SandboxSpec(), "unconfined")
        if kept is not None:
            assert kept not in self.claimed
            assert kept not in self.bench.discarded
            self.claimed.append(kept)

    @rule()
    def make_room(self) -> None:
        kept = self.bench.pool.take_any()
        if kept is not None:
            self.bench.discard(kept)

    @rule()
    def order(self) -> None:
        self.bench.pool.order("default")

    @rule(seconds=st.sampled_from([1, 31, 601]))
    def pass_by(self, seconds: int) -> None:
        self.bench.clock.pass_by(seconds)

    @rule(room=st.integers(0, 5))
    def have_room(self, room: int) -> None:
        self.bench.room = room
        self.bench.pool.wake()

    @rule(fails=st.booleans())
    def fail(self, fails: bool) -> None:
        self.bench.failure = IsolationError("not now") if fails else None

    @invariant()
    def bounds_hold(self) -> None:
        assert self.bench.pool.size <= 5

    @invariant()
    def nothing_is_lost(self) -> None:
        on_the_shelf = self.bench.pool.size
        gone = len(self.claimed) + len(self.bench.discarded)
        assert len(self.bench.built) == on_the_shelf + gone

    @invariant()
    def everything_is_built_once(self) -> None:
        assert len(self.bench.built) == len({kept.warm.id for kept in self.bench.built})


Shelf.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestShelf = Shelf.TestCase


def test_each_order_is_made_once_within_what_may_be() -> None:
    profiles = {"default": SandboxSpec(), "big": SandboxSpec()}
    bench = Bench(min_warm=1, max_warm=4, warm_profiles=("default", "big"), profiles=profiles)
    assert not bench.pool.order("other")
    assert bench.pool.order("big")
    assert bench.pool.order("default")
    assert not bench.pool.order("big"), "two are to be there anyway, and two are ordered"
    bench.pool.tend()
    assert 4 == bench.pool.size == len(bench.built)
    assert not bench.pool.order("big")
    for _ in range(2):
        bench.pool.take_any()
    bench.clock.pass_by(1)
    bench.pool.tend()
    assert {"default", "big"} <= {each.profile for each in bench.pool._shelf}
    assert len(bench.built) - 2 == bench.pool.size
    bench.pool.close()
    assert not bench.pool.order("default")


def test_the_pause_after_failures_has_an_end_and_begins_anew_after_a_success() -> None:
    bench = Bench(min_warm=1)
    bench.failure = IsolationError("not now")
    pauses = []
    for _ in range(12):
        bench.pool.tend()
        pauses.append(round(bench.pool._not_before - bench.clock.now(), 6))
        bench.pool.tend()
        assert pauses[-1] == round(bench.pool._not_before - bench.clock.now(), 6), "too early"
        bench.clock.pass_by(pauses[-1])
    assert [0.1, 0.2, 0.4] == pauses[:3]
    assert [30.0, 30.0] == pauses[-2:]
    bench.failure = None
    bench.pool.tend()
    assert (1, "") == (bench.pool.size, bench.pool.last_error)
    bench.failure = IsolationError("again")
    for _ in range(2):
        bench.pool.take_any()
        bench.pool.tend()
        assert 0.1 == pytest.approx(bench.pool._not_before - bench.clock.now())
        bench.pool.wake()  # there may be room again


def test_filling_waits_for_what_others_build_and_makes_none_twice() -> None:
    bench = Bench(min_warm=1)
    began, go = threading.Event(), threading.Event()
    real = bench.build

    def build(profile: str) -> PooledSandbox | None:
        began.set()
        assert go.wait(20)
        return real(profile)

    bench.pool._build = build
    threads = [threading.Thread(target=bench.pool.tend)]
    threads[0].start()
    assert began.wait(20)
    threads.append(threading.Thread(target=bench.pool.fill))
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go.set()
    for each in threads:
        each.join(20)
        assert not each.is_alive()
    assert 1 == bench.pool.size == len(bench.built)


def test_one_over_the_files_of_a_snapshot_is_for_that_snapshot() -> None:
    bench = Bench(min_warm=2)
    bench.pool.tend()
    bench.built[0].snapshot = "snap-1"
    for snapshot in ("snap-2", "snap-1", "snap-1", "", ""):
        found = bench.pool.claim(SandboxSpec(), "unconfined", snapshot)
        if found is not None:
            assert snapshot == found.snapshot
    assert 0 == bench.pool.size


def test_what_fits_a_changed_configuration_stays_and_all_else_goes() -> None:
    old, other = SandboxSpec(), SandboxSpec(env={"A": "1"})
    bench = Bench(min_warm=1, warm_profiles=("a", "b", "c"), profiles=dict.fromkeys("abc", old))
    bench.pool.tend()
    assert bench.pool.order("a")
    bench.pool.given_up["b"] = "it could not"
    bench.failure = IsolationError("x")
    bench.pool.take_any()
    bench.pool.tend()
    assert bench.pool._not_before > bench.clock.now()
    first = [each for each in bench.built if each.profile in ("b", "c")]
    bench.failure = None

    config = PoolConfig(min_warm=1, warm_profiles=("a", "b"), profiles={"a": old, "b": other})
    bench.pool.change(config)
    assert first == bench.discarded, "another spec, and another profile"
    assert {} == bench.pool.given_up
    bench.pool.tend()
    assert ["a", "b"] == sorted(each.profile for each in bench.pool._shelf), "nothing is ordered"
    bench.pool.change(PoolConfig(enabled=False, warm_profiles=("a",), profiles={"a": old}))
    assert 0 == bench.pool.size
    assert len(bench.built) - 1 == len(bench.discarded), "one was taken"


def test_a_pool_that_is_enabled_later_is_filled_and_closed_with_its_timer() -> None:
    def timers() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed meanwhile
                found += "[timerfd]" in os.readlink(f"/proc/self/fd/{fd}")
        return found

    before = timers()
    bench = Bench(enabled=False)
    bench.pool.start()
    bench.pool.change(PoolConfig(min_warm=1))
    assert until(lambda: 1 == bench.pool.size)
    assert before + 1 == timers()
    bench.pool.close()
    bench.pool.close()
    assert before == timers()
    assert 1 == len(bench.discarded)
