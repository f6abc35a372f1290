"""What a session says of itself and of its use, to the last bound: times, events, who is served, what runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import until
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.errors import (
    IoError,
    LifecycleError,
    ResourceExhausted,
    SandboxLost,
    SandboxNotFound,
    Unsupported,
)
from ringfence.model.acquire import AcquireOptions, AttachRequest, RequiredCapabilities
from ringfence.model.client_session import SUSPEND, TERMINATE, SessionState, SessionTimeouts
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.spec import SandboxSpec
from ringfence.sessions import acquiring, events, expiry
from ringfence.sessions.admission import Slots
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.events import Events
from ringfence.sessions.expiry import Activity
from ringfence.sessions.live import Live
from ringfence.sessions.maker import EVICTED
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.usage import WatchedSandbox
from ringfence.store import records
from ringfence.store.records import SnapshotRecord
from ringfence.testing.unconfined.backend import UnconfinedPrebuilt

pytestmark = pytest.mark.anyone

PATIENCE_S = 30.0
CONFIG = ManagerConfig(
    pool=PoolConfig(enabled=False), timeouts=SessionTimeouts(idle_s=100.0, suspend_s=200.0)
)


@pytest.fixture
def backend() -> Iterator[Unconfined]:
    made = Unconfined()
    yield made
    made.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manager(backend: Unconfined, clock: FakeClock) -> Iterator[SessionManager]:
    with SessionManager(CONFIG, backends=[backend], background=False, clock=clock) as made:
        yield made


@pytest.fixture
def live(manager: SessionManager) -> Live:
    return find(manager, manager.acquire(client_id="ann").id)


def find(manager: SessionManager, session: str) -> Live:
    found = manager.index.find(session)
    assert found is not None
    return found


class TestSlots:
    @pytest.mark.parametrize(
        ("act", "error", "refused"),
        [
            (lambda slots: slots.close(), LifecycleError, 0),
            (lambda slots: slots.drain(draining=True), ResourceExhausted, 0),
            (lambda _slots: None, ResourceExhausted, 1),
        ],
        ids=["closed", "drains", "in vain"],
    )
    def test_those_who_wait_hear_of_it(
        self, act: Callable[[Slots], object], error: type[Exception], refused: int
    ) -> None:
        slots = Slots(1, 2, 0.05 if refused else 600.0)
        slots.take()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(slots.take)
            assert refused or until(lambda: 1 == slots.waiting)
            act(slots)
            with pytest.raises(error):
                waiting.result(PATIENCE_S)
        assert (1, 0, refused) == (slots.taken, slots.waiting, slots.refused)

    def test_one_that_drains_gives_none_although_some_are_free(self) -> None:
        slots = Slots(2, 2, 600.0)
        assert not slots.drain(draining=False), "it does not drain"
        assert slots.drain(draining=True)
        assert not slots.try_take()
        with pytest.raises(ResourceExhausted, match="drains"):
            slots.take()
        assert not slots.drain(draining=False)
        assert slots.try_take()
        slots.take()
        assert not slots.drain(draining=True)

    def test_a_free_slot_is_not_for_one_who_comes_after_those_that_wait(self) -> None:
        slots = Slots(1, 1, 600.0)
        slots.take()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(slots.take)
            assert until(lambda: 1 == slots.waiting)
            with slots._changed:  # so that the one who waits cannot look yet
                slots.give_back()
                with pytest.raises(ResourceExhausted, match="wait for one"):
                    slots.take()
            waiting.result(PATIENCE_S)
        assert (1, 1) == (slots.taken, slots.refused)

    def test_what_was_there_before_counts_even_beyond_the_most(self) -> None:
        slots = Slots(1, 0, 0.0)
        slots.take_again()
        slots.take_again()
        slots.give_back()
        assert not slots.try_take()
        slots.give_back()
        assert slots.try_take()


class TestEvents:
    def test_those_after_a_number_and_how_many_were_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "_KEPT", 3)
        log = Events()
        assert ([], 0) == log.since(0)
        for number in range(1, 6):
            log.add(f"e{number}", None)
            assert number == log.last
        for seq, kinds, lost in (
            (0, ["e3", "e4", "e5"], 2),
            (1, ["e3", "e4", "e5"], 1),
            (2, ["e3", "e4", "e5"], 0),
            (3, ["e4", "e5"], 0),
            (4, ["e5"], 0),
            (5, [], 0),
            (9, [], 0),
        ):
            found, missing = log.since(seq)
            assert (kinds, lost) == ([each.kind for each in found], missing), seq

    def test_one_who_stops_twice_stops_nobody_else(self) -> None:
        log, heard = Events(), list[str]()

        def hear(event: Any) -> None:
            heard.append(event.kind)

        first, second = log.listen(hear), log.listen(hear)
        log.add("both", None)
        first()
        log.add("one", None, detail="x")
        second()
        second()
        first()
        log.add("none", None)
        assert ["both", "both", "one"] == heard

    def test_each_says_whose_it_is(self, manager: SessionManager, live: Live) -> None:
        manager.release(live.id)
        created, ended = manager.events.since(0)[0]
        for event, kind, reason in ((created, "created", ""), (ended, "ended", "released")):
            ids = (event.sandbox_id, event.session_id, event.client_id)
            assert (live.sandbox_id, live.id, "ann") == ids
            assert (kind, reason) == (event.kind, event.reason)


class TestTimes:
    def test_what_was_used_later_is_not_used_earlier(self) -> None:
        activity = Activity(10.0)
        activity.touch(20.0)
        activity.touch(15.0)
        assert 20.0 == activity.last
        activity.look(18.0, busy=True, cpu_ns=None)
        assert 20.0 == activity.last

    @pytest.mark.parametrize(
        ("on_expiry", "state", "is_counted"),
        [
            (SUSPEND, SessionState.SUSPENDED, False),
            (SUSPEND, SessionState.ACTIVE, True),
            (TERMINATE, SessionState.SUSPENDED, True),
            (TERMINATE, SessionState.ACTIVE, True),
        ],
    )
    def test_the_time_to_live_stands_still_for_one_that_was_suspended_by_its_end(
        self, on_expiry: str, state: SessionState, is_counted: bool
    ) -> None:
        timeouts = SessionTimeouts(idle_s=None, suspend_s=50.0, on_expiry=on_expiry)
        verdict = expiry.verdict(state, timeouts, 0.0, -1.0)
        assert ((on_expiry, "ttl") if is_counted else None) == verdict
        look = expiry.next_look_s(state, timeouts, 0.0, 5.0, 1000.0)
        still = 50.0 if state == SessionState.SUSPENDED else 1000.0
        assert (5.0 if is_counted else still) == look

    def test_one_that_is_frozen_is_looked_at_once_its_time_is_over(self) -> None:
        """It uses nothing: to look at it four times as often would be in vain."""
        timeouts = SessionTimeouts(idle_s=40.0, detach_s=40.0, suspend_s=40.0)
        for state, expected in (("suspended", 40.0), ("active", 10.0), ("detached", 10.0)):
            look = expiry.next_look_s(SessionState(state), timeouts, 0.0, None, 1000.0)
            assert expected == look

    def test_a_session_that_is_used_has_all_of_its_time(
        self, manager: SessionManager, live: Live, clock: FakeClock
    ) -> None:
        clock.pass_by(30.0)
        assert 70.0 == live.view().time_remaining_s
        with live.use.call():
            clock.pass_by(30.0)
            assert 100.0 == live.view().time_remaining_s
        clock.pass_by(1.0)
        assert 99.0 == live.view().time_remaining_s
        manager.extend(live.id, 20.0)
        assert 20.0 == live.view().time_remaining_s == live.view().expires_in_s
        clock.pass_by(25.0)
        assert 0.0 == live.view().time_remaining_s == live.view().expires_in_s
        manager.terminate(live.id)
        assert live.view().time_remaining_s is None

    def test_the_clock_on_the_wall_makes_no_session_older_than_its_last_use(
        self, live: Live, clock: FakeClock
    ) -> None:
        clock.on_the_wall -= 3600.0
        view = live.view()
        assert view.created_at == view.last_active_at
        clock.on_the_wall += 3600.0
        clock.pass_by(5.0)
        live.touch()
        assert 5.0 == pytest.approx(live.view().last_active_at - view.created_at)

    def test_the_manager_alone_ends_a_leased_sandbox_in_time(self, manager: SessionManager) -> None:
        lease = manager.acquire(SandboxSpec(ttl_s=0.001), client_id="ann")
        assert 0.001 == lease.sandbox.spec.ttl_s
        assert not threading.Event().wait(0.02)
        assert lease.sandbox.exec(["true"]).ok


class TestUse:
    def test_an_exec_counts_until_it_has_ended_or_is_closed(self, live: Live) -> None:
        process, other = (live.sandbox.start(["sleep", "600"]) for _ in range(2))
        assert 2 == live.use.running
        assert live.use.busy
        assert not live.use.is_attended
        process.kill()
        process.wait(PATIENCE_S)
        assert 1 == live.use.running
        assert len(live.use._execs) <= 1, "what has ended is not looked at again"
        other.kill()
        other.wait(PATIENCE_S)
        assert 0 == live.use.running
        assert not live.use.busy

    @pytest.mark.parametrize("how", ["open_read", "open_write"])
    def test_an_open_file_counts_until_it_is_closed(self, live: Live, how: str) -> None:
        live.sandbox.files.write("note", b"text")
        with getattr(live.sandbox.files, how)("note"):
            assert live.use.is_attended
        assert not live.use.is_attended

    @pytest.mark.parametrize(
        "call",
        [
            lambda live: live.watched.snapshot({}),
            lambda live: live.watched.files.list("."),
            lambda live: live.watched.files.stat("note"),
        ],
        ids=["snapshot", "list", "stat"],
    )
    def test_a_call_counts_while_it_is_served_and_its_end_is_use(
        self, live: Live, clock: FakeClock, call: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live.sandbox.files.write("note", b"text")
        seen: list[tuple[bool, float]] = []
        inner: Any = live.inner

        class Slow:
            """Takes ten seconds for whatever it is asked."""

            def __init__(self, what: Any) -> None:
                self._what = what

            def __getattr__(self, name: str) -> Any:
                found = getattr(self._what, name)
                if not callable(found):
                    return found

                def take(*args: Any, **options: Any) -> Any:
                    clock.pass_by(10.0)
                    seen.append((live.use.is_attended, live.activity.unused_s(clock.now())))
                    return found(*args, **options)

                return take

        live.watched.inner = Slow(inner)
        monkeypatch.setattr(live.watched.files, "_inner", Slow(inner.files))
        call(live)
        assert (True, 10.0) == seen[0]
        assert not live.use.is_attended
        assert 0.0 == live.activity.unused_s(clock.now())

    @pytest.mark.parametrize("verb", ["snapshot", "compare", "attach"])
    def test_whatever_a_backend_does_for_a_caller_is_use(self, live: Live, verb: str) -> None:
        seen: list[tuple[object, bool]] = []

        def take(given: object) -> str:
            seen.append((given, live.use.is_attended))
            return "done"

        inner: Any = SimpleNamespace(files=None, **{verb: take})
        assert "done" == getattr(WatchedSandbox(inner, live.use, {}), verb)("given")
        assert [("given", True)] == seen
        assert not live.use.is_attended

    def test_who_closes_an_exec_has_just_used_it(self, live: Live, clock: FakeClock) -> None:
        run = live.watched.start(ExecRequest(("true",)))
        clock.pass_by(10.0)
        run.close()
        assert 0.0 == live.activity.unused_s(clock.now())

    def test_a_sandbox_that_has_ended_answers_for_itself(
        self, manager: SessionManager, live: Live
    ) -> None:
        """Its manager may have forgotten it: to end it once more is no error, to freeze it is one."""
        sandbox = live.sandbox
        sandbox.suspend()
        assert SessionState.SUSPENDED == live.state
        sandbox.resume()
        manager.terminate(live.id)
        manager.store.forget_session(live.id, live.sandbox_id)
        sandbox.terminate()
        for verb in (sandbox.suspend, sandbox.resume):
            with pytest.raises(LifecycleError):
                verb()


class TestTakenOrMade:
    def test_one_who_was_quicker_has_the_id_and_nothing_is_left_of_the_other(
        self, manager: SessionManager, backend: Unconfined, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two attach to an id that is free: it is taken between the look and the making."""
        original, looks = acquiring._is_free, list[str]()

        def is_free(among: Any, sandbox_id: str) -> bool:
            looks.append(sandbox_id)
            if 1 == len(looks):
                manager.acquire(options=AcquireOptions(preferred_id="mine"), client_id="bob")
                return True
            return original(among, sandbox_id)

        monkeypatch.setattr(acquiring, "_is_free", is_free)
        with pytest.raises(SandboxNotFound):
            manager.attach(AttachRequest("mine", "ann", create_if_missing=True))
        assert ["mine"] == [*backend.sandboxes]
        assert 1 == manager.slots.taken
        assert "bob" == manager.get("mine").client_id

    def test_two_who_prefer_one_id_at_once_get_one_each_after_the_other(
        self, manager: SessionManager
    ) -> None:
        asked = AcquireOptions(preferred_id="mine")
        with ThreadPoolExecutor(1) as pool, manager.keys.turn("", "mine"):
            task = pool.submit(manager.acquire, options=asked, client_id="ann")
            assert until(lambda: task.done() or 2 == manager.keys._turns["", "mine"][1])
            assert not task.done()
        assert "mine" == task.result(PATIENCE_S).session.sandbox_id

    @pytest.mark.parametrize(
        ("changes", "is_taken_again"),
        [
            ({}, True),
            ({"preferred_backend": "unconfined"}, True),
            ({"require_fresh": True}, False),
            ({"required_labels": {"a": "1"}}, True),
        ],
    )
    def test_ones_own_sandbox_of_the_preferred_id_is_taken_again_where_it_will_do(
        self, manager: SessionManager, changes: dict[str, Any], is_taken_again: bool
    ) -> None:
        options = AcquireOptions(preferred_id="mine", required_labels={"a": "1"})
        first = manager.acquire(options=options, client_id="ann")
        manager.suspend(first.id)
        again = manager.acquire(
            options=AcquireOptions(preferred_id="mine", **changes), client_id="ann"
        )
        assert is_taken_again == (again.id == first.id) == (not again.newly_created)
        assert "active" == again.session.state

    def test_one_that_cannot_be_made_active_is_not_taken_again(
        self, manager: SessionManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = AcquireOptions(preferred_id="mine")
        first = find(manager, manager.acquire(options=options, client_id="ann").id)
        manager.suspend(first.id)

        def fail() -> None:
            raise LifecycleError("it has just ended")

        monkeypatch.setattr(first.inner, "resume", fail)
        again = manager.acquire(options=options, client_id="ann")
        assert again.newly_created
        assert "mine" != again.session.sandbox_id

    def test_a_preferred_session_id_is_no_sandbox_id(self, manager: SessionManager) -> None:
        first = manager.acquire(client_id="ann")
        again = manager.acquire(options=AcquireOptions(preferred_id=first.id), client_id="ann")
        assert again.newly_created
        assert first.id == again.session.sandbox_id, "it is free for a sandbox"

    def test_what_is_written_down_of_one_that_was_claimed_is_its_clients(
        self, backend: Unconfined, clock: FakeClock
    ) -> None:
        config = ManagerConfig(pool=PoolConfig(min_warm=1, max_warm=1))
        with SessionManager(config, backends=[backend], background=False, clock=clock) as manager:
            for key in ("", "k"):
                manager.fill_pool()
                clock.boot = f"boot {key}"
                spec = SandboxSpec(labels={"of": "ann"}, ttl_s=50.0)
                lease = manager.acquire(spec, AcquireOptions(key=key), client_id="ann")
                record = manager.store.sandbox(lease.session.sandbox_id)
                assert record is not None
                assert ("live", "ann", clock.boot) == (record.phase, record.owner, record.boot)
                assert int((clock.now() + 50.0) * 1e9) == record.expires_ns
                assert '"of":"ann"' in record.spec
                clock.pass_by(100.0)
            assert 2 == manager.stats().pool_hits

    def test_a_snapshot_is_restored_by_the_backend_that_has_it_for_its_owner(
        self, backend: Unconfined, clock: FakeClock
    ) -> None:
        class Other(Unconfined):
            name = "other"

        other = Other()
        backends = [backend, other]
        with SessionManager(CONFIG, backends=backends, background=False, clock=clock) as manager:
            options = AcquireOptions(preferred_backend="other")
            first = manager.acquire(options=options, client_id="ann")
            snapshot = manager.snapshot(first.id)
            for preferred in ("", "unconfined"):
                options = AcquireOptions(snapshot_id=snapshot.id, preferred_backend=preferred)
                again = manager.acquire(options=options, client_id="ann")
                assert "other" == again.session.backend
            record = manager.store.snapshot(snapshot.id)
            assert isinstance(record, SnapshotRecord)
            assert ("ann", "other") == (record.owner, record.backend)

            # Nor is a sandbox of another backend, or one without those files, taken again.
            mine = AcquireOptions(preferred_id="mine")
            kept = manager.acquire(options=mine, client_id="ann")
            for changes in ({"preferred_backend": "other"}, {"snapshot_id": snapshot.id}):
                options = AcquireOptions(preferred_id="mine", **changes)  # type: ignore[arg-type]
                again = manager.acquire(options=options, client_id="ann")
                assert again.newly_created
                assert "other" == again.session.backend
            assert kept.id == manager.acquire(options=mine, client_id="ann").id
        other.close()

    def test_one_that_could_not_be_restored_comes_back_under_its_id(
        self, manager: SessionManager, backend: Unconfined, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = manager.acquire(options=AcquireOptions(use_pool=False), client_id="ann")
        saved, wanted = manager.snapshot(first.id).id, first.session.sandbox_id
        manager.end(find(manager, first.id), EVICTED)
        options = AcquireOptions(preferred_id=wanted, snapshot_id=saved)

        def fail(*_: object, **__: object) -> None:
            raise IoError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "restore", fail)
            for _ in range(2):
                with pytest.raises(IoError):
                    manager.acquire(options=options, client_id="ann")
        assert wanted == manager.acquire(options=options, client_id="ann").session.sandbox_id

    def test_what_was_lost_at_the_claim_is_no_part_of_what_is_made_then(
        self, backend: Unconfined, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next warm one is taken, and without one a sandbox is made, which came from no pool."""
        config = ManagerConfig(pool=PoolConfig(min_warm=2, max_warm=2))
        claim, left = UnconfinedPrebuilt.claim, 1

        def dies(warm: Any, spec: SandboxSpec, meanwhile: Callable[[], None]) -> Any:
            nonlocal left
            meanwhile()
            if left:
                left -= 1
                raise SandboxLost("it was killed")
            return claim(warm, spec)

        monkeypatch.setattr(UnconfinedPrebuilt, "claim", dies)
        with SessionManager(config, backends=[backend], background=False, clock=clock) as manager:
            manager.fill_pool()
            second = [*backend.prebuilt][1]
            lease = manager.acquire(client_id="ann")
            assert second == lease.session.sandbox_id
            assert "default" == find(manager, lease.id).profile
            clock.pass_by(100.0)
            manager.fill_pool()
            left = 2
            made = find(manager, manager.acquire(client_id="ann").id)
            assert "" == made.profile
            assert (1, 1) == (manager.counters["pool_hits"], manager.counters["pool_misses"])
            assert (2, 1) == (manager.counters.creation.count, manager.counters.claim.count)
            assert 2 == manager.slots.taken == len(manager.store.sessions(owner="ann"))

    def test_what_is_required_is_asked_of_a_warm_one_too(
        self, backend: Unconfined, clock: FakeClock
    ) -> None:
        config = ManagerConfig(pool=PoolConfig(min_warm=1, max_warm=1))
        with SessionManager(config, backends=[backend], background=False, clock=clock) as manager:
            for paths, error in ((("/nowhere",), Unsupported), ((), None)):
                manager.fill_pool()
                required = RequiredCapabilities(write_access=True, writable_paths=paths)
                with nullcontext() if error is None else pytest.raises(error):
                    manager.acquire(options=AcquireOptions(required=required), client_id="ann")
                clock.pass_by(100.0)
            assert 2 == manager.counters["pool_hits"]
            assert 1 == manager.slots.taken == len(manager.list())

    def test_one_that_is_made_or_prolonged_is_looked_at_when_its_time_is_over(
        self, manager: SessionManager, clock: FakeClock
    ) -> None:
        """By itself, and not at the next interval."""
        live = find(manager, manager.acquire(SandboxSpec(ttl_s=7.0), client_id="ann").id)
        assert clock.now() + 7.0 == live.next_look
        manager.extend(live.id, 3.0)
        assert clock.now() + 3.0 == live.next_look

    def test_one_that_is_in_another_state_is_looked_at_by_the_time_of_that(
        self, manager: SessionManager, clock: FakeClock
    ) -> None:
        timeouts = SessionTimeouts(idle_s=40.0, detach_s=20.0, suspend_s=8.0)
        options = AcquireOptions(timeouts=timeouts)
        live = find(manager, manager.acquire(options=options, client_id="ann").id)
        for verb, after_s in (
            (manager.detach, 5.0),
            (manager.suspend, 8.0),
            (manager.resume, 10.0),
        ):
            verb(live.id)
            assert clock.now() + after_s == live.next_look

    def test_who_releases_one_that_was_made_may_have_another_of_its_kind_kept_warm(
        self, backend: Unconfined, clock: FakeClock
    ) -> None:
        config = ManagerConfig(pool=PoolConfig(min_warm=1, max_warm=2))
        with SessionManager(config, backends=[backend], background=False, clock=clock) as manager:
            manager.fill_pool()
            options = AcquireOptions(use_pool=False)
            for keep_alive, size in ((False, 1), (True, 2), (True, 2)):
                lease = manager.acquire(options=options, client_id="ann")
                manager.release(lease.id, keep_alive=keep_alive)
                manager.release(lease.id, keep_alive=True)  # the second time is none
                manager.fill_pool()
                assert size == manager.pool.size

    def test_the_end_of_one_makes_room_in_the_pool_at_once(
        self, backend: Unconfined, clock: FakeClock
    ) -> None:
        config = ManagerConfig(max_sandboxes=1, pool=PoolConfig(min_warm=1, max_warm=1))
        with SessionManager(config, backends=[backend], background=False, clock=clock) as manager:
            lease = manager.acquire(options=AcquireOptions(use_pool=False), client_id="ann")
            manager.fill_pool()
            assert 0 == manager.pool.size
            lease.release()
            manager.fill_pool()
            assert 1 == manager.pool.size
            [warm] = backend.prebuilt
            record = manager.store.sandbox(warm)
            assert record is not None
            assert (records.WARM, "") == (record.phase, record.owner)
