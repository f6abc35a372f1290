"""An eviction that fails leaves the sandbox as it was; one that does not leaves it in the store alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shared_store import DirectoryFiles, make_store
from tests.unit.sessions.timing import FakeClock
from tests.unit.sessions.whole import Whole

from ringfence.errors import (
    IoError,
    LifecycleError,
    RingfenceError,
    SandboxLost,
    SnapshotNotFound,
    StorageFull,
    Unsupported,
)
from ringfence.model.acquire import AcquireOptions
from ringfence.model.calls import parse_network
from ringfence.model.client_session import SessionState
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.sessions import eviction, liveness, snapshots
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.eviction import Evicted
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.snapshots.shared import SharedSnapshots
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox

pytestmark = pytest.mark.anyone

ALLOWED = parse_network(["example.com"])
CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))


class Noted(Evicted):
    """Carry that records what is asked of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self.error = error

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        assert "required" == processes
        assert live.inner.spec.network == spec.network
        self.done.append("stop")
        if self.error is not None:
            raise self.error
        # In the middle of a move nobody takes its absence for a loss.
        assert live.moving is not None
        assert live.use.is_attended

    def forms(self) -> list[dict[str, Any]]:
        self.done.append("forms")
        return [{"number": 1}]

    def move(self, before: Any, inner: Any) -> None:
        assert before is not inner
        self.done.append("move")

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSnapshots:
    return make_store(tmp_path / "store", monkeypatch)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Whole]:
    made = Whole(str(tmp_path / "state" / "snapshots"))
    yield made
    made.close()


@pytest.fixture
def manager(backend: Whole, store: SharedSnapshots, tmp_path: Path) -> Iterator[SessionManager]:
    with SessionManager(
        CONFIG,
        backends=[backend],
        state_dir=str(tmp_path / "state"),
        background=False,
        clock=FakeClock(),
        shared=store,
    ) as made:
        yield made


@pytest.fixture
def live(manager: SessionManager) -> Live:
    return find(manager, manager.acquire(client_id="ann").id)


def find(manager: SessionManager, session: str) -> Live:
    found = manager.index.find(session)
    assert found is not None
    return found


def held(manager: SessionManager, backend: Whole, store: SharedSnapshots) -> dict[str, object]:
    return {
        "sandboxes": sorted(backend.sandboxes),
        "saved": sorted(backend.saved),
        "records": [each.id for each in manager.store.snapshots()],
        "slots": manager.slots.taken,
        "forms": store.names("evicted"),
        "stored": [each for each in store.names() if each.startswith("snap")],
        "sessions": [(each.session_id, each.state) for each in manager.list()],
    }


def test_what_is_evicted_is_in_the_store_as_its_owners_and_nowhere_else(
    manager: SessionManager, backend: Whole, store: SharedSnapshots, live: Live
) -> None:
    manager.extend(live.id, 60.0)
    manager.detach(live.id)
    carry = Noted()

    saved = eviction.evict(manager, live, {"a": "b"}, carry)

    assert ["stop", "forms", "close"] == carry.done
    assert ("terminated", "evicted") == (str(live.state), live.reason)
    form = store.read("evicted", live.sandbox_id)
    assert form is not None
    assert {
        "owner": "ann",
        "snapshot": saved,
        "state": "detached",
        "left_s": 60.0,
        "execs": [{"number": 1}],
    } == {key: value for key, value in form.items() if key not in ("at", "mac")}
    assert "ann" == store.owner(saved)
    assert saved == eviction.snapshot_of(manager, live.sandbox_id)
    assert {
        "sandboxes": [],
        "saved": [],
        "records": [],
        "slots": 0,
        "forms": [live.sandbox_id],
        "stored": [saved],
        "sessions": [],
    } == held(manager, backend, store)
    assert live.moving is None
    assert not live.use.is_attended


def test_only_its_owner_finds_it_by_the_snapshot_that_it_is_in(
    manager: SessionManager, store: SharedSnapshots, live: Live
) -> None:
    saved = eviction.evict(manager, live, {}, Noted())
    assert eviction.find(manager, live.sandbox_id, saved, "ann")
    for asked in (
        (live.sandbox_id, saved, "bob"),
        (live.sandbox_id, "snap-other", "ann"),
        ("sbx-other", saved, "ann"),
    ):
        assert eviction.find(manager, *asked) is None
    manager.shared = None
    assert eviction.find(manager, live.sandbox_id, saved, "ann") is None
    assert eviction.snapshot_of(manager, live.sandbox_id) is None


