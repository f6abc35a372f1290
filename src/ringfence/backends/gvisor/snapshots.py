"""Saving the writable layer of a gVisor sandbox. It is loaded when another one is built."""

from __future__ import annotations

import os
import threading
import time

from ...errors import IoError
from ...model.ids import new_id
from . import plan as planning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.snapshot import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .sandbox import GvisorSandbox

_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def save(sandbox: GvisorSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the guest's root, at one moment: the sandbox stands still meanwhile."""
    with sandbox.stand_still():
        read, write = os.pipe2(os.O_CLOEXEC)
        problems: list[BaseException] = []
        thread = threading.Thread(target=_pack, args=(sandbox, write, problems))
        thread.start()
        try:
            snapshot = catalogue.save(
                read,
                new_id("snap"),
                sandbox.spec,
                sandbox.sizes.disk_bytes + sandbox.sizes.disk_bytes // 8 + _OVERHEAD_BYTES,
                session_id=sandbox.id,
                created_at=time.time(),
                metadata=dict(metadata),
            )
        finally:
            os.close(read)
            thread.join()
        if problems:
            catalogue.delete(snapshot.id)
            raise IoError(f"the snapshot was not saved: {problems[0]}") from problems[0]
    return snapshot


def _pack(sandbox: GvisorSandbox, write: int, problems: list[BaseException]) -> None:
    try:
        try:
            sandbox.enter("pack", {"path": planning.ROOTFS}, [write])
        finally:
            os.close(write)
    except BaseException as exc:  # noqa: BLE001  the other thread must hear of it
        problems.append(exc)
