"""Saving a gVisor sandbox: its writable layer, and its memory where that is asked for."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ...errors import IoError, LifecycleError, SandboxLost
from ...model.ids import new_id
from ..local import runtime
from ..local.answers import Refused, answer
from . import plan as planning
from .inspection import HostProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ...model.snapshot import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .sandbox import GvisorSandbox

_PATIENCE_S = 30.0
_ROOT = {"path": planning.ROOTFS, "shown": [runtime.PLACE]}
_OVERHEAD_BYTES = 64 << 20  # headers of very many small files


def save(sandbox: GvisorSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the guest's root, at one moment: the sandbox stands still meanwhile."""
    with _names(sandbox) as names, sandbox.stand_still():

        def pack(write: int) -> None:
            sandbox.enter("pack", _ROOT, [write, *names])

        return _keep(sandbox, catalogue, metadata, pack)


def save_with_memory(
    sandbox: GvisorSandbox, catalogue: Catalogue, metadata: Mapping[str, str]
) -> Snapshot:
    """The guest's memory too, with all that runs in it. gVisor ends when it has written that down.

    Raises:
        LifecycleError: Something inside holds what is the host's: that could not be continued.
    """
    _settle(sandbox)
    command = {
        "argv": [
            *(planning.RUNSC, f"--root={planning.STATE}", *sandbox.flags()),
            *("checkpoint", "--image-path=/proc/self/fd/3", sandbox.id),
        ],
        "env": {"PATH": "/bin"},
        **_ROOT,
    }
    workspace = catalogue.workspace(HostProcess(sandbox.pid).uid)
    with _names(sandbox) as names, workspace as directory:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        def pack(write: int) -> None:
            sandbox.enter("checkpoint", command, [place, write, *names])

        try:
            return _keep(
                sandbox, catalogue, metadata, pack, memory=f"{directory}/{planning.MEMORY}"
            )
        finally:
            os.close(place)
            sandbox.terminate()


@contextlib.contextmanager
def _names(sandbox: GvisorSandbox) -> Iterator[list[int]]:
    """The descriptor that tells an image's files from what was changed; nothing without an image."""
    names = [] if sandbox.image is None else [sandbox.image.open_names()]
    try:
        yield names
    finally:
        for fd in names:
            os.close(fd)


def _settle(sandbox: GvisorSandbox) -> None:
    reply = sandbox.request("settle", ())
    try:
        answer(reply, _PATIENCE_S)
        answer(reply, _PATIENCE_S)  # until the agent has let go of its end
    except Refused as exc:
        raise LifecycleError(
            f"what is the host's cannot be saved, and is open in: {exc.strerror}",
            hint="close files and connections; start what is to go on with its streams in files: "
            "sh -c 'program >log 2>&1 </dev/null &'",
        ) from exc
    except SandboxLost:
        sandbox.require_awake()
    finally:
        reply.close()


def _keep(
    sandbox: GvisorSandbox,
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
