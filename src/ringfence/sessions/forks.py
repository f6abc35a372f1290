"""Forks of a session's sandbox, and merges between two of them."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidRequest
from ..fork import branches, merging
from ..model.acquire import AcquireOptions
from . import acquiring, snapshots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..model.fork import Merged
    from ..model.spec import SandboxSpec
    from .lease import Lease
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
) -> list[Lease]:
    """See `SessionManager.fork`."""
    branches.check(n, processes, live.sandbox_id, live.backend)
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
        for _ in range(n):
            made.append(acquiring.acquire(manager, wanted, options, live.client_id, most))
    except BaseException:
        for each in made:
            each.release()
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
