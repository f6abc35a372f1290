"""Looking at sessions in time: each when it is due, none twice at once, and again whatever became of a look."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.native.outside import until
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.backends.optional import Durable
from ringfence.errors import IoError, LifecycleError, StorageFull
from ringfence.model.client_session import SessionState, SessionTimeouts
from ringfence.model.spec import SandboxSpec
from ringfence.sessions import liveness
from ringfence.sessions.clock import Clock
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.reaper import Reaper

pytestmark = pytest.mark.anyone

PATIENCE_S = 30.0
HOUR_S = 3600.0
CONFIG = ManagerConfig(
    cleanup_interval_s=HOUR_S,
    timeouts=SessionTimeouts(idle_s=None, detach_s=None, suspend_s=None),
    pool=PoolConfig(enabled=False),
)


class Sick:
    """A sandbox that fails or blocks where it is looked at; else it is the one in it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.failures: list[Exception] = []
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        self.may_answer.set()

    @property
    def session(self) -> Any:
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.pop(0)
        return self._inner.session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def backend() -> Iterator[Unconfined]:
    made = Unconfined()
    yield made
    made.close()


@pytest.fixture
def manager(backend: Unconfined) -> Iterator[SessionManager]:
    """Its reaper has no thread: a test takes what is due itself."""
    with SessionManager(CONFIG, backends=[backend], background=False, clock=FakeClock()) as made:
        yield made


@pytest.fixture
def running(backend: Unconfined) -> Iterator[SessionManager]:
    """Its reaper runs, on the clock of the machine, and has nothing to do for an hour."""
    with SessionManager(CONFIG, backends=[backend], clock=Clock()) as made:
        yield made


def new(manager: SessionManager, ttl_s: float | None = None) -> Live:
    lease = manager.acquire(SandboxSpec(ttl_s=ttl_s), client_id="ann")
    found = manager.index.find(lease.id)
    assert found is not None
    return found


def sicken(live: Live) -> Sick:
    sick: Any = Sick(live.inner)
    live.inner = sick
    return sick  # type: ignore[no-any-return]


def due(reaper: Reaper) -> list[Live]:
    """What is still to be looked at, without what says nothing any more."""
    found = [(live, at) for at, _, entry in reaper._due if (live := entry()) is not None]
    return [live for live, at in found if at == live.next_look]


def is_over(live: Live) -> bool:
    return live.state == SessionState.TERMINATED


class TestWhatIsDue:
    def test_each_at_its_time_and_those_within_a_moment_together(
        self, manager: SessionManager
    ) -> None:
        first, second, third = (new(manager, ttl_s) for ttl_s in (10.0, 10.015, 10.1))
        reaper, clock = manager.reaper, manager.clock
        assert isinstance(clock, FakeClock)
        assert 10.0 == pytest.approx(reaper._wait_s(clock.now() + HOUR_S))
        assert 3.0 == reaper._wait_s(clock.now() + 3.0), "all is tidied before"
        clock.pass_by(9.9)
        assert [] == reaper._take_due()
        clock.pass_by(0.1)
        assert [first, second] == reaper._take_due()
        assert first.is_checked
        assert second.is_checked
        assert not third.is_checked
        clock.pass_by(0.1)
        assert [third] == reaper._take_due()
        assert [] == reaper._take_due()

    def test_one_that_is_in_hand_is_not_taken_twice_and_one_that_has_ended_not_at_all(
        self, manager: SessionManager
    ) -> None:
        one, ended = new(manager, 10.0), new(manager, 10.0)
        reaper, clock = manager.reaper, manager.clock
        assert isinstance(clock, FakeClock)
        clock.pass_by(10.0)
        ended.state = SessionState.TERMINATED
        assert [one] == reaper._take_due()
        reaper.expect(one)  # its time was changed meanwhile
        assert [] == reaper._take_due()
        ended.state = SessionState.ACTIVE

        reaper._look(one)
        assert is_over(one)
        assert not one.is_checked
        assert one not in due(reaper)

    def test_a_later_time_replaces_the_earlier_one(self, manager: SessionManager) -> None:
        live = new(manager, 10.0)
        clock = manager.clock
        assert isinstance(clock, FakeClock)
        manager.extend(live.id, 100.0)
        clock.pass_by(50.0)
        assert [] == manager.reaper._take_due()
        clock.pass_by(50.0)
        assert [live] == manager.reaper._take_due()

    def test_what_says_nothing_any_more_is_forgotten_and_nothing_else(
        self, manager: SessionManager
    ) -> None:
        """Each change of a time leaves an entry, which could wait for a year."""
        reaper = manager.reaper
        lives = [new(manager, 100.0 + n) for n in range(3)]
        most = 0
        for n in range(1000):
            manager.extend(lives[n % 3].id, 3000.0 - n)
            most = max(most, len(reaper._due))
        assert most <= 2 * 3 + 2 * 64
        assert {id(each) for each in lives} == {id(each) for each in due(reaper)}
        assert reaper._due[0][0] == min(each[0] for each in reaper._due)
        assert [lives[0]] == [
            each for each in due(reaper) if each.next_look == min(e.next_look for e in lives)
        ]


