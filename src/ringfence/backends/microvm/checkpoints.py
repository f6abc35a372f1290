"""Saving a whole machine with all processes in it."""

from __future__ import annotations

import os

from ...errors import IoError, LifecycleError, SandboxLost
from ...guest import channels
from ...launcher import wire
from ...launcher.fuse import serving
from ..local.answers import Refused, answer
from ..local.jailed import saving
from . import written

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from .sandbox import MicrovmSandbox

_PATIENCE_S = 60.0


def save(sandbox: MicrovmSandbox, catalogue: Catalogue, metadata: Mapping[str, str]) -> Snapshot:
    """The guest's memory, which holds its files too. The machine ends when it is written down.

    Raises:
        LifecycleError: Something inside holds what is the host's: that could not be continued, and it goes
            on as before.
    """
    saving.settle(sandbox)
    sandbox.ask("freeze", True)
    try:
        _quiesce(sandbox)
    except LifecycleError:
        sandbox.ask("freeze", False)
        raise
    try:
        known = _known(sandbox)
        with catalogue.workspace(os.geteuid()) as directory:
            memory = f"{directory}/memory"

            def write_down(_pipe: int) -> None:
                with open(memory, "xb", buffering=0) as file:
                    written.begin(file.fileno(), sandbox.conditions, known, sandbox.attached)
                    sandbox.monitor.write_down(file.fileno())

            return saving.keep(sandbox, catalogue, metadata, write_down, memory=memory)
    finally:
        sandbox.terminate()


def _quiesce(sandbox: MicrovmSandbox) -> None:
    """Until nothing is under way between the machine and us, and nothing will be."""
    wire.send_raw(sandbox.control, channels.QUIESCE)
    said = sandbox.hear(_PATIENCE_S)
    if said.startswith(channels.BUSY):
        raise LifecycleError(
            f"streams of the host cannot be saved, and are open inside: {said.split()[-1].decode()} streams",
            hint=saving.GO_ON,
        )
    wire.send_raw(sandbox.control, channels.QUIESCE)
    if said != channels.QUIESCED or sandbox.hear(_PATIENCE_S) != channels.RESTED:
        sandbox.terminate()
        raise SandboxLost("the machine did not become idle")


def _known(sandbox: MicrovmSandbox) -> list[bytes]:
    """Collect the file tables of its kernel from the file servers."""
    files = [os.memfd_create("known", os.MFD_CLOEXEC) for _ in range(serving.LINES)]
    try:
        wire.send_raw(sandbox.share, b"W", files)
        answer(sandbox.share, _PATIENCE_S)
        return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in files]
    except (Refused, OSError) as exc:
        raise IoError(f"the machine's file tables were not saved: {exc}") from exc
    finally:
        for fd in files:
            os.close(fd)
