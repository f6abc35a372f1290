"""Whose a session is, what it must have, and what an end that fails leaves: each check alone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.errors import (
    ExecError,
    InvalidRequest,
    IoError,
    LifecycleError,
    QuotaExceeded,
    ResourceExhausted,
    SandboxNotFound,
    SnapshotNotFound,
    Unsupported,
)
from ringfence.model.acquire import AcquireOptions, AttachRequest, RequiredCapabilities
from ringfence.model.client_session import SessionState, SessionTimeouts
from ringfence.model.spec import SandboxSpec
from ringfence.sessions import capabilities, expiry
from ringfence.sessions.catalogue import ended
from ringfence.sessions.catalogue.describe import describe
from ringfence.sessions.catalogue.index import SessionIndex
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.keys import Keys, digest_of
from ringfence.sessions.live import Live
from ringfence.sessions.maker import EVICTED
from ringfence.sessions.manager import SessionManager
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox

pytestmark = pytest.mark.anyone

PATIENCE_S = 30.0
CONFIG = ManagerConfig(
    max_sandboxes=4, max_waiting=0, wait_s=0.0, max_of_client=2, pool=PoolConfig(enabled=False)
)


@pytest.fixture
def manager() -> Iterator[SessionManager]:
    backend = Unconfined()
    with SessionManager(CONFIG, backends=[backend], background=False, clock=FakeClock()) as made:
        yield made
    backend.close()


def new(manager: SessionManager, client_id: str = "ann", **options: Any) -> Live:
    lease = manager.acquire(options=AcquireOptions(**options), client_id=client_id)
    found = manager.index.find(lease.id)
    assert found
    return found


# -- whose it is --------------------------------------------------------------------------------

Verb = Callable[[SessionManager, str, str], Any]


def _verb(name: str) -> Verb:
    return lambda manager, session, client: getattr(manager, name)(session, client_id=client)


VERBS: dict[str, Verb] = {
    name: _verb(name)
    for name in (
        *(
            "release",
            "detach",
            "suspend",
            "resume",
            "touch",
            "terminate",
            "snapshot",
            "changes",
            "checkpoint",
        ),
        *("get", "sandbox", "capabilities"),
    )
}
VERBS["extend"] = lambda manager, session, client: manager.extend(session, 5.0, client)
VERBS["change"] = lambda manager, session, client: manager.change(
    session, name="x", client_id=client
)
VERBS["fork"] = lambda manager, session, client: manager.fork(session, client_id=client)
VERBS["merge"] = lambda manager, session, client: manager.merge(
    session, manager.acquire(client_id=client).id, "none", client_id=client
)
VERBS["merge into"] = lambda manager, session, client: manager.merge(
    manager.acquire(client_id=client).id, session, "none", client_id=client
)
VERBS["default"] = lambda manager, session, client: manager.set_default_sandbox(client, session)
VERBS["attach"] = lambda manager, session, client: manager.attach(
    AttachRequest(client_id=client, sandbox_id=session)
)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("by", ["id", "sandbox_id"])
def test_nobody_does_anything_with_a_session_of_another(
    manager: SessionManager, verb: str, by: str
) -> None:
    """As if it were not there; its client may."""
    live = new(manager)
    with pytest.raises(SandboxNotFound):
        VERBS[verb](manager, getattr(live, by), "bob")
    assert ("active", None) == (live.state, manager.default_sandbox("bob"))

    with suppress(Unsupported, SnapshotNotFound):  # nor does this backend save memory
        VERBS[verb](manager, getattr(live, by), "ann")


@pytest.mark.parametrize("verb", ["get", "release", "terminate", "describe"])
@pytest.mark.parametrize("by", ["id", "sandbox_id"])
def test_nobody_hears_of_the_end_of_a_session_of_another(
    manager: SessionManager, verb: str, by: str
) -> None:
    live = new(manager)
    manager.end(live, "its own reason")

    def ask(client: str | None) -> Any:
        if "describe" == verb:
            return describe(manager, getattr(live, by), client)
        return getattr(manager, verb)(getattr(live, by), client_id=client)

    with pytest.raises(SandboxNotFound):
        ask("bob")
    assert ["its own reason"] * 2 == [ask(client).reason for client in ("ann", None)]


def test_a_merge_takes_the_snapshot_of_its_own_client_alone(manager: SessionManager) -> None:
    saved = manager.snapshot(new(manager, "bob").id)
    branch, target = new(manager), new(manager)
    with pytest.raises(SnapshotNotFound):
        manager.merge(branch.id, target.id, saved.id, client_id="ann")


def test_a_list_has_a_clients_own(manager: SessionManager) -> None:
    one, two = new(manager), new(manager, "bob")

    assert [one.id] == [each.session_id for each in manager.list("ann")]
    assert [one.id, two.id] == [each.session_id for each in manager.list()]


def test_a_snapshot_is_its_clients_alone(manager: SessionManager) -> None:
    saved, hers = manager.snapshot(new(manager).id), new(manager, "bob").id
    for attempt in (
        lambda: new(manager, "bob", snapshot_id=saved.id),
        lambda: manager.delete_snapshot(saved.id, "bob"),
        lambda: manager.changes(hers, saved.id, "bob"),
    ):
        with pytest.raises(SnapshotNotFound):
            attempt()
    assert ([], [saved.id]) == tuple(
        [each.id for each in manager.snapshots(client)] for client in ("bob", "ann")
    )
    assert 2 == manager.slots.taken
    new(manager, snapshot_id=saved.id)
    manager.delete_snapshot(saved.id, "ann")
    assert [] == manager.snapshots()


def test_a_key_is_its_clients_alone_and_for_one_request(manager: SessionManager) -> None:
    first = new(manager, key="k")
    assert first is new(manager, key="k")
    assert first is not new(manager, "bob", key="k")
    with pytest.raises(InvalidRequest, match="another request"):
        new(manager, key="k", require_fresh=True)
    specs = [SandboxSpec(secrets={"TOKEN": value}) for value in ("one", "two")]
    assert 2 == len({digest_of(spec, AcquireOptions()) for spec in specs})


@pytest.mark.parametrize(("verb", "before"), [("suspend", "active"), ("resume", "suspended")])
def test_one_whose_backend_refuses_stays_in_its_state(
    manager: SessionManager, verb: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that runs would be taken for frozen, and never be idle."""
    live = new(manager)
    if "suspended" == before:
        manager.suspend(live.id)

    def fail() -> None:
        raise IoError("the kernel does not")

    with monkeypatch.context() as patch:
        patch.setattr(live.inner, verb, fail)
        with pytest.raises(IoError, match="does not"):
            getattr(manager, verb)(live.id)
    record = manager.store.session(live.id)
    assert record is not None
    assert (before, before) == (live.state, record.state)
    getattr(manager, verb)(live.id)
    assert before != live.state


