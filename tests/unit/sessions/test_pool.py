"""The shelf: filled to the least, never beyond the most, fresh, and each taken once."""

from __future__ import annotations

import threading
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
