"""Saving and loading the writable layer of a native sandbox."""

from __future__ import annotations

import time

from ...errors import SnapshotCorrupt, Unsupported
from ...model.ids import new_id
from ...model.state import State
from ..local.answers import Refused
from .inner import replay, send
from .trees import Helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.snapshot import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .sandbox import NativeSandbox

_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def save(sandbox: NativeSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the writable layer, at one moment: the sandbox is stopped meanwhile."""
    if sandbox.image is not None:
        raise Unsupported(
            "the files of an image cannot be told from what was written over them yet",
            backend=sandbox.backend.name,
            operation="snapshot of a sandbox made from an image",
            hint="download what is to be kept: sandbox.files.download(PATH, TARGET)",
        )
    was_suspended = sandbox.state is State.SUSPENDED
    was = sandbox.state
    if not was_suspended:
        sandbox.suspend()
    try:
        helper = Helper(sandbox, "out", "/", as_root=True)
        try:
            snapshot = catalogue.save(
                helper.stream,
                new_id("snap"),
                sandbox.spec,
                sandbox.sizes.disk_bytes + sandbox.sizes.disk_bytes // 8 + _OVERHEAD_BYTES,
                session_id=sandbox.id,
                created_at=time.time(),
                metadata=dict(metadata),
            )
        except BaseException:
            helper.abandon()
            raise
        try:
            helper.finish("/")
        except BaseException:
            catalogue.delete(snapshot.id)
            raise
    finally:
        if not was_suspended:
            sandbox.resume()
            sandbox.restore_state(was)
    return snapshot


def load(sandbox: NativeSandbox, content: int) -> None:
    """Put saved files into a sandbox in which nothing has run yet.

    Raises:
        SnapshotCorrupt: The content could not be unpacked.
    """
    request = {
        "op": "tree",
        "plan": replay(sandbox),
        "direction": "in",
        "path": "/",
        "as_root": True,
        "cgroup_dirs": sandbox.group.directories,
    }
    try:
        send(sandbox, request, [content], None)
    except Refused as exc:
        raise SnapshotCorrupt(f"the snapshot was not restored: {exc.strerror}") from exc