# -- what is asked for --------------------------------------------------------------------------


def test_an_id_is_used_once(manager: SessionManager) -> None:
    first = new(manager, preferred_id="sbx-mine")
    assert "sbx-mine" == first.sandbox_id
    assert first is new(manager, preferred_id="sbx-mine")
    assert "sbx-mine" != new(manager, "bob", preferred_id="sbx-mine").sandbox_id
    assert "sbx-mine" != new(manager, preferred_id="sbx-mine", require_fresh=True).sandbox_id
    manager.terminate(first.id)

    assert "sbx-mine" != new(manager, preferred_id="sbx-mine").sandbox_id, "it has ended"
    with pytest.raises(InvalidRequest, match="preferred_id"):
        manager.acquire(SandboxSpec(id="sbx-other"), client_id="ann")


def test_the_id_of_an_evicted_sandbox_comes_back_to_its_owner_alone(
    manager: SessionManager,
) -> None:
    gone, other = new(manager), new(manager, "bob")
    mine, others = manager.snapshot(gone.id).id, manager.snapshot(other.id).id
    released = new(manager)
    for live, reason in ((gone, EVICTED), (released, "released"), (other, "released")):
        manager.end(live, reason)
    wanted = gone.sandbox_id

    assert wanted != new(manager, "bob", preferred_id=wanted, snapshot_id=others).sandbox_id
    record = manager.store.sandbox(wanted)
    assert record is not None
    assert ("ann", EVICTED) == (record.owner, record.reason)
    again = released.sandbox_id
    assert again != new(manager, preferred_id=again, snapshot_id=mine).sandbox_id
    assert wanted == new(manager, preferred_id=wanted, snapshot_id=mine).sandbox_id


