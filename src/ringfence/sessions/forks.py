"""Forks of a session's sandbox, and merges between two of them."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidRequest, LifecycleError
from ..fork import branches, merging
from ..model.acquire import AcquireOptions
from . import acquiring, snapshots
from .keys import digest
from .lease import Lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..model.fork import Merged
    from ..model.spec import SandboxSpec
    from .live import Live
    from .manager import SessionManager

TEMPORARY = {"ringfence.fork": "temporary"}
"""Metadata of the snapshot that a fork is made from, by which the next start knows it after a kill."""


def fork(
    manager: SessionManager,
    live: Live,
    n: int,
    processes: str,
    changes: Mapping[str, Any],
    judge: Callable[[SandboxSpec], SandboxSpec] | None,
    most: int | None,
    key: str,
) -> list[Lease]:
    """See `SessionManager.fork`."""
    branches.check(n, processes, live.sandbox_id)
    if not key:
        return _make(manager, live, [""] * n, changes, judge, most)
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
            return _make(manager, live, keys, changes, judge, most, request)
        if known.request != request:
            raise InvalidRequest("this idempotency key was used for another request", field="key")
        leases = [Lease(manager, each, newly_created=False) for each in made if each is not None]
        if len(leases) < n:
            raise LifecycleError("forks of this key have ended", hint="fork with another key")
        return leases


def _make(
    manager: SessionManager,
    live: Live,
    keys: list[str],
    changes: Mapping[str, Any],
    judge: Callable[[SandboxSpec], SandboxSpec] | None,
    most: int | None,
    request: str = "",
) -> list[Lease]:
    now = replace(live.spec, network=live.inner.spec.network)
    wanted = branches.spec_of(now, live.sandbox_id, **changes)
    if judge is not None:
        wanted = judge(wanted)
    saved = snapshots.take(manager, live, TEMPORARY)
    made: list[Lease] = []
    options = AcquireOptions(
        snapshot_id=saved.id, preferred_backend=live.backend, timeouts=live.timeouts, use_pool=False
    )
    try:
        for key in keys:
            each = replace(options, key=key)
            made.append(acquiring.acquire(manager, wanted, each, live.client_id, most, request))
    except BaseException:
        for lease in made:
            lease.release()
        raise
    finally:
        snapshots.delete(manager, saved.id, None)
    return made


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
    """See `SessionManager.merge`."""
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
    before = merging.before(restore, branch.inner.spec, base, directory)

    def theirs(file: Any) -> None:
        merging.pack(branch.inner.files, directory, file)

    files = target.inner.files
    return merging.into_sandbox(before, theirs, files, directory, prefer=prefer, dry_run=dry_run)
