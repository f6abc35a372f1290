"""A manager goes, and the next one on its state directory has what lived: whose, as what, under which key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.backends.optional import Durable, DurableSandbox, Tenanted
from ringfence.errors import InvalidRequest, IoError, StorageFull
from ringfence.model import capabilities as can
from ringfence.model.acquire import AcquireOptions
from ringfence.model.client_session import SessionState, SessionTimeouts
from ringfence.model.spec import SandboxSpec
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.maker import Maker
from ringfence.sessions.manager import SessionManager
from ringfence.store import records
from ringfence.store.records import Anchor, SandboxRecord
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox

pytestmark = pytest.mark.anyone


class LastingSandbox(UnconfinedSandbox, DurableSandbox):
    """A sandbox that notes as what it was taken over."""

    aligned: tuple[bool, ...] = ()

    def adopted_execs(self) -> dict[str, Any]:
        return {}

    def align(self, suspended: bool) -> None:
        self.aligned = (*self.aligned, suspended)


class Lasting(Unconfined, Durable, Tenanted):
    """A backend whose sandboxes outlive a manager.

    Attributes:
        own: The process that they depend on.
        tenants: By sandbox, whose it is to be.
        reports: How often it was probed.
        gone: Sandboxes that a later manager still finds although they have ended.
    """

    outlives = True

    def __init__(self) -> None:
        super().__init__()
        self.own: tuple[int, int] | None = (7, 70)
        self.tenants: dict[str, str] = {}
        self.reports, self.is_available = 0, True
        self.gone: dict[str, UnconfinedSandbox] = {}

    def report(self) -> can.BackendReport:
        self.reports += 1
        if not self.is_available:
            return can.BackendReport(backend=self.name, available=False, reason="not now")
        return super().report()

    def _make(self, spec: SandboxSpec, content: str | None) -> UnconfinedSandbox:
        made = super()._make(spec, content)
        made.__class__ = LastingSandbox
        return made

    def save(self, *what: Any) -> Any:
        return super().save(*what) if what else None

    def leave(self) -> None:
        """Nothing has to be left."""

    def living(self) -> list[UnconfinedSandbox]:
        return [*self.sandboxes.values()]

    def adopt(self, sandbox_id: str) -> UnconfinedSandbox | None:
        if sandbox_id == "sbx-sick":
            raise IoError("its notes cannot be read")
        return self.gone.get(sandbox_id) or self.sandboxes.get(sandbox_id)

    def anchor(self) -> tuple[int, int] | None:
        return self.own

    def end_leftovers(self, pid: int, started: int) -> None:
        del pid, started

    def belongs_to(self, sandbox_id: str, tenant: str) -> None:
        self.tenants[sandbox_id] = tenant


@pytest.fixture
def backend() -> Iterator[Lasting]:
    made = Lasting()
    yield made
    made.close()


class Server:
    """Managers of one state directory, one after the other."""

    def __init__(self, place: Path, backend: Lasting) -> None:
        self._place, self._backend, self.clock = place, backend, FakeClock()
        self.manager = self._make([backend])

    def _make(self, backends: list[Any]) -> SessionManager:
        config = ManagerConfig(
            timeouts=SessionTimeouts(idle_s=600.0), pool=PoolConfig(min_warm=1, max_warm=2)
        )
        return SessionManager(
            config,
            state_dir=str(self._place),
            backends=backends,
            background=False,
            clock=self.clock,
        )

    def again(self, *backends: Any) -> SessionManager:
        """Have the next one."""
        self.manager.close(keep=True)
        self.manager = self._make([*backends] or [self._backend])
        return self.manager

    def live(self, session: str) -> Live:
        found = self.manager.index.find(session)
        assert found is not None
        return found


@pytest.fixture
def server(tmp_path: Path, backend: Lasting) -> Iterator[Server]:
    made = Server(tmp_path, backend)
    yield made
    made.manager.close()


def test_each_goes_on_as_it_was_for_whom_it_was(server: Server, backend: Lasting) -> None:
    manager = server.manager
    ids: dict[str, str] = {}
    for name in ("active", "detached", "suspended"):
        options = AcquireOptions(
            key=f"key-{name}", metadata={"name": name}, timeouts=SessionTimeouts(idle_s=77.0)
        )
        spec = SandboxSpec(labels={"l": name}, ttl_s=900.0)
        ids[name] = manager.acquire(spec, options, client_id=f"of {name}").id
    manager.detach(ids["detached"])
    manager.suspend(ids["suspended"])
    manager.set_default_sandbox("of active", ids["active"])
    before = {name: manager.get(session) for name, session in ids.items()}
    ended = manager.acquire(client_id="ann")
    manager.release(ended.id)
    server.clock.pass_by(10.0)

    manager = server.again()

    assert 3 == manager.slots.taken == len(manager.list())
    for name, session in ids.items():
        was, now = before[name], manager.get(session)
        live = server.live(session)
        for field in ("session_id", "sandbox_id", "client_id", "state", "backend", "created_at"):
            assert getattr(was, field) == getattr(now, field), field
        assert (was.metadata, was.timeouts) == (now.metadata, now.timeouts)
        assert {"l": name} == live.spec.labels
        assert 890.0 == pytest.approx(now.expires_in_s)
        assert 10.0 == pytest.approx(live.activity.unused_s(server.clock.now()))
        assert isinstance(live.inner, LastingSandbox)
        assert (name == "suspended",) == live.inner.aligned
        options = AcquireOptions(
            key=f"key-{name}", metadata={"name": name}, timeouts=SessionTimeouts(idle_s=77.0)
        )
        spec = SandboxSpec(labels={"l": name}, ttl_s=900.0)
        again = manager.acquire(spec, options, client_id=f"of {name}")
        assert (session, False) == (again.id, again.newly_created)
        with pytest.raises(InvalidRequest):
            manager.acquire(options=options, client_id=f"of {name}")
    default = manager.default_sandbox("of active")
    assert default is not None
    assert ids["active"] == default.session_id
    assert "released" == manager.get(ended.id).reason
    assert 3 == len(manager.store.unended_sandboxes()) == len(backend.sandboxes)


def test_snapshots_have_their_owner_again_and_what_is_half_saved_goes(
    server: Server, backend: Lasting, tmp_path: Path
) -> None:
    """The manager may have been killed between a snapshot and the record of whose it is."""
    manager = server.manager
    lease = manager.acquire(client_id="ann")
    inner = server.live(lease.id).inner
    saved = backend.save(lease.session.sandbox_id, inner.spec, inner.root, {})  # type: ignore[attr-defined]
    half = tmp_path / "snapshots" / ".partial-snap-x"
    half.mkdir(parents=True)
    assert [] == manager.snapshots("ann")
    manager = server.again()
    assert [saved.id] == [each.id for each in manager.snapshots("ann")]
    assert [] == manager.snapshots("bob")
    assert not half.exists()


def test_files_of_a_template_are_held_by_whoever_takes_its_sandbox_over(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are let go of with it; a template that was removed meanwhile ends nothing."""
    first, second = (server.manager.acquire(client_id="ann") for _ in range(2))
    ids = [each.session.sandbox_id for each in (first, second)]
    held = os.open("/", os.O_PATH | os.O_CLOEXEC)

    def hold(maker: Maker, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        if sandbox_id == ids[1]:
            raise InvalidRequest("it was removed")
        maker._templates[sandbox_id] = held
        return spec

    with monkeypatch.context() as patch:
        patch.setattr(Maker, "hold_template", hold)
        manager = server.again()
    assert {ids[0]: held} == manager.maker._templates
    assert 2 == len(manager.list())
    manager.terminate(second.id)
    os.fstat(held)
    manager.terminate(first.id)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    assert {} == manager.maker._templates


def write_down(server: Server, sandbox_id: str, phase: str, **columns: Any) -> None:
    record = SandboxRecord(
        id=sandbox_id,
        owner="ann",
        backend="unconfined",
        spec="{}",
        **{"phase": phase, "created_at": 1.0, "boot": server.clock.boot, **columns},
    )
    server.manager.store.add_sandbox(record)


def test_what_was_not_whole_is_ended_with_the_reason_that_is_known(
    server: Server, backend: Lasting
) -> None:
    """It was being made, was warm, was ending, ended by itself, cannot be read, or nothing tells of it."""
    manager = server.manager
    kept, ending, gone = (manager.acquire(client_id="ann") for _ in range(3))
    for name in ("sbx-planned", "sbx-warm", "sbx-unknown"):
        backend.provision(SandboxSpec(id=name))
    write_down(server, "sbx-planned", records.PLANNED)
    write_down(server, "sbx-warm", records.WARM)
    write_down(server, "sbx-sick", records.PLANNED)
    sandboxes = {each: each.session.sandbox_id for each in (kept, ending, gone)}
    manager.store.change_sandbox(sandboxes[ending], phase=records.ENDING, reason="released")
    backend.gone[sandboxes[gone]] = backend.sandboxes[sandboxes[gone]]
    server.live(gone.id).inner.terminate()

    manager = server.again()

    assert [sandboxes[kept]] == [*backend.sandboxes]
    assert [kept.id] == [each.session_id for each in manager.list()]
    assert 1 == manager.slots.taken
    for lease, why in ((ending, "released"), (gone, "restart")):
        found = manager.get(lease.id)
        assert (SessionState.TERMINATED, why) == (found.state, found.reason)
    for name in ("sbx-planned", "sbx-warm", "sbx-sick"):
        record = manager.store.sandbox(name)
        assert record is not None
        assert (records.ENDED, "restart") == (record.phase, record.reason)
        assert record.ended_at == server.clock.wall()
    backend.gone.clear()


class Other(Unconfined):
    """A backend of another name."""

    name = "other"


def test_what_a_backend_left_that_is_not_here_is_left_alone(
    server: Server, backend: Lasting
) -> None:
    lease = server.manager.acquire(client_id="ann")
    sandbox_id = lease.session.sandbox_id
    other = Other()
    manager = server.again(other)
    assert [sandbox_id] == manager.not_ours
    [ends] = [each for each in manager.health().checks if "ends" == each.name]
    assert not ends.ok
    assert f"of backends that are not loaded: {sandbox_id}" in ends.detail
    assert [] == manager.list()
    assert [sandbox_id] == [*backend.sandboxes]
    assert [backend.name] == [each.backend for each in manager.store.anchors()]
    assert [lease.id] == [each.session_id for each in server.again().list()]
    other.close()


class TestReports:
    def maker(self, server: Server) -> Maker:
        return server.manager.maker

    def test_one_is_kept_for_as_long_as_what_it_was_found_with(
        self, server: Server, backend: Lasting
    ) -> None:
        first = self.maker(server).report("unconfined")
        assert 1 == backend.reports
        server.again()
        assert first == self.maker(server).report("unconfined") == first
        assert 1 == backend.reports
        self.maker(server).report("unconfined", afresh=True)
        assert 2 == backend.reports
        backend.own = (8, 80)
        server.again()
        self.maker(server).report("unconfined")
        assert 3 == backend.reports, "another process"
        server.clock.boot = "another"
        server.again()
        self.maker(server).report("unconfined")
        assert 4 == backend.reports, "another boot"
        self.maker(server).forget_report("unconfined")
        self.maker(server).report("unconfined")
        assert 5 == backend.reports
        self.maker(server).forget_report("unconfined")
        server.again()
        self.maker(server).report("unconfined")
        assert 6 == backend.reports, "also for the next one"
        backend.own = None
        server.again()
        self.maker(server).report("unconfined")
        assert 7 == backend.reports

    def test_one_that_is_not_available_is_asked_again_each_time(
        self, server: Server, backend: Lasting
    ) -> None:
        backend.is_available = False
        for count in (1, 2):
            assert not self.maker(server).report("unconfined").available
            assert count == backend.reports
        server.again()
        backend.is_available = True
        assert self.maker(server).report("unconfined").available
        assert self.maker(server).report("unconfined").available
        assert 3 == backend.reports


def test_each_sandbox_is_of_the_tenant_that_asked_and_a_warm_one_of_none(
    server: Server, backend: Lasting
) -> None:
    manager = server.manager
    mine = manager.acquire(options=AcquireOptions(use_pool=False), client_id="ann")
    snapshot = manager.snapshot(mine.id)
    again = manager.acquire(options=AcquireOptions(snapshot_id=snapshot.id), client_id="ann")
    manager.fill_pool()
    [warm] = backend.prebuilt
    assert warm == backend.tenants[warm], "of no client, and of no other warm one"
    for lease in (mine, again):
        assert "ann" == backend.tenants[lease.session.sandbox_id]
    backend.tenants.clear()
    spec = SandboxSpec(id="sbx-back")
    inner = manager.maker.restore_again("unconfined", "bob", snapshot.id, spec)
    assert {"sbx-back": "bob"} == backend.tenants
    inner.terminate()


def test_each_process_that_sandboxes_depend_on_is_written_down(
    server: Server, backend: Lasting
) -> None:
    """The next manager ends those that are left: one that came later must not be missed."""
    manager = server.manager
    options = AcquireOptions(use_pool=False)
    for own in ((7, 70), (7, 70), (7, 71), (8, 71)):
        backend.own = own
        manager.acquire(options=options, client_id="ann")
    boot, whose = server.clock.boot, manager.store.identity
    expected = [Anchor("unconfined", *own, boot, whose) for own in ((7, 70), (7, 71), (8, 71))]
    assert expected == sorted(manager.store.anchors(), key=lambda each: (each.pid, each.started))
    manager.close()
    server.manager = server._make([backend])
    assert [] == server.manager.store.anchors(), "all has ended with its manager"


def test_closing_ends_the_others_where_one_does_not_die_and_the_next_one_ends_that(
    server: Server, backend: Lasting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they depend on is written down until then."""
    lives = [server.live(server.manager.acquire(client_id="ann").id) for _ in range(3)]

    def fail() -> None:
        raise IoError("the kernel does not let go of it")

    with monkeypatch.context() as patch:
        patch.setattr(lives[0].inner, "terminate", fail)
        server.manager.close()
    assert [lives[0].sandbox_id] == [*backend.sandboxes]
    server.manager = server._make([backend])
    assert [(7, 70)] == [(each.pid, each.started) for each in server.manager.store.anchors()]
    assert {} == backend.sandboxes
    found = server.manager.get(lives[0].id)
    assert (SessionState.TERMINATED, "closed") == (found.state, found.reason)


def test_what_is_not_of_its_backends_outlasts_a_manager_that_ends_all(
    server: Server, backend: Lasting
) -> None:
    lease = server.manager.acquire(client_id="ann")
    other = Other()
    server.again(other)
    server.manager.close()
    other.close()
    server.manager = server._make([backend])
    assert [(7, 70)] == [(each.pid, each.started) for each in server.manager.store.anchors()]
    assert [lease.id] == [each.session_id for each in server.manager.list()]


def test_a_changed_pool_is_that_of_this_manager_and_the_next_or_of_neither(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.manager.config.pool
    config = PoolConfig(min_warm=2, max_warm=3)

    def full(*_: object) -> None:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(server.manager.store, "set_setting", full)
        with pytest.raises(StorageFull):
            server.manager.change_pool(config)
    assert first == server.manager.config.pool == server.manager.pool.config
    server.manager.change_pool(config)
    assert config == server.manager.config.pool == server.manager.pool.config
    server.again()
    assert config == server.manager.config.pool == server.manager.pool.config
    server.manager.fill_pool()
    assert 2 == server.manager.pool.size
