"""From a stream that somebody inside writes to a snapshot in the catalogue, or nothing at all."""

from __future__ import annotations

import os
import threading
import time

from ...errors import IoError
from ...model.ids import new_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from .sizes import Sizes

    class Saved(Protocol):
        """The sandbox that is saved."""

        id: str
        spec: SandboxSpec
        sizes: Sizes


_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def keep(
    sandbox: Saved,
    catalogue: Catalogue,
    metadata: Mapping[str, str],
    pack: Callable[[int], None],
    *,
    memory: str = "",
) -> Snapshot:
    """What `pack` writes becomes a snapshot; nothing is kept where it fails."""
    read, write = os.pipe2(os.O_CLOEXEC)
    problems: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(pack, write, problems))
    thread.start()
    failure: BaseException | None = None
    try:
        snapshot = catalogue.save(
            read,
            new_id("snap"),
            sandbox.spec,
            sandbox.sizes.disk_bytes + sandbox.sizes.disk_bytes // 8 + _OVERHEAD_BYTES,
            session_id=sandbox.id,
            created_at=time.time(),
            metadata=dict(metadata),
            memory=memory,
        )
    except IoError as exc:
        failure = exc
    finally:
        os.close(read)
        thread.join()
    if problems and failure is None:
        catalogue.delete(snapshot.id)
    if problems or failure is not None:
        cause = problems[0] if problems else failure
        raise IoError(f"the snapshot was not saved: {cause}") from cause
    return snapshot


def _run(pack: Callable[[int], None], write: int, problems: list[BaseException]) -> None:
    try:
        try:
            pack(write)
        finally:
            os.close(write)
    except BaseException as exc:  # noqa: BLE001  the other thread must hear of it
        problems.append(exc)
