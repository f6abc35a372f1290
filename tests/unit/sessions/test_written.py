"""What a manager writes down and what the next one does with it, to the last digit."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.backends.optional import Durable
from ringfence.errors import StorageFull
from ringfence.model.client_session import SessionState, SessionTimeouts
from ringfence.sessions import liveness, recovery
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.store.records import Anchor

pytestmark = pytest.mark.anyone


class Lasting(Unconfined, Durable):  # type: ignore[misc]  # both have a `save`
    """A backend whose sandboxes depend on one process, of which it records the ends that it is asked for."""

    outlives = False

    def __init__(self) -> None:
        super().__init__()
        self.own: tuple[int, int] | None = None
        self.ended: list[tuple[int, int]] = []

    def anchor(self) -> tuple[int, int] | None:
        return self.own

    def end_leftovers(self, pid: int, started: int) -> None:
        self.ended.append((pid, started))


@pytest.fixture
def backend() -> Iterator[Lasting]:
    made = Lasting()
    yield made
    made.close()


@pytest.fixture
def manager(tmp_path: Path, backend: Lasting) -> Iterator[SessionManager]:
    config = ManagerConfig(pool=PoolConfig(enabled=False), timeouts=SessionTimeouts(idle_s=600.0))
    options = {"state_dir": str(tmp_path), "backends": [backend], "background": False}
    with SessionManager(config, clock=FakeClock(1234.5), **options) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture
def live(manager: SessionManager) -> Live:
    found = manager.index.find(manager.acquire(client_id="ann").id)
    assert found is not None
    return found


def _pass(manager: SessionManager, seconds: float) -> None:
    assert isinstance(manager.clock, FakeClock)
    manager.clock.pass_by(seconds)


def test_when_it_was_used_last_is_written_in_nanoseconds(
    manager: SessionManager, live: Live
) -> None:
    _pass(manager, 10.25)
    manager.detach(live.id)
    record = manager.store.session(live.id)
    assert record is not None
    assert ("detached", 1_244_750_000_000) == (record.state, record.active_ns)
    assert record.active_at == manager.clock.wall()

    _pass(manager, 1.5)
    live.touch()
    liveness.tidy(manager)
    record = manager.store.session(live.id)
    assert record is not None
    assert 1_246_250_000_000 == record.active_ns == int(live.saved_activity * 1e9)


def test_the_file_alone_has_what_was_written_before_the_last_tidying(
    manager: SessionManager, live: Live, tmp_path: Path
) -> None:
    """Whoever copies it, and not the log beside it, lacks no more than that."""
    liveness.tidy(manager)
    copy = shutil.copy(tmp_path / "state.sqlite3", tmp_path / "copy")
    with closing(sqlite3.connect(copy)) as database:
        assert [(live.id,)] == database.execute("SELECT id FROM sessions").fetchall()


def test_a_time_to_live_is_written_in_nanoseconds(manager: SessionManager, live: Live) -> None:
    _pass(manager, 2.0)
    manager.extend(live.id, 60.25)
    record = manager.store.sandbox(live.sandbox_id)
    assert record is not None

    assert 1_296_750_000_000 == record.expires_ns
    assert 1296.75 == live.expires


def test_a_time_to_live_that_cannot_be_written_is_as_it_was(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.extend(live.id, 60.0)
    before = live.expires

    def full(*_: object, **__: object) -> None:
        raise StorageFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(manager.store, "change_sandbox", full)
        with pytest.raises(StorageFull):
            manager.extend(live.id, 600.0)
    assert before == live.expires


def test_a_changed_name_and_changed_labels_are_written_together(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> tuple[object, object]:
        session, sandbox = manager.store.session(live.id), manager.store.sandbox(live.sandbox_id)
        assert session is not None
        assert sandbox is not None
        return json.loads(session.metadata), json.loads(sandbox.spec)["labels"]

    manager.change(live.id, name="first", labels={"a": "1", "b": "2"})
    assert ({"name": "first"}, {"a": "1", "b": "2"}) == written()
    manager.change(live.id, labels={"a": None})
    assert ({"name": "first"}, {"b": "2"}) == written()

    def full(*_: object, **__: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(manager.store, "change_session", full)
    with pytest.raises(StorageFull):
        manager.change(live.id, name="second", labels={"c": "3"})
    assert ({"name": "first"}, {"b": "2"}) == written()
    assert (live.metadata, live.spec.labels) == written()
    assert live.spec == live.sandbox.spec


@pytest.mark.parametrize("state", [SessionState.ACTIVE, SessionState.DETACHED])
def test_a_session_goes_on_as_it_was_written(
    state: SessionState, manager: SessionManager, live: Live
) -> None:
    """Its clocks did not stand still: the next manager counts from what is written."""
    manager.extend(live.id, 900.0)
    if state == SessionState.DETACHED:
        manager.detach(live.id)
    session, sandbox = manager.store.session(live.id), manager.store.sandbox(live.sandbox_id)
    assert session is not None
    assert sandbox is not None
    manager.index.leave(live)
    _pass(manager, 100.0)
    taken = manager.slots.taken
    recovery._take_over(manager, live.inner, sandbox, session)

    again = manager.index.find(live.id)
    assert again is not None
    assert (state, live.expires, live.created_at) == (again.state, again.expires, again.created_at)
    assert 100.0 == again.activity.unused_s(manager.clock.now())
    assert 0.0 < again.next_look - manager.clock.now() <= 800.0
    assert taken + 1 == manager.slots.taken
    manager.slots.give_back()


@pytest.mark.parametrize("both", [False, True])
def test_of_another_boot_no_clock_is_taken_over(
    manager: SessionManager, live: Live, both: bool
) -> None:
    manager.extend(live.id, 900.0)
    session, sandbox = manager.store.session(live.id), manager.store.sandbox(live.sandbox_id)
    assert session is not None
    assert sandbox is not None
    manager.index.leave(live)
    _pass(manager, 100.0)
    if both:
        session = replace(session, boot="other")
    recovery._take_over(manager, live.inner, replace(sandbox, boot="other"), session)

    again = manager.index.find(live.id)
    assert again is not None
    assert again.expires is None
    assert 0.0 == again.activity.unused_s(manager.clock.now())
    manager.slots.give_back()


def test_only_an_own_anchor_of_this_boot_is_ended(
    manager: SessionManager, backend: Lasting, caplog: pytest.LogCaptureFixture
) -> None:
    """One of a copied directory is its original's, and lives on; one of an earlier boot is no process."""
    boot, here = manager.clock.boot, manager.store.identity
    backend.own = (7, 70)
    for pid, of_boot, directory in (
        (5, boot, here),
        (6, "earlier", here),
        (7, boot, here),
        (8, boot, "another-1"),
    ):
        manager.store.add_anchor(Anchor(backend.name, pid, pid * 10, of_boot, directory))
    recovery.end_anchors(manager)

    assert [(5, 50)] == backend.ended
    assert [7] == [each.pid for each in manager.store.anchors()]
    assert 1 == sum("is a copy" in record.message for record in caplog.records)

    manager.store.add_anchor(Anchor(backend.name, 9, 90, "earlier", "another-1"))
    recovery.end_anchors(manager)
    assert 1 == sum("is a copy" in record.message for record in caplog.records), (
        "of an earlier boot"
    )
