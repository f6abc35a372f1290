"""Eviction: a sandbox is saved with its memory in the shared store and ends here, for another node to restore.

A form beside the snapshot says whose it is, in which state it was, and which execs go on in it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import asdict, replace

from ..backends.optional import Continuable
from ..errors import LifecycleError, RingfenceError, StorageFull, Unsupported
from ..model.client_session import SessionState
from ..store.records import ENDED
from . import forks, snapshots
from .maker import EVICTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..model.session import Snapshot
    from ..model.spec import SandboxSpec
    from ..snapshots.shared import SharedSnapshots
    from .live import Live
    from .parts import Manager

    Form = dict[str, Any]

_PLACE = EVICTED  # of the forms in the store
_LEAST_S = 1.0  # to live, for one whose time was over


class Evicted(forks.Carry):
    """Take no exec along; see `execs.evicted`."""

    def forms(self) -> list[Form]:
        """Describe the execs that go on, once the sandbox is saved."""
        return []


def evict(manager: Manager, live: Live, metadata: Mapping[str, str], carry: Evicted) -> str:
    """Save a sandbox with its memory in the shared store, and end it here: the id of the snapshot.

    Until that is done it goes on.

    Raises:
        Unsupported: Something in it cannot be saved, or cannot go on elsewhere.
        LifecycleError: A client is served by it.
        IoError: The store does not answer; the sandbox was restored in its place, with all that ran.
    """
    shared = _check(manager, live)
    try:
        with live.move():
            was_suspended = live.state == SessionState.SUSPENDED
            if was_suspended:
                live.inner.resume()
            try:
                saved = _save(live, metadata, carry)
            except BaseException:
                if was_suspended:
                    with suppress(RingfenceError):  # it is gone
                        live.inner.suspend()
                raise
            try:
                _share(manager, shared, live, saved, carry.forms())
            except BaseException:
                _go_on(manager, live, saved, carry, was_suspended=was_suspended)
                raise
            manager.end(live, EVICTED)
    finally:
        carry.close()
    with suppress(RingfenceError):  # the store has it
        manager.maker.backends[live.backend].delete_snapshot(saved.id)
    return saved.id


def snapshot_of(manager: Manager, sandbox_id: str) -> str | None:
    """Return the snapshot of a sandbox that was evicted from here and is not restored yet; else None."""
    record = manager.store.sandbox(sandbox_id)
    if record is None or record.phase != ENDED or manager.shared is None:
        return None
    form = manager.shared.read(_PLACE, sandbox_id)
    return form["snapshot"] if form is not None else None


def _check(manager: Manager, live: Live) -> SharedSnapshots:
    """Refuse what could not go on elsewhere, before anything is stopped."""
    if live.use.is_attended:
        raise LifecycleError("a client is being served by it", hint="wait until it is done")
    why = obstacle(live.spec)
    if not isinstance(live.inner, Continuable):
        why = f"the {live.backend} backend saves no memory"
    if live.inner.spec.secrets:
        why = "its programs hold secret placeholders of this sandbox"
    if manager.shared is None:
        why = "there is no snapshot_store"
    if why or manager.shared is None:
        raise Unsupported(why, backend=live.backend, operation="evict", hint="it goes on here")
    _check_room(manager, live)
    return manager.shared


def obstacle(spec: SandboxSpec) -> str:
    """Say why a sandbox of this spec cannot be restored on another host; empty if it can."""
    if spec.mounts or spec.memory_dir or spec.python_env:
        return "it has host directories mounted, which other nodes need not have"
    if spec.template != "default":
        return "its environment is on this node only"
    return ""


def _check_room(manager: Manager, live: Live) -> None:
    """Refuse where its memory would not fit: a sandbox ends even if what it wrote is cut off.

    Raises:
        StorageFull: There is no room for it.
    """
    used = live.inner.stats()
    wanted = (used.memory_bytes or 0) + (used.disk_bytes or 0)
    place = os.path.dirname(snapshots.catalogue_of(manager))
    if shutil.disk_usage(place).free < wanted:
        raise StorageFull(f"no room for {wanted:,} bytes of memory and files", hint="free space")


def _save(live: Live, metadata: Mapping[str, str], carry: Evicted) -> Snapshot:
    if live.state == SessionState.TERMINATED:
        raise LifecycleError("the sandbox has ended", hint="create a new one")
    carry.stop("required", live, replace(live.spec, network=live.inner.spec.network))
    save = live.inner.snapshot if carry.is_whole else live.inner.checkpoint
    return save(metadata)


def _share(
    manager: Manager, shared: SharedSnapshots, live: Live, saved: Snapshot, execs: list[Form]
) -> None:
    """Have it in the store, as a snapshot of its owner."""
    record = snapshots.record_of(live, saved)
    form = {
        "owner": live.client_id,
        "snapshot": saved.id,
        "state": str(live.state),
        "left_s": live.left_s(manager.clock.now()),
        "execs": execs,
    }
    try:
        shared.push(snapshots.catalogue_of(manager), saved.id, asdict(record))
        shared.write(form, _PLACE, live.sandbox_id)
    except BaseException:
        with suppress(RingfenceError):
            shared.remove(saved.id)
        raise


def _go_on(
    manager: Manager, live: Live, saved: Snapshot, carry: Evicted, *, was_suspended: bool
) -> None:
    """Restore it in its place: the store does not have it."""
    try:
        before, inner = live.inner, forks.restore_in_place(manager, live, saved)
    except BaseException:
        # What was saved is all that is left of it: its owner restores that here.
        with suppress(RingfenceError):
            manager.store.add_snapshot(snapshots.record_of(live, saved))
        manager.end(live, "not restored")
        raise
    carry.move(before, inner)
    if was_suspended:
        inner.suspend()
    manager.maker.backends[live.backend].delete_snapshot(saved.id)


def find(manager: Manager, sandbox_id: str, snapshot_id: str, owner: str) -> Form | None:
    """Find the form of an evicted sandbox that is restored here; None for any other sandbox."""
    if manager.shared is None:
        return None
    form = manager.shared.read(_PLACE, sandbox_id)
    is_it = form is not None and (form["snapshot"], form["owner"]) == (snapshot_id, owner)
    return form if is_it else None


def settle(manager: Manager, live: Live, form: Form) -> None:
    """Have a restored sandbox be in the state that it had, and remove what it was restored from."""
    with suppress(RingfenceError):  # it has ended meanwhile
        if form["left_s"] is not None:
            manager.extend(live.id, max(_LEAST_S, form["left_s"]))
        if form["state"] == SessionState.SUSPENDED:
            manager.suspend(live.id)
        elif form["state"] == SessionState.DETACHED:
            manager.detach(live.id)
    assert manager.shared is not None
    with suppress(RingfenceError):  # what is left costs room, and nothing else
        manager.shared.forget(_PLACE, live.sandbox_id)
        snapshots.delete(manager, form["snapshot"], live.client_id)
