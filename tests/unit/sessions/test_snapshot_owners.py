"""Whose snapshots are, on this machine and in the store that several share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.shared_store import make_store
from tests.unit.sessions.timing import FakeClock
from tests.unit.sessions.whole import Whole

from ringfence.errors import SnapshotNotFound
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions import snapshots
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.snapshots.shared import SharedSnapshots

pytestmark = pytest.mark.anyone

CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSnapshots:
    return make_store(tmp_path / "store", monkeypatch)


class Second(Whole):
    """Another backend."""

    name = "second"


def machine(place: Path, store: SharedSnapshots | None, *names: type[Whole]) -> SessionManager:
    backends = [each(str(place / "snapshots")) for each in names or (Whole,)]
    manager = SessionManager(
        CONFIG,
        backends=backends,
        state_dir=str(place),
        background=False,
        clock=FakeClock(),
        shared=store,
    )
    for each in backends:
        manager.before_store_closes.append(each.close)
    return manager


@pytest.fixture
def one(tmp_path: Path, store: SharedSnapshots) -> Iterator[SessionManager]:
    with machine(tmp_path / "one", store) as made:
        yield made


@pytest.fixture
def two(tmp_path: Path, store: SharedSnapshots) -> Iterator[SessionManager]:
    with machine(tmp_path / "two", store) as made:
        yield made


def take(manager: SessionManager, client: str, backend: str = "") -> str:
    options = AcquireOptions(preferred_backend=backend)
    with manager.acquire(options=options, client_id=client) as lease:
        return manager.snapshot(lease.id).id


def in_store(store: SharedSnapshots) -> list[str]:
    return [each for each in store.names() if each.startswith("snap")]


def test_a_list_has_a_clients_own_of_all_backends_oldest_first(tmp_path: Path) -> None:
    """One whose owner is not known is an admin's to see."""
    with machine(tmp_path, None, Whole, Second) as manager:
        made = [take(manager, "ann", name) for name in ("second", "unconfined", "second")]
        other = take(manager, "bob")
        unknown = take(manager, "ann")
        manager.store.remove_snapshot(unknown)
        assert made == [each.id for each in manager.snapshots("ann")]
        assert [other] == [each.id for each in manager.snapshots("bob")]
        assert [] == manager.snapshots("eve")
        assert [*made, other, unknown] == [each.id for each in manager.snapshots()]
        for client in ("ann", "bob"):
            with pytest.raises(SnapshotNotFound):
                manager.delete_snapshot(unknown, client)
        manager.delete_snapshot(unknown)
        assert [*made, other] == [each.id for each in manager.snapshots()]

        del manager.maker.backends["second"]  # type: ignore[attr-defined]
        with pytest.raises(SnapshotNotFound):
            snapshots.need(manager, made[0], "ann")
        assert made[1] == snapshots.need(manager, made[1], "ann").id


def test_one_of_another_machine_is_its_owners_alone(
    one: SessionManager, two: SessionManager, store: SharedSnapshots
) -> None:
    made = take(one, "ann")
    assert [made] == in_store(store)
    with pytest.raises(SnapshotNotFound):
        snapshots.need(two, made, "bob")
    assert [] == two.store.snapshots()
    record = snapshots.need(two, made, "ann")
    assert ("ann", "unconfined") == (record.owner, record.backend)
    assert record == snapshots.need(two, made, None)
    with pytest.raises(SnapshotNotFound):
        snapshots.need(two, made, "bob")


def test_nobody_else_removes_one_from_the_store(
    one: SessionManager, two: SessionManager, store: SharedSnapshots
) -> None:
    made = take(one, "ann")
    for manager in (one, two):
        with pytest.raises(SnapshotNotFound):
            manager.delete_snapshot(made, "bob")
    assert [made] == in_store(store)
    two.delete_snapshot(made, "ann")  # which has never had it
    assert [] == in_store(store)
    one.delete_snapshot(made, "ann")
    assert [] == one.snapshots()
    for manager in (one, two):
        with pytest.raises(SnapshotNotFound):
            manager.delete_snapshot(made, "ann")
