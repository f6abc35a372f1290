"""Saving and loading the writable layer of a native sandbox."""

from __future__ import annotations

import os
import time

from ...errors import LifecycleError, ResourceExhausted, SnapshotCorrupt
from ...model.base.ids import new_id
from ...model.state import State
from ..local.answers import Refused
from .inner import replay, send
from .trees import Helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .live import LiveSandbox

_PIECE = 1 << 20
_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def save(sandbox: LiveSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the writable layer, at one moment: the sandbox is stopped meanwhile."""
    was_suspended = sandbox.state is State.SUSPENDED
    was = sandbox.state
    if not was_suspended:
        sandbox.suspend()
    names = -1 if sandbox.image is None else sandbox.image.open_names()
    try:
        helper = writable_layer(sandbox, names)
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
        if names >= 0:
            os.close(names)
        if not was_suspended:
            sandbox.resume()
            sandbox.restore_state(was)
    return snapshot


def save_layer(sandbox: LiveSandbox, path: str) -> None:
    """Write the changes to the image as a tar stream to the new file `path`."""
    if sandbox.image is None:
        raise LifecycleError("this sandbox did not start from an image")
    names = sandbox.image.open_names()
    try:
        helper = writable_layer(sandbox, names)
        try:
            with open(path, "xb") as file:
                while data := os.read(helper.stream, _PIECE):
                    file.write(data)
        except OSError as exc:
            helper.abandon()
            raise ResourceExhausted(f"{path}: {exc.strerror}", hint="free disk space") from exc
        except BaseException:
            helper.abandon()
            raise
        helper.finish("/")
    finally:
        os.close(names)


def writable_layer(sandbox: LiveSandbox, names: int) -> Helper:
    """A helper that streams what is not the template's or the image's.

    Args:
        names: Descriptor of the names of the image's files; -1 without an image.
    """
    if names < 0:
        return Helper(sandbox, "out", "/", as_root=True)
    return Helper(sandbox, "layer out", "/", as_root=True, also=[names])


def load(sandbox: LiveSandbox, content: int) -> None:
    """Put saved files into a sandbox in which nothing has run yet.

    Raises:
        SnapshotCorrupt: The content could not be unpacked.
    """
    request = {
        "op": "tree",
        "plan": replay(sandbox),
        "direction": "in" if sandbox.image is None else "layer in",
        "path": "/",
        "as_root": True,
        "cgroup_dirs": sandbox.group.directories,
    }
    try:
        send(sandbox, request, [content], None)
    except Refused as exc:
        raise SnapshotCorrupt(f"the snapshot was not restored: {exc.strerror}") from exc
