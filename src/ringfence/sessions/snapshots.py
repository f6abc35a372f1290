"""Snapshots of clients: whose each is. The content is the backends' to keep."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace

from ..errors import InvalidRequest, RingfenceError, SnapshotNotFound
from ..model.session import OF_FORK
from ..model.spec import SandboxSpec
from ..snapshots.catalogue import Catalogue
from ..store.records import SnapshotRecord
from .catalogue.records import spec_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..model.changes import Changes
    from ..model.session import Snapshot
    from .live import Live
    from .parts import Manager


def take(manager: Manager, live: Live, metadata: Mapping[str, str]) -> Snapshot:
    """Save a sandbox's files, for its client. When that cannot be written down, nothing is kept."""
    return own(manager, live, live.sandbox.snapshot(metadata))


def checkpoint(manager: Manager, live: Live, metadata: Mapping[str, str]) -> Snapshot:
    """Save files and memory; the session is over then."""
    with live.lock:
        made = live.sandbox.checkpoint(metadata)
        try:
            return own(manager, live, made)
        finally:
            manager.end(live, "checkpoint")


def changes(manager: Manager, live: Live, since: str | None, client_id: str | None) -> Changes:
    """Compare a sandbox's files with a snapshot's of the same client; None: with a new sandbox's."""
    if since is not None and need(manager, since, client_id).backend != live.backend:
        raise InvalidRequest(
            "that snapshot is of another backend",
            field="since",
            hint=f"compare with a snapshot of a sandbox in {live.backend}",
        )
    return live.sandbox.changes(since)


def own(manager: Manager, live: Live, made: Snapshot) -> Snapshot:
    """Write down whose a snapshot is; where that fails, it is deleted."""
    try:
        record = record_of(live, made)
        manager.store.add_snapshot(record)
        if manager.shared is not None and not made.metadata.get(OF_FORK):
            # Before it is answered: from then on it is not lost with this machine.
            manager.shared.push(catalogue_of(manager), made.id, asdict(record))
    except BaseException:
        manager.store.remove_snapshot(made.id)
        with suppress(RingfenceError):
            manager.maker.backends[live.backend].delete_snapshot(made.id)
        raise
    manager.events.add("snapshot", live, snapshot_id=made.id)
    return made


def settle(manager: Manager) -> None:
    """After a kill: what was saved has an owner, as far as its sandbox lives; half of one is gone."""
    if manager.store.directory is not None:
        Catalogue(manager.store.directory.file("snapshots"), "").tidy()
    known = {record.id for record in manager.store.snapshots()}
    for backend in manager.maker.backends.values():
        for each in backend.snapshots():
            if each.metadata.get(OF_FORK):  # a fork was killed in the middle
                delete(manager, each.id, None)
                continue
            live = manager.index.find(each.session_id) if each.id not in known else None
            if live is not None:
                manager.store.add_snapshot(record_of(live, each))


def record_of(live: Live, made: Snapshot) -> SnapshotRecord:
    """Describe a snapshot of a live sandbox for the store."""
    spec = replace(live.spec, network=live.inner.spec.network)
    return SnapshotRecord(
        made.id, live.client_id, live.sandbox_id, live.backend, spec_text(spec), made.created_at
    )


def every(manager: Manager, client_id: str | None) -> list[Snapshot]:
    """List a client's snapshots, oldest first; with None all, including those without a known owner."""
    owners = {record.id: record.owner for record in manager.store.snapshots()}
    found = [each for backend in manager.maker.backends.values() for each in backend.snapshots()]
    mine = [each for each in found if client_id is None or owners.get(each.id) == client_id]
    return sorted(mine, key=lambda each: (each.created_at, each.id))


def need(manager: Manager, snapshot_id: str, client_id: str | None) -> SnapshotRecord:
    """Find a snapshot's record.

    Raises:
        SnapshotNotFound: It does not exist, or belongs to another client: the message is the same.
    """
    found = manager.store.snapshot(snapshot_id) or _taken_over(manager, snapshot_id, client_id)
    known = found is not None and found.backend in manager.maker.backends
    if found is None or not known or client_id not in (None, found.owner):
        raise SnapshotNotFound(f"no snapshot {snapshot_id!r}")
    return found


def _taken_over(manager: Manager, snapshot_id: str, client_id: str | None) -> SnapshotRecord | None:
    """Take a snapshot over from the shared store: the machine that had it may be gone."""
    shared = manager.shared
    if shared is None or (owner := shared.owner(snapshot_id)) is None:
        return None
    if client_id not in (None, owner):
        return None
    form = shared.pull(catalogue_of(manager), snapshot_id)
    if form is None:
        return None
    record = SnapshotRecord(**form)
    with suppress(RingfenceError):  # another request was faster
        manager.store.add_snapshot(record)
    return manager.store.snapshot(snapshot_id)


def catalogue_of(manager: Manager) -> str:
    """Return the directory of snapshots. Precondition: the manager has a state directory."""
    assert manager.store.directory is not None  # whoever has a shared store has one
    return manager.store.directory.file("snapshots")


def spec_of(record: SnapshotRecord) -> SandboxSpec:
    """Return the spec of the snapshotted sandbox, without secrets."""
    return SandboxSpec.from_json(json.loads(record.spec))


def delete(manager: Manager, snapshot_id: str, client_id: str | None) -> None:
    """Remove one; the record last, so that what is left of a crash still has an owner."""
    record, shared = manager.store.snapshot(snapshot_id), manager.shared
    if shared is not None:
        owner = shared.owner(snapshot_id)
        if owner is not None and client_id in (None, owner):
            shared.remove(snapshot_id)
            if record is None:
                return
    if client_id is not None:
        need(manager, snapshot_id, client_id)
    backends = manager.maker.backends
    names = [record.backend] if record and record.backend in backends else [*backends]
    problem: SnapshotNotFound | None = None
    for name in names:
        try:
            backends[name].delete_snapshot(snapshot_id)
            problem = None
            break
        except SnapshotNotFound as exc:
            problem = exc
    manager.store.remove_snapshot(snapshot_id)
    if problem is not None:
        raise problem
