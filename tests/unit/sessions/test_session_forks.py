"""Forks of a session: one request under a key, and nothing left of one that fails half-way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sessions.timing import FakeClock
from tests.unit.sessions.whole import Whole

from ringfence.errors import (
    InvalidRequest,
    IoError,
    LifecycleError,
    QuotaExceeded,
    SandboxLost,
    SnapshotNotFound,
    Unsupported,
)
from ringfence.model.calls import parse_network
from ringfence.model.client_session import SessionTimeouts
from ringfence.model.limits import Limits
from ringfence.model.spec import LINEAGE, SandboxSpec
from ringfence.sessions import forks, liveness, snapshots
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.forks import Carry
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

CONFIG = ManagerConfig(pool=PoolConfig(enabled=False), max_of_client=6)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Whole]:
    made = Whole(str(tmp_path / "state" / "snapshots"))
    yield made
    made.close()


@pytest.fixture
def manager(backend: Whole, tmp_path: Path) -> Iterator[SessionManager]:
    options: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "background": False}
    with SessionManager(CONFIG, backends=[backend], clock=FakeClock(), **options) as made:
        yield made


def new(manager: SessionManager, client_id: str = "ann", **spec: Any) -> Live:
    found = manager.index.find(manager.acquire(SandboxSpec(**spec), client_id=client_id).id)
    assert found is not None
    return found


def left(manager: SessionManager, backend: Whole) -> tuple[object, ...]:
    """What forks that fail must not leave."""
    return (
        sorted(backend.sandboxes),
        sorted(backend.saved),
        [each.id for each in manager.store.snapshots()],
        manager.slots.taken,
        sorted(each.session_id for each in manager.list()),
        len(manager.keys._turns),
    )


class Noted(Carry):
    """Carry that records what is asked of it, and fails where it is told to."""

    def __init__(self, **fails: Exception) -> None:
        self.done: list[str] = []
        self.fails = fails

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise self.fails.pop(what)

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        self._do("stop")

    def move(self, before: Any, inner: Any) -> None:
        self._do("move")

    def release(self) -> None:
        self._do("release")

    def load(self) -> None:
        self._do("load")

    def put_into(self, fork: Live) -> None:
        self._do("put_into")

    def leave_out(self, reason: str) -> None:
        self._do(f"left out: {reason}")

    def remember(self, fork: Live) -> None:
        self._do(f"remember {fork.id}")

    def close(self) -> None:
        self._do("close")


def test_a_key_is_for_one_request_in_every_part(manager: SessionManager) -> None:
    """The sandbox, the number, the processes and each change."""
    live, other = new(manager), new(manager)
    asked: dict[str, Any] = {"n": 1, "processes": "none", "changes": {"labels": {"a": "1"}}}
    (first,) = manager.fork(live.id, key="k", **asked)
    carry = Noted()
    (again,) = manager.fork(live.id, key="k", carry=carry, **asked)
    assert (first.id, False) == (again.id, again.newly_created)
    assert [f"remember {first.id}"] == carry.done
    assert (again.id,) == tuple(e.id for e in manager.fork(live.sandbox_id, key="k", **asked))

    for session, changed in (
        (other, {}),
        (live, {"n": 2}),
        (live, {"processes": "auto"}),
        (live, {"changes": {}}),
        (live, {"changes": {"labels": {"a": "2"}}}),
        (live, {"changes": {"labels": {"a": "1"}, "limits": Limits(pids=5)}}),
    ):
        with pytest.raises(InvalidRequest, match="another request") as caught:
            manager.fork(session.id, key="k", **{**asked, **changed})
        assert "key" == caught.value.field
    (apart,) = manager.fork(live.id, key="another", **asked)
    assert apart.id != first.id
    theirs = new(manager, "bob")
    (of_bob,) = manager.fork(theirs.id, key="k", **asked)
    assert of_bob.id not in (first.id, apart.id)


def test_all_forks_of_a_key_are_given_again_or_none(manager: SessionManager) -> None:
    live = new(manager)
    first = manager.fork(live.id, 3, key="k")
    assert [each.id for each in first] == [each.id for each in manager.fork(live.id, 3, key="k")]
    assert 3 == len({each.id for each in first})
    first[1].release()
    with pytest.raises(LifecycleError, match="have ended"):
        manager.fork(live.id, 3, key="k")


def test_half_of_what_was_asked_for_is_made_anew(manager: SessionManager) -> None:
    """The last one has the key: without it a kill came in the middle, and the others end."""
    live = new(manager)
    first = manager.fork(live.id, 2, key="k")
    manager.store._database.write("DELETE FROM sessions WHERE id = ?", (first[1].id,))
    manager.index.leave(first[1]._live)
    again = manager.fork(live.id, 2, key="k")
    assert "asked again" == first[0].session.reason
    assert not {each.id for each in first} & {each.id for each in again}
    first[1]._live.inner.terminate()


def test_a_fork_has_the_network_that_holds_now_and_its_lineage(
    manager: SessionManager, backend: Whole
) -> None:
    live = new(manager, labels={"a": "1"})
    live.timeouts = SessionTimeouts(idle_s=77.0)
    judged: list[SandboxSpec] = []

    def judge(spec: SandboxSpec) -> SandboxSpec:
        judged.append(spec)
        return spec.altered(labels={**spec.labels, "judged": "yes"})

    now = live.inner.spec.altered(network=parse_network(["example.com"]))
    live.inner.spec = now  # type: ignore[misc]
    (lease,) = manager.fork(live.id, judge=judge)
    found = lease._live.spec
    assert ("example.com",) == tuple(found.network.allowed_hosts)
    assert {"a": "1", "judged": "yes", LINEAGE: live.sandbox_id} == found.labels
    assert 1 == len(judged)
    assert live.client_id == lease._live.client_id
    assert live.timeouts == lease._live.timeouts != manager.config.timeouts
    (inner,) = manager.fork(lease.id)
    assert f"{live.sandbox_id} {lease._live.sandbox_id}" == inner._live.spec.labels[LINEAGE]
    assert ([], []) == ([*backend.saved], manager.store.snapshots())


@pytest.mark.parametrize(
    ("processes", "fails", "error"),
    [
        ("auto", {"stop": IoError("x")}, IoError),
        ("auto", {"release": IoError("x")}, IoError),
        ("auto", {"load": IoError("x")}, IoError),
        ("auto", {"put_into": IoError("x")}, IoError),
        ("required", {"put_into": Unsupported("x")}, Unsupported),
        ("none", {"put_into": Unsupported("x")}, Unsupported),
    ],
)
def test_what_fails_leaves_no_fork_and_no_snapshot(
    manager: SessionManager,
    backend: Whole,
    processes: str,
    fails: dict[str, Exception],
    error: type[Exception],
) -> None:
    live = new(manager)
    before = left(manager, backend)
    carry = Noted(**fails)
    with pytest.raises(error):
        manager.fork(live.id, 2, processes=processes, carry=carry, key="k")
    assert "close" == carry.done[-1]
    assert before == left(manager, backend)
    assert 2 == len(manager.fork(live.id, 2, processes=processes, key="k", carry=Noted()))


def test_a_second_fork_beyond_the_bound_takes_the_first_along(
    manager: SessionManager, backend: Whole
) -> None:
    live = new(manager)
    before = left(manager, backend)
    with pytest.raises(QuotaExceeded):
        manager.fork(live.id, 2, most=2)
    with pytest.raises(QuotaExceeded):
        manager.fork(live.id, 6)
    assert before == left(manager, backend)
    assert 5 == len(manager.fork(live.id, 5))


def test_a_fork_that_gets_files_only_is_a_fresh_one(
    manager: SessionManager, backend: Whole
) -> None:
    live = new(manager)
    carry = Noted(put_into=Unsupported("the kernel refused"))
    leases = manager.fork(live.id, 2, carry=carry)
    wanted = ["stop", "release", "load", "put_into", "left out: the kernel refused", "put_into"]
    assert [*wanted, "close"] == carry.done
    assert 2 == len(leases) == len({each.id for each in leases})
    assert 3 == manager.slots.taken == len(manager.list())


def test_a_fork_that_ends_while_it_is_made_is_told(manager: SessionManager, backend: Whole) -> None:
    live = new(manager)
    before = left(manager, backend)

    class Ending(Noted):
        def load(self) -> None:
            original = manager.index.find

            def once(*_args: Any) -> None:
                manager.index.find = original  # type: ignore[method-assign]

            manager.index.find = once  # type: ignore[method-assign,assignment]

    with pytest.raises(LifecycleError, match="ended while it was made"):
        manager.fork(live.id, carry=Ending())
    assert before == left(manager, backend)


class WholeCarry(Noted):
    is_whole = True

    def __init__(self, live: Live, **fails: Exception) -> None:
        super().__init__(**fails)
        self._of = live

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        super().stop(processes, live, spec)
        assert live.moving is not None
        live.inner.hold(())  # type: ignore[attr-defined]


def test_one_that_is_saved_whole_goes_on_in_its_place(
    manager: SessionManager, backend: Whole
) -> None:
    live = new(manager, ttl_s=500.0)
    before, inner = left(manager, backend), live.inner
    carry = WholeCarry(live)
    (lease,) = manager.fork(live.id, carry=carry)
    assert ["stop", "move", "release", "load", "put_into", "close"] == carry.done
    assert inner is not live.inner
    assert live.inner is backend.sandboxes[live.sandbox_id]
    assert "active" == live.state
    assert not liveness.notice_loss(manager, live)
    assert 0 == live.sandbox.exec(["true"]).exit_code
    lease.release()
    assert before == left(manager, backend)


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_is_saved_whole_and_not_restored_ends_after_two_attempts(
    manager: SessionManager, backend: Whole, times: int
) -> None:
    live = new(manager)
    backend.fails["restore"] = times
    carry = WholeCarry(live)
    if 1 == times:
        (lease,) = manager.fork(live.id, carry=carry)
        assert "active" == live.state == lease.session.state
        return
    with pytest.raises(IoError):
        manager.fork(live.id, carry=carry)
    assert "close" == carry.done[-1]
    assert 2 == backend.done.count("restore")
    assert ("terminated", "fork") == (str(live.state), live.reason)
    assert ([], [], [], 0, [], 0) == left(manager, backend)


def test_one_that_is_whole_takes_all_along_or_fails(
    manager: SessionManager, backend: Whole
) -> None:
    live = new(manager)
    before = left(manager, backend)
    with pytest.raises(Unsupported):
        manager.fork(live.id, carry=WholeCarry(live, put_into=Unsupported("x")))
    assert before == left(manager, backend)


def test_one_that_has_ended_is_not_saved_whole(manager: SessionManager, backend: Whole) -> None:
    live = new(manager)
    manager.terminate(live.id)
    live.inner = backend.provision(SandboxSpec())
    carry = WholeCarry(live)
    with pytest.raises(LifecycleError, match="has ended"):
        forks.save(manager, live, live.spec, "auto", carry)
    assert [] == [*backend.saved]
    assert ["stop", "close"] == carry.done
    live.inner.terminate()


def test_a_temporary_snapshot_is_gone_after_a_restart(
    manager: SessionManager, backend: Whole
) -> None:
    """A kill may have come between it and its forks; others get the owner that they lack."""
    live = new(manager)
    backend.save(live.sandbox_id, live.spec, live.inner.root, forks.TEMPORARY)  # type: ignore[attr-defined]
    kept = backend.save(live.sandbox_id, live.spec, live.inner.root, {})  # type: ignore[attr-defined]
    lost = backend.save("sbx-gone", live.spec, live.inner.root, {})  # type: ignore[attr-defined]
    snapshots.settle(manager)
    assert {kept.id, lost.id} == backend.saved.keys()
    assert [(kept.id, "ann")] == [(each.id, each.owner) for each in manager.store.snapshots()]
    snapshots.settle(manager)
    assert [kept.id] == [each.id for each in manager.snapshots("ann")]
    assert [kept.id, lost.id] == [each.id for each in manager.snapshots()]
    assert [] == manager.snapshots("bob")


def test_a_merge_is_refused_before_anything_is_read(manager: SessionManager) -> None:
    live, other = new(manager), new(manager)
    base = manager.snapshot(live.id)
    with pytest.raises(InvalidRequest, match="into itself") as caught:
        manager.merge(live.id, live.sandbox_id, base.id)
    assert "into" == caught.value.field
    with pytest.raises(InvalidRequest, match="ours or theirs"):
        manager.merge(live.id, other.id, base.id, prefer="mine")
    for client, error in (("bob", SnapshotNotFound), ("ann", InvalidRequest)):
        live.client_id = other.client_id = client
        live.backend = "another" if "ann" == client else live.backend
        with pytest.raises(error):
            manager.merge(live.id, other.id, base.id, client_id=client)
        with pytest.raises(error):
            manager.changes(live.id, base.id, client)
    live.client_id, live.backend = "ann", "unconfined"


@pytest.mark.parametrize("fails", ["add_snapshot", "push"])
def test_a_snapshot_whose_owner_cannot_be_written_is_not_kept(
    manager: SessionManager, backend: Whole, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    live = new(manager)
    before = left(manager, backend)

    class Away:
        def push(self, *_args: object) -> None:
            raise IoError("the store is away")

    def full(*_args: object) -> None:
        raise IoError("the disk is full")

    with monkeypatch.context() as patch:
        if "push" == fails:
            patch.setattr(manager, "shared", Away())
        else:
            patch.setattr(manager.store, fails, full)
        with pytest.raises(IoError):
            manager.snapshot(live.id)
        if "push" == fails:  # what a fork is made from is never sent
            saved = forks.save(manager, live, live.spec, "none", Carry())
            manager.shared = None
            snapshots.delete(manager, saved.id, None)
    assert before == left(manager, backend)


def test_a_checkpoint_ends_its_session_whatever_becomes_of_it(
    manager: SessionManager, backend: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = new(manager)
    saved = manager.checkpoint(live.id)
    assert ("terminated", "checkpoint") == (str(live.state), live.reason)
    assert saved.has_memory
    assert "ann" == snapshots.need(manager, saved.id, "ann").owner
    assert 0 == manager.slots.taken
    manager.delete_snapshot(saved.id, "ann")

    other = new(manager)
    monkeypatch.setattr(manager.store, "add_snapshot", _lose)
    with pytest.raises(SandboxLost):
        manager.checkpoint(other.id)
    assert ([], [], [], 0, [], 0) == left(manager, backend)


def _lose(*_args: object) -> None:
    raise SandboxLost("x")