def test_labels_that_are_required_are_there(manager: SessionManager) -> None:
    spec = SandboxSpec(labels={"a": "1"})
    options = AcquireOptions(required_labels={"a": "2"})
    with pytest.raises(InvalidRequest, match="does not match"):
        manager.acquire(spec, options, client_id="ann")
    first = new(manager, preferred_id="sbx-1", required_labels={"a": "1"})

    assert {"a": "1"} == first.spec.labels
    assert first is new(manager, preferred_id="sbx-1", required_labels={"a": "1"})
    assert first is not new(manager, preferred_id="sbx-1", required_labels={"a": "2"})


def test_the_lower_of_two_bounds_holds(manager: SessionManager) -> None:
    for most, allowed in ((1, 1), (9, 2), (None, 2)):
        client = f"client-{most}"
        made = []
        with pytest.raises((QuotaExceeded, ResourceExhausted)):  # noqa: PT012
            for _ in range(3):
                made.append(manager.acquire(client_id=client, most=most))
        assert allowed == len(made)
        for lease in made:
            manager.release(lease.id)
    assert 0 == manager.slots.taken


def test_the_bound_of_a_key_holds_for_what_it_attaches_to(manager: SessionManager) -> None:
    """Where the sandbox is missing it is made, which is no way around the bound."""
    asked = [AttachRequest(f"sbx-{number}", "ann", create_if_missing=True) for number in (1, 2)]
    first = manager.attach(asked[0], most=1)
    with pytest.raises((QuotaExceeded, ResourceExhausted)):
        manager.attach(asked[1], most=1)
    assert first.session.sandbox_id == manager.attach(asked[0], most=1).session.sandbox_id
    assert "sbx-2" == manager.attach(asked[1], most=2).session.sandbox_id, "the control"


def test_a_sandbox_that_is_being_made_counts_against_the_bound_of_its_client_alone() -> None:
    index = SessionIndex()
    with index.share("ann", 2), index.share("ann", 2):
        with pytest.raises(QuotaExceeded), index.share("ann", 2):
            pass
        with index.share("bob", 1):
            pass
    with index.share("ann", 1):
        pass


def test_the_end_of_a_session_leaves_a_key_that_another_has_by_now(manager: SessionManager) -> None:
    first, second = new(manager), new(manager)
    for live in (first, second):
        manager.index.leave(live)
        live.key = "k"
        manager.index.enter(live)
    assert manager.index.leave(first)
    assert not manager.index.leave(first)
    assert second is manager.index.under_key(second.client_id, "k")
    assert second is manager.index.find(second.sandbox_id)
    assert manager.index.leave(second)
    assert manager.index.under_key(second.client_id, "k") is None
    for live in (first, second):
        manager.index.enter(live)


@pytest.mark.parametrize("ttl_s", [0, -1, 366 * 86400.0 + 1, float("inf"), float("nan")])
def test_a_time_to_live_is_above_0_and_within_a_year(manager: SessionManager, ttl_s: float) -> None:
    live = new(manager)
    with pytest.raises(InvalidRequest, match="within a year"):
        manager.extend(live.id, ttl_s)
    manager.extend(live.id, 0.001)
    manager.extend(live.id, 366 * 86400.0)
    assert live.remaining_s(manager.clock.now())


def test_idle_time_of_the_limits_is_the_sessions(manager: SessionManager) -> None:
    found = manager.index.find(
        manager.acquire({"limits": {"idle_timeout_s": 7.0}, "ttl_s": 9.0}, client_id="ann").id
    )
    assert found
    assert 7.0 == found.timeouts.idle_s
    # The manager sees to both: were the backend to as well, a restart would not take them along.
    assert (None, None) == (found.inner.spec.limits.idle_timeout_s, found.inner.spec.ttl_s)


@pytest.mark.parametrize(
    ("limit", "given", "found"),
    [(7.0, 5.0, 5.0), (5.0, 7.0, 5.0), (7.0, None, 7.0), (None, 7.0, 7.0)],
)
def test_of_two_idle_times_the_shorter_is_meant(
    manager: SessionManager, limit: float | None, given: float | None, found: float
) -> None:
    """A server's ceiling comes as a limit, and must not make longer what was asked for."""
    options = AcquireOptions(timeouts=SessionTimeouts(idle_s=given))
    limits = {} if limit is None else {"idle_timeout_s": limit}
    lease = manager.acquire({"limits": limits}, options, client_id="ann")

    live = manager.index.find(lease.id)
    assert live
    assert found == live.timeouts.idle_s