def test_one_that_lives_or_never_was_is_in_no_snapshot(
    manager: SessionManager, store: SharedSnapshots, live: Live
) -> None:
    store.write({"owner": "ann", "snapshot": "snap-1"}, "evicted", live.sandbox_id)
    assert eviction.snapshot_of(manager, live.sandbox_id) is None
    assert eviction.snapshot_of(manager, "sbx-none") is None
    manager.terminate(live.id)
    assert "snap-1" == eviction.snapshot_of(manager, live.sandbox_id)
    other = manager.acquire(client_id="ann").session.sandbox_id
    manager.terminate(other)
    assert eviction.snapshot_of(manager, other) is None


MOUNTED = SandboxSpec(mounts=(Mount("/srv", "/srv"),))


@pytest.mark.parametrize(
    "spec",
    [
        MOUNTED,
        SandboxSpec(memory_dir="/srv"),
        SandboxSpec(python_env=True),
        SandboxSpec(template="other"),
    ],
    ids=["mounts", "memory_dir", "python_env", "template"],
)
def test_what_another_host_need_not_have_is_an_obstacle(spec: SandboxSpec) -> None:
    assert eviction.obstacle(spec)
    assert "" == eviction.obstacle(SandboxSpec())


def _attend(manager: SessionManager, live: Live) -> None:
    live.use.__enter__()


def _mount(manager: SessionManager, live: Live) -> None:
    live.spec = MOUNTED


def _share_nothing(manager: SessionManager, live: Live) -> None:
    manager.shared = None


def _have_secrets(manager: SessionManager, live: Live) -> None:
    live.inner.spec = replace(live.inner.spec, secrets={"KEY": "value"})  # type: ignore[misc]


def _have_no_memory(manager: SessionManager, live: Live) -> None:
    live.inner.__class__ = UnconfinedSandbox


def _fill(manager: SessionManager, live: Live) -> None:
    used = replace(live.inner.stats(), memory_bytes=1 << 61, disk_bytes=None)
    live.inner.stats = lambda: used  # type: ignore[method-assign]


def _fill_disk(manager: SessionManager, live: Live) -> None:
    used = replace(live.inner.stats(), memory_bytes=None, disk_bytes=1 << 61)
    live.inner.stats = lambda: used  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("prepare", "error", "why"),
    [
        (_attend, LifecycleError, "a client is being served"),
        (_mount, Unsupported, "host directories mounted"),
        (_share_nothing, Unsupported, "no snapshot_store"),
        (_have_secrets, Unsupported, "secret placeholders"),
        (_have_no_memory, Unsupported, "saves no memory"),
        (_fill, StorageFull, "no room"),
        (_fill_disk, StorageFull, "no room"),
    ],
)
def test_what_could_not_go_on_elsewhere_is_refused_before_anything_stops(
    manager: SessionManager,
    backend: Whole,
    store: SharedSnapshots,
    live: Live,
    prepare: Any,
    error: type[RingfenceError],
    why: str,
) -> None:
    before = held(manager, backend, store)
    prepare(manager, live)
    carry = Noted()
    with pytest.raises(error, match=why):
        eviction.evict(manager, live, {}, carry)
    assert [] == backend.done
    assert "stop" not in carry.done
    assert before == held(manager, backend, store)
    if prepare is _attend:
        live.use.__exit__()


@pytest.mark.parametrize("state", ["active", "suspended"])
@pytest.mark.parametrize("step", ["stop", "checkpoint", "makedirs", "mv"])
def test_whatever_fails_it_goes_on_as_it_was(
    manager: SessionManager,
    backend: Whole,
    store: SharedSnapshots,
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    step: str,
) -> None:
    """Not stopped, not saved, not sent, or sent without its form."""
    if "suspended" == state:
        manager.suspend(live.id)
    live.inner.spec = replace(live.inner.spec, network=ALLOWED)  # type: ignore[misc]
    live.granted = backend.sandboxes[live.sandbox_id].granted() if "active" == state else None
    before = held(manager, backend, store)
    backend.done.clear()
    carry = Noted(Unsupported("it cannot be copied") if "stop" == step else None)
    backend.fails["checkpoint"] = int("checkpoint" == step)

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(5, "the store is away")

    with monkeypatch.context() as patch:
        if step in ("makedirs", "mv"):
            patch.setattr(DirectoryFiles, step, fail)
        with pytest.raises(RingfenceError):
            eviction.evict(manager, live, {}, carry)

    assert before == held(manager, backend, store)
    assert state == live.inner.session.state or "active" == state == live.state
    assert live.moving is None
    assert "close" == carry.done[-1]
    assert ("move" in carry.done) == (step in ("makedirs", "mv"))
    assert ("restore" in backend.done) == (step in ("makedirs", "mv"))
    assert backend.sandboxes[live.sandbox_id] is live.inner is live.watched.inner
    assert ALLOWED == live.inner.spec.network
    if "restore" in backend.done:
        assert live.granted is None, "what was read back of the one before"
    assert not liveness.notice_loss(manager, live)
    manager.resume(live.id)
    assert 0 == live.sandbox.exec(["true"]).exit_code
    live.sandbox.files.write("a", "b")
    if "stop" != step:
        assert eviction.evict(manager, live, {}, Noted()) == eviction.snapshot_of(
            manager, live.sandbox_id
        )


