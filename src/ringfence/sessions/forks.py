"""Forks of a session's sandbox, and merges between two of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from ..backends.optional import Continuable, Layered
from ..errors import InvalidRequest, LifecycleError, RingfenceError, Unsupported
from ..fork import branches, merging
from ..model.acquire import AcquireOptions
from ..model.client_session import SessionState
from ..model.session import OF_FORK
from . import acquiring, snapshots
from .keys import digest
from .lease import Lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..backends.protocol import BackendSandbox
    from ..model.fork import Merged
    from ..model.session import Snapshot
    from ..model.spec import SandboxSpec
    from .live import Live
    from .manager import SessionManager
    from .parts import Manager

TEMPORARY = {OF_FORK: "temporary"}
"""Metadata of the snapshot that a fork is made from, by which the next start knows it after a kill."""


_ATTEMPTS = 2  # to restore what has been saved: it is nowhere else then


class Carry:
    """Take nothing along with forks beside files; see `execs.live_forks`.

    Attributes:
        is_whole: The snapshot of the sandbox saves its memory too and ends it; another one takes its place.
    """

    is_whole = False

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        """Stop what goes along.

        Args:
            spec: Of the forks.

        Raises:
            Unsupported: Something that is required cannot be copied; all goes on.
        """
        del spec
        branches.check(1, processes, live.sandbox_id)

    def move(self, before: BackendSandbox, inner: BackendSandbox) -> None:
        """Have all go on in the sandbox that was restored in its place. Precondition: `is_whole`."""

    def release(self) -> None:
        """Let it go on."""

    def load(self) -> None:
        """Copy the memory that it had. Precondition: `release`."""

    def put_into(self, fork: Live) -> None:
        """Have it go on in a fork, too.

        Raises:
            Unsupported: The kernel refused.
        """

    def leave_out(self, reason: str) -> None:
        """A fork got files only."""

    def remember(self, fork: Live) -> None:
        """A fork was made earlier, under the same key."""

    def close(self) -> None:
        """Let go of all that is kept; idempotent."""


def fork(
    manager: SessionManager,
    live: Live,
    n: int,
    processes: str,
    changes: Mapping[str, Any],
    judge: Callable[[SandboxSpec], SandboxSpec] | None,
    most: int | None,
    key: str,
    carry: Carry,
) -> list[Lease]:
    branches.check_arguments(n, processes)
    make = partial(_make, manager, live, processes, changes, judge, most, carry)
    if not key:
        return make([""] * n)
    told = {
        name: getattr(each, "to_json", lambda each=each: each)() for name, each in changes.items()
    }
    request = digest(["fork", live.sandbox_id, n, processes, told])
    # The last one has the key itself: it is there when all are.
    keys = [f"fork-{digest([key, number])[:32]}" for number in range(1, n)] + [key]
    with manager.keys.turn(live.client_id, f"fork {key}"):
        known = manager.store.session_under_key(live.client_id, key)
        made = [manager.index.under_key(live.client_id, each) for each in keys]
        if known is None:
            for each in made:
                if each is not None:  # a kill came in the middle
                    manager.end(each, "asked again")
            return make(keys, request)
        if known.request != request:
            raise InvalidRequest("this idempotency key was used for another request", field="key")
        leases = [Lease(manager, each, newly_created=False) for each in made if each is not None]
        if len(leases) < n:
            raise LifecycleError("forks of this key have ended", hint="fork with another key")
        for each in made:
            if each is not None:
                carry.remember(each)
        return leases


def _make(
    manager: SessionManager,
    live: Live,
    processes: str,
    changes: Mapping[str, Any],
    judge: Callable[[SandboxSpec], SandboxSpec] | None,
    most: int | None,
    carry: Carry,
    keys: list[str],
    request: str = "",
) -> list[Lease]:
    now = replace(live.spec, network=live.inner.spec.network)
    wanted = branches.spec_of(now, live.sandbox_id, **changes)
    if judge is not None:
        wanted = judge(wanted)
    saved = save(manager, live, wanted, processes, carry)
    made: list[Lease] = []
    options = AcquireOptions(
        snapshot_id=saved.id, preferred_backend=live.backend, timeouts=live.timeouts, use_pool=False
    )
    try:
        carry.release()
        carry.load()
        for key in keys:
            each = replace(options, key=key)
            begin = partial(acquiring.acquire, manager, wanted, each, live.client_id, most, request)
            made.append(begin())
            try:
                carry.put_into(_live(manager, made[-1]))
            except Unsupported as exc:
                if processes != "auto" or carry.is_whole:
                    raise
                made.pop().release()
                made.append(begin())
                carry.leave_out(exc.message)
    except BaseException:
        for lease in made:
            lease.release()
        raise
    finally:
        carry.close()
        snapshots.delete(manager, saved.id, None)
    return made


def save(
    manager: SessionManager, live: Live, spec: SandboxSpec, processes: str, carry: Carry
) -> Snapshot:
    """Stop what goes along, and save a sandbox for its forks. On failure all goes on.

    Args:
        spec: Of the forks.

    Raises:
        LifecycleError: It has ended; or it was saved with its memory, and could not be restored.
    """
    moves = processes != "none" and isinstance(live.inner, Continuable)
    try:
        with live.move() if moves else nullcontext():
            carry.stop(processes, live, spec)
            if carry.is_whole:
                return _save_whole(manager, live, carry)
            return snapshots.take(manager, live, TEMPORARY)
    except BaseException:
        carry.close()
        raise


def _save_whole(manager: SessionManager, live: Live, carry: Carry) -> Snapshot:
    """Save a sandbox with its memory, which ends it, and have it go on. Precondition: `Live.move`."""
    before = live.inner
    if live.state == SessionState.TERMINATED:
        raise LifecycleError("the sandbox has ended", hint="create a new one")
    saved = before.snapshot(TEMPORARY)
    try:
        inner = restore_in_place(manager, live, saved)
    except BaseException:
        manager.maker.backends[live.backend].delete_snapshot(saved.id)
        manager.end(live, "fork")
        raise
    carry.move(before, inner)
    return snapshots.own(manager, live, saved)


def restore_in_place(manager: Manager, live: Live, saved: Snapshot) -> BackendSandbox:
    """Restore a sandbox that was saved with its memory, as what its session has. Precondition: `Live.move`."""
    spec = live.inner.spec.altered(id=live.sandbox_id)
    for attempt in range(_ATTEMPTS):
        try:
            inner = manager.maker.restore_again(live.backend, live.client_id, saved.id, spec)
            break
        except RingfenceError:
            if attempt + 1 == _ATTEMPTS:
                raise
    live.lead_to(inner)
    return inner


def _live(manager: SessionManager, lease: Lease) -> Live:
    found = manager.index.find(lease.id)
    if found is None:
        raise LifecycleError("a fork has ended while it was made")
    return found


def merge(
    manager: SessionManager,
    branch: Live,
    target: Live,
    base: str,
    path: str,
    prefer: str | None,
    dry_run: bool,
    client_id: str | None,
) -> Merged:
    directory = merging.check(path, prefer)
    if target is branch:
        merging.refuse_itself()
    if snapshots.need(manager, base, client_id).backend != branch.backend:
        raise InvalidRequest(
            "that snapshot is of another backend",
            field="base",
            hint=f"name a snapshot of a sandbox in {branch.backend}",
        )
    restore = manager.maker.backends[branch.backend].restore
    inner = branch.inner
    layered = inner.sides if isinstance(inner, Layered) else None
    sides = partial(merging.sides_of, inner, layered, restore, base, directory)
    files = target.inner.files
    return merging.into_sandbox(sides, files, directory, prefer=prefer, dry_run=dry_run)