# -- what it must have --------------------------------------------------------------------------


def test_what_is_required_is_had_or_the_sandbox_is_not(manager: SessionManager) -> None:
    found = manager.capabilities(new(manager).id)
    memory = 1 << 20
    found = replace(
        found,
        limits=found.limits.altered(memory_bytes=memory),
        readable_paths=("/data", "/work"),
        writable_paths=("/work",),
    )
    network, writes = found.has_network, found.can_write_filesystem
    for required in (
        RequiredCapabilities(network=network),
        RequiredCapabilities(write_access=writes),
        RequiredCapabilities(minimum_memory_bytes=memory),
        RequiredCapabilities(readable_paths=("/data", "/data/deep", "/work/x")),
        RequiredCapabilities(writable_paths=("/work",)),
    ):
        capabilities.check(found, required)
    for field, lacking in (
        ("network", RequiredCapabilities(network=not network)),
        ("write_access", RequiredCapabilities(write_access=not writes)),
        ("minimum_memory_bytes", RequiredCapabilities(minimum_memory_bytes=memory + 1)),
        ("readable_paths", RequiredCapabilities(readable_paths=("/database",))),
        ("readable_paths", RequiredCapabilities(readable_paths=("/data", "/"))),
        ("writable_paths", RequiredCapabilities(writable_paths=("/data",))),
    ):
        with pytest.raises(Unsupported) as refused:
            capabilities.check(found, lacking)
        assert f"required.{field}" == refused.value.field
    unlimited = replace(found, limits=found.limits.altered(memory_bytes=None))
    capabilities.check(unlimited, RequiredCapabilities(minimum_memory_bytes=memory + 1))


def test_a_frozen_one_is_not_asked_again(manager: SessionManager) -> None:
    live = new(manager)
    before = manager.capabilities(live.id)
    manager.suspend(live.id)
    assert "suspended" == live.inner.session.state
    live.inner.granted = _fail  # type: ignore[method-assign]
    now = manager.capabilities(live.id)
    assert before == replace(now, time_remaining_ms=before.time_remaining_ms)
    manager.resume(live.id)
    assert "suspended" != live.inner.session.state
    with pytest.raises(LifecycleError):
        manager.capabilities(live.id)


def _fail(*_: Any) -> Any:
    raise LifecycleError("it does not answer")


# -- ends ---------------------------------------------------------------------------------------


def _fail_as_no_backend_may(*_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("fail", "expected", "said"),
    [
        (_fail, LifecycleError, "does not answer"),
        (_fail_as_no_backend_may, ExecError, "could not be ended: OSError"),
    ],
)
def test_one_that_does_not_die_keeps_its_slot_and_is_told(
    manager: SessionManager, fail: Any, expected: type[Exception], said: str
) -> None:
    """What it holds in the kernel is there still; its session is over all the same."""
    live = new(manager)
    terminate = live.inner.terminate
    live.inner.terminate = fail  # type: ignore[method-assign]
    with pytest.raises(expected, match=said):
        manager.terminate(live.id)

    assert (1, [live.sandbox_id]) == (manager.slots.taken, [*manager.maker.undying])
    assert manager.index.find(live.id) is None
    assert "ending" == manager.store.unended_sandboxes()[0].phase
    manager.terminate(live.id)
    assert 1 == manager.slots.taken
    terminate()