def test_one_that_cannot_be_restored_either_is_its_owners_snapshot(
    manager: SessionManager,
    backend: Whole,
    store: SharedSnapshots,
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(5, "the store is away")

    backend.fails["restore"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryFiles, "mv", fail)
        with pytest.raises(IoError, match="restore fails"):
            eviction.evict(manager, live, {}, Noted())

    assert 2 == backend.done.count("restore")
    assert ("terminated", "not restored") == (str(live.state), live.reason)
    (saved,) = backend.saved
    assert saved == snapshots.need(manager, saved, "ann").id
    with pytest.raises(SnapshotNotFound):
        snapshots.need(manager, saved, "bob")
    assert 0 == manager.slots.taken
    lease = manager.acquire(options=AcquireOptions(snapshot_id=saved), client_id="ann")
    lease.release()


def test_a_restore_in_place_that_fails_once_is_tried_again(
    manager: SessionManager, backend: Whole, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(5, "the store is away")

    backend.fails["restore"] = 1
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryFiles, "mv", fail)
        with pytest.raises(IoError, match="the store is away"):
            eviction.evict(manager, live, {}, Noted())
    assert "active" == live.state
    assert 0 == live.sandbox.exec(["true"]).exit_code


def test_what_runs_and_is_not_waited_for_is_no_reason_to_stay(
    manager: SessionManager, live: Live
) -> None:
    """It is taken along, or refused by whoever carries it; only a client that is served waits."""
    run = live.watched.start(ExecRequest(("sleep", "600")))
    assert live.use.busy
    assert not live.use.is_attended
    assert eviction.evict(manager, live, {}, Noted()) == eviction.snapshot_of(
        manager, live.sandbox_id
    )
    run.close()


def test_one_that_ended_meanwhile_is_not_saved(manager: SessionManager, live: Live) -> None:
    manager.terminate(live.id)
    live.inner = manager.maker.backends["unconfined"].provision(SandboxSpec())
    with pytest.raises(LifecycleError, match="has ended"):
        eviction.evict(manager, live, {}, Noted())
    live.inner.terminate()


@pytest.mark.parametrize("state", ["active", "detached", "suspended"])
@pytest.mark.parametrize("left_s", [None, 600.0, 0.0, -5.0])
def test_one_that_is_restored_has_the_state_and_the_time_that_it_had(
    manager: SessionManager,
    store: SharedSnapshots,
    live: Live,
    state: str,
    left_s: float | None,
) -> None:
    """One whose time was over meanwhile has a moment, and no more; the store forgets it."""
    saved = manager.snapshot(live.id).id
    assert "ann" == store.owner(saved)
    form: dict[str, Any] = {"owner": "ann", "snapshot": saved, "execs": []}
    form |= {"state": state, "left_s": left_s}
    store.write(form, "evicted", live.sandbox_id)
    eviction.settle(manager, live, form)

    left = live.left_s(manager.clock.now())
    assert (None if left_s is None else max(left_s, 1.0)) == left
    assert SessionState(state) == live.state
    assert ([], None) == (store.names("evicted"), store.owner(saved))
    assert [] == manager.snapshots()


def test_one_that_has_ended_while_it_came_back_is_forgotten_too(
    manager: SessionManager, store: SharedSnapshots, live: Live
) -> None:
    saved = manager.snapshot(live.id).id
    form = {"snapshot": saved, "state": "suspended", "left_s": 5.0}
    store.write(form, "evicted", live.sandbox_id)
    manager.terminate(live.id)
    eviction.settle(manager, live, form)
    assert ([], None) == (store.names("evicted"), store.owner(saved))


def test_what_is_gone_while_it_moves_is_no_loss(manager: SessionManager, live: Live) -> None:
    with live.move():
        live.inner.terminate()
        assert not liveness.notice_loss(manager, live)
        assert not liveness.look_at(manager, live)
        moving = live.moving
    assert moving is not None
    assert moving.done()
    assert liveness.notice_loss(manager, live)
    assert "lost" == live.reason
    with pytest.raises(SandboxLost), live.move():
        raise SandboxLost("it is gone")
    assert live.moving is None
    assert not live.use.is_attended