class TestLooks:
    def test_one_whose_look_failed_is_looked_at_again(self, manager: SessionManager) -> None:
        live = new(manager, 10.0)
        sick = sicken(live)
        reaper, clock = manager.reaper, manager.clock
        assert isinstance(clock, FakeClock)
        for error in (IoError("no answer"), LifecycleError("it moves")):
            clock.pass_by(10.0)
            sick.failures = [error]
            [taken] = reaper._take_due()
            reaper._look(taken)
            assert not live.is_checked
            assert [live] == due(reaper)
            assert not is_over(live)
        [taken] = reaper._take_due()
        reaper._look(taken)
        assert is_over(live)
        assert [] == due(reaper)

    def test_a_fault_in_a_look_is_logged_and_the_session_is_looked_at_again_later(
        self, manager: SessionManager, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Else it would never end; nor does a fault that stays keep a thread busy."""
        live = new(manager, 10.0)
        sick = sicken(live)
        reaper, clock = manager.reaper, manager.clock
        assert isinstance(clock, FakeClock)
        clock.pass_by(10.0)
        for _ in range(2):
            sick.failures = [ZeroDivisionError("a fault")]
            [taken] = reaper._take_due()
            reaper._look(taken)
            assert not live.is_checked
            assert [] == reaper._take_due(), "not at once"
            assert [live] == due(reaper)
            clock.pass_by(1.0)
        assert 2 == caplog.text.count(f"a look at session {live.id} failed")
        [taken] = reaper._take_due()
        reaper._look(taken)
        assert is_over(live)

    def test_one_that_is_still_in_use_is_looked_at_again(self, manager: SessionManager) -> None:
        live = new(manager)
        reaper, clock = manager.reaper, manager.clock
        assert isinstance(clock, FakeClock)
        for _ in range(3):
            clock.pass_by(HOUR_S)
            [taken] = reaper._take_due()
            reaper._look(taken)
            assert HOUR_S == live.next_look - clock.now()

    def test_a_slow_one_holds_up_no_other_and_closing_waits_for_it(
        self, running: SessionManager
    ) -> None:
        slow = new(running)
        sick = sicken(slow)
        sick.may_answer.clear()
        slow.expires = running.clock.now()
        running.reaper.expect(slow)
        assert sick.is_asked.wait(PATIENCE_S)
        others = [new(running, 0.01) for _ in range(8)]
        assert until(lambda: all(is_over(each) for each in others), PATIENCE_S)
        closing = threading.Thread(target=running.reaper.close)
        closing.start()
        assert until(lambda: not running.reaper.alive, PATIENCE_S)
        closing.join(0.05)
        assert closing.is_alive()
        assert slow.is_checked
        sick.may_answer.set()
        closing.join(PATIENCE_S)
        assert not slow.is_checked
        assert is_over(slow)

    def test_an_earlier_time_wakes_the_thread(self, running: SessionManager) -> None:
        live = new(running)
        assert until(lambda: running.reaper._wakes_at - running.clock.now() > 60.0, PATIENCE_S)
        running.extend(live.id, 0.01)
        assert until(lambda: is_over(live), PATIENCE_S)
        assert "ttl" == live.reason

    def test_what_was_used_is_written_down_at_each_interval(self, backend: Unconfined) -> None:
        config = ManagerConfig(cleanup_interval_s=0.02, pool=PoolConfig(enabled=False))
        with SessionManager(config, backends=[backend]) as manager:
            live = new(manager)
            for _ in range(2):
                live.touch()
                last = int(live.activity.last * 1e9)

                def is_written(last: int = last) -> bool:
                    record = manager.store.session(live.id)
                    return record is not None and record.active_ns >= last

                assert until(is_written, PATIENCE_S)


class Returning:
    """The lock of a session whose client comes back just before it is taken."""

    def __init__(self, live: Live) -> None:
        self._live, self._lock = live, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._live.touch()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TestVerdicts:
    @pytest.fixture
    def live(self, manager: SessionManager) -> Live:
        return new(manager)

    def idle(self, manager: SessionManager, live: Live, **timeouts: Any) -> None:
        """Let its time be over."""
        live.timeouts = SessionTimeouts(idle_s=10.0, **timeouts)
        assert isinstance(manager.clock, FakeClock)
        manager.clock.pass_by(10.0)

    def test_one_whose_client_came_back_while_it_was_looked_at_goes_on(
        self, manager: SessionManager, live: Live
    ) -> None:
        self.idle(manager, live)
        lock, live.lock = live.lock, Returning(live)  # type: ignore[assignment]
        assert not liveness.look_at(manager, live)
        live.lock = lock
        assert SessionState.ACTIVE == live.state
        self.idle(manager, live)
        assert liveness.look_at(manager, live)
        assert not liveness.look_at(manager, live), "it has ended already"

    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize(("action", "then"), [("suspend", "suspended"), ("detach", "detached")])
    def test_one_that_cannot_be_suspended_or_left_ends(
        self,
        manager: SessionManager,
        live: Live,
        action: str,
        then: str,
        fails: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise IoError("it does not")

        if fails:
            monkeypatch.setattr(manager.store, "change_session", fail)
        self.idle(manager, live, on_idle=action)
        assert fails == liveness.look_at(manager, live)
        assert (("terminated", "idle") if fails else (then, "")) == (live.state, live.reason)

    def test_a_frozen_one_is_not_asked_what_it_has_used(
        self, manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []
        monkeypatch.setattr(liveness, "cpu_ns", asked.append)
        manager.suspend(live.id)
        assert not liveness.look_at(manager, live)
        assert [] == asked
        manager.resume(live.id)
        assert not liveness.look_at(manager, live)
        assert [live.inner] == asked

    @pytest.mark.parametrize("error", [OSError(5, "x"), IoError("x")])
    def test_what_it_has_used_may_be_unknown(
        self, live: Live, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise error

        assert liveness.cpu_ns(live.inner) == live.inner.stats().cpu_ns
        monkeypatch.setattr(live.inner, "stats", fail)
        assert liveness.cpu_ns(live.inner) is None

    def test_one_that_moved_back_just_now_is_no_loss(
        self, manager: SessionManager, backend: Unconfined, live: Live
    ) -> None:
        """It was away when it was looked at, and there again once its lock was had."""
        there = live.inner
        assert not liveness.notice_loss(manager, live)
        backend.sandboxes[live.sandbox_id].terminate()
        gone = live.inner
        live.inner = there = backend.provision(SandboxSpec(id="sbx-there"))
        assert not liveness.notice_loss(manager, live)
        live.inner = gone

        class Back(Returning):
            def __enter__(self) -> None:
                super().__enter__()
                self._live.inner = there

        lock, live.lock = live.lock, Back(live)  # type: ignore[assignment]
        assert not liveness.notice_loss(manager, live)
        live.lock = lock
        assert SessionState.ACTIVE == live.state
        live.inner = gone
        assert liveness.notice_loss(manager, live)
        assert "lost" == live.reason
        there.terminate()


class TestTidying:
    def test_only_what_was_used_since_is_written_and_all_of_it_after_a_full_disk(
        self, manager: SessionManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was not written must be written at the next look: a restart reads it."""
        used, _unused, also = (new(manager) for _ in range(3))
        assert isinstance(manager.clock, FakeClock)
        manager.clock.pass_by(5.0)
        used.touch()
        also.touch()
        original, written, woken = manager.store.change_session, list[str](), list[bool]()

        def change(session_id: str, **columns: Any) -> None:
            if session_id == also.id and not written.count(also.id):
                written.append(also.id)
                raise StorageFull("no room")
            written.append(session_id)
            original(session_id, **columns)

        monkeypatch.setattr(manager.store, "change_session", change)
        monkeypatch.setattr(manager.pool, "wake", lambda: woken.append(True))
        liveness.tidy(manager)
        liveness.tidy(manager)
        assert [used.id, also.id] * 2 == written
        liveness.tidy(manager)
        assert [used.id, also.id] * 2 == written
        assert 3 == len(woken), "the pool may have room also where the disk has none"
        for live in (used, also):
            record = manager.store.session(live.id)
            assert record is not None
            assert int(live.activity.last * 1e9) == record.active_ns

    def test_what_ended_long_ago_is_forgotten_and_nothing_sooner(
        self, manager: SessionManager
    ) -> None:
        live = new(manager)
        manager.terminate(live.id)
        assert isinstance(manager.clock, FakeClock)
        for passed_s, is_there in ((86_000.0, True), (401.0, False)):
            manager.clock.pass_by(passed_s)
            liveness.tidy(manager)
            assert is_there == (manager.store.session(live.id) is not None)


def test_a_server_that_drains_is_empty_once_nothing_is_left_and_warms_nothing(
    backend: Unconfined,
) -> None:
    config = ManagerConfig(pool=PoolConfig(min_warm=2))
    with SessionManager(config, backends=[backend], background=False, clock=FakeClock()) as manager:
        assert not liveness.drain(manager, draining=False), "one that does not drain is never empty"
        manager.fill_pool()
        live = new(manager)
        assert not liveness.drain(manager, draining=True)
        assert {} == backend.prebuilt
        manager.terminate(live.id)
        assert liveness.drain(manager, draining=True)
        assert isinstance(manager.clock, FakeClock)
        manager.clock.pass_by(HOUR_S)
        manager.fill_pool()
        assert {} == backend.prebuilt
        assert not liveness.drain(manager, draining=False)
        manager.clock.pass_by(HOUR_S)
        manager.fill_pool()
        assert 2 == len(backend.prebuilt)


class Saving(Unconfined, Durable):
    """A backend whose sandboxes outlive a manager, or do not."""

    outlives = True

    def __init__(self, name: str, *, outlives: bool) -> None:
        super().__init__()
        self.name, self.outlives, self.saves = name, outlives, 0

    def save(self, *_: Any, **__: Any) -> Any:
        self.saves += 1

    def living(self) -> Any:
        return []

    def anchor(self) -> None:
        """It depends on no process."""


def test_each_backend_whose_sandboxes_live_on_saves_what_that_takes() -> None:
    ephemeral, first, second = (Saving(name, outlives=name != "a") for name in ("a", "b", "c"))
    backends = [ephemeral, first, Unconfined(), second]
    with SessionManager(CONFIG, backends=backends, background=False, clock=FakeClock()) as manager:
        liveness.save(manager)
        assert [0, 1, 1] == [each.saves for each in (ephemeral, first, second)]
    for each in backends:
        each.close()
