"""A merge of sandboxes of this process; see `Sandbox.merge`."""

from __future__ import annotations

from functools import partial

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.calls import StrPath
    from ..model.fork import Merged
    from ..model.session import Snapshot
    from .sync import Sandbox


def merge(
    branch: Sandbox,
    into: Sandbox | StrPath,
    *,
    base: Snapshot | str,
    path: StrPath,
    prefer: str | None,
    dry_run: bool,
) -> Merged:
    """See `Sandbox.merge`."""
    from ..backends.optional import Layered
    from ..backends.registry import backend_named
    from ..fork import merging
    from .sync import Sandbox

    directory = merging.check(path, prefer)
    home = branch._home or backend_named(branch.session.backend)
    snapshot_id = str(getattr(base, "id", base))
    inner = branch._inner
    layered = inner.sides if isinstance(inner, Layered) else None
    sides = partial(merging.sides_of, inner, layered, home.restore, snapshot_id, directory)
    if into is branch:
        merging.refuse_itself()
    if isinstance(into, Sandbox):
        files = into._inner.files
        return merging.into_sandbox(sides, files, directory, prefer=prefer, dry_run=dry_run)
    if not isinstance(into, str) and not hasattr(into, "__fspath__"):
        raise InvalidRequest("must be a Sandbox or a directory of this host", field="into")
    return merging.into_host(
        sides, str(into), branch.spec, directory, prefer=prefer, dry_run=dry_run
    )
