"""Saving a gVisor sandbox: its writable layer, and its memory where that is asked for."""

from __future__ import annotations

import contextlib
import os

from ..local.jailed.saving import keep, settle
from ..local.mounts import runtime
from . import places
from .inspection import HostProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .sandbox import GvisorSandbox


def _root(sandbox: GvisorSandbox) -> dict[str, Any]:
    return {"path": places.ROOTFS, "shown": [runtime.PLACE, *sandbox.spec.deny]}


def save(sandbox: GvisorSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """Everything in the guest's root, at one moment: the sandbox stands still meanwhile."""
    with _names(sandbox) as names, sandbox.stand_still():

        def pack(write: int) -> None:
            sandbox.enter("pack", _root(sandbox), [write, *names])

        return keep(sandbox, catalogue, metadata, pack)


def save_with_memory(
    sandbox: GvisorSandbox, catalogue: Catalogue, metadata: Mapping[str, str]
) -> Snapshot:
    """The guest's memory too, with all that runs in it. gVisor ends when it has written that down.

    Raises:
        LifecycleError: Something inside holds what is the host's: that could not be continued.
    """
    if not sandbox.is_held:
        settle(sandbox)
    command = {
        "argv": [
            *(places.RUNSC, f"--root={places.STATE}", *sandbox.flags()),
            *("checkpoint", "--image-path=/proc/self/fd/3", sandbox.id),
        ],
        "env": {"PATH": "/bin"},
        **_root(sandbox),
    }
    workspace = catalogue.workspace(HostProcess(sandbox.pid).uid)
    with _names(sandbox) as names, workspace as directory:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        def pack(write: int) -> None:
            sandbox.enter("checkpoint", command, [place, write, *names])

        try:
            return keep(sandbox, catalogue, metadata, pack, memory=f"{directory}/{places.MEMORY}")
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