def test_a_sandbox_that_is_made_while_the_manager_closes_ends_with_it() -> None:
    """Its creation began before the closing, which has ended all others when this one is there."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Unconfined):
        def provision(self, spec: SandboxSpec) -> UnconfinedSandbox:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return super().provision(spec)

    backend = Slow()
    manager = SessionManager(CONFIG, backends=[backend], background=False)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(manager.acquire, client_id="ann")
        assert entered.wait(PATIENCE_S)

        def late() -> None:
            go_on.set()
            with pytest.raises(LifecycleError, match="closed"):
                made.result(PATIENCE_S)

        manager.before_store_closes.append(late)
        manager.close()

    assert {} == backend.sandboxes
    backend.close()


def test_ended_twice_is_once(manager: SessionManager) -> None:
    live = new(manager)
    assert [True, False] == [manager.end(live, "one"), manager.end(live, "two")]
    assert (0, "one") == (manager.slots.taken, live.reason)
    record = manager.store.session(live.id)
    assert record
    assert ("terminated", "one") == (record.state, record.reason)


@pytest.mark.parametrize(("name", "value"), [("_MOST", 2), ("_MOST_BYTES", 0)])
def test_so_many_that_have_ended_are_remembered_and_no_more_bytes(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    some = [new(manager, f"client-{number}").sandbox for number in range(3)]
    remembered = ended.EndedSandboxes()
    sizes = [len(ended.EndedSandbox(each)) for each in some]
    monkeypatch.setattr(ended, name, value or sum(sizes[1:]))
    for each in some:
        remembered.keep(each)

    assert [False, True, True] == [remembered.find(each.id) is not None for each in some]
    assert sum(sizes[1:]) == remembered._bytes
    some[0].network_log = _fail  # type: ignore[method-assign]
    remembered.keep(some[0])
    assert remembered.find(some[0].id) is None


def test_one_that_ends_again_under_its_id_is_remembered_once_as_the_newest(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evicted sandbox comes back: were each of its ends counted, there would be room for none at last."""
    monkeypatch.setattr(ended, "_MOST", 2)
    first, second, third = (new(manager, f"client-{number}").sandbox for number in range(3))
    remembered = ended.EndedSandboxes()
    for each in (first, second, first):
        remembered.keep(each)
    assert sum(len(ended.EndedSandbox(each)) for each in (first, second)) == remembered._bytes
    remembered.keep(third)
    assert [True, False, True] == [
        remembered.find(each.id) is not None for each in (first, second, third)
    ]
    monkeypatch.setattr(ended, "_MOST_BYTES", len(ended.EndedSandbox(third)))
    for _ in range(5):
        remembered.keep(third)
    assert remembered.find(third.id) is not None


def test_a_turn_lasts_for_those_who_came_before_it_ended() -> None:
    """One holds, one waits; a third that comes when the first has gone waits for the second."""
    keys = Keys()
    inside: list[str] = []
    go_on = {name: threading.Event() for name in "abc"}
    there = {name: threading.Event() for name in "abc"}

    def hold(name: str) -> None:
        with keys.turn("owner", "key"):
            inside.append(name)
            assert 1 == len(inside)
            there[name].set()
            assert go_on[name].wait(PATIENCE_S)
            inside.remove(name)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(hold, "a")
        assert there["a"].wait(PATIENCE_S)
        second = pool.submit(hold, "b")
        while keys._turns["owner", "key"][1] < 2:
            pass
        go_on["a"].set()
        first.result(PATIENCE_S)
        assert there["b"].wait(PATIENCE_S)
        third = pool.submit(hold, "c")
        while keys._turns["owner", "key"][1] < 2:
            pass
        with keys.turn("owner", "another"), keys.turn("other", "key"):
            assert not there["c"].is_set()
        go_on["b"].set()
        go_on["c"].set()
        for each in (second, third):
            each.result(PATIENCE_S)
    assert {} == keys._turns


TIMEOUTS = SessionTimeouts(idle_s=10.0, detach_s=10.0, suspend_s=10.0, on_idle="suspend")


@pytest.mark.parametrize(
    ("state", "unused_s", "left_s", "verdict"),
    [
        (SessionState.ACTIVE, 10.0, None, ("suspend", "idle")),
        (SessionState.ACTIVE, 9.99, None, None),
        (SessionState.DETACHED, 10.0, None, ("terminate", "detached")),
        (SessionState.SUSPENDED, 10.0, None, ("terminate", "suspended")),
        (SessionState.TERMINATED, 99.0, None, None),
        (SessionState.ACTIVE, 0.0, 0.0, ("terminate", "ttl")),
        (SessionState.ACTIVE, 0.0, 0.01, None),
        (SessionState.ACTIVE, 99.0, -1.0, ("terminate", "ttl")),
    ],
)
def test_what_is_due(
    state: SessionState, unused_s: float, left_s: float | None, verdict: tuple[str, str] | None
) -> None:
    assert verdict == expiry.verdict(state, TIMEOUTS, unused_s, left_s)
    assert 0.0 <= expiry.next_look_s(state, TIMEOUTS, unused_s, left_s, 5.0) <= 5.0
