"""Adding a mount to a machine that runs: in its jail, where it holds, and then in the machine."""

from __future__ import annotations

import marshal
import time

from ...errors import SandboxLost
from ...guest import channels
from ..local.answers import Refused
from ..local.mounts.denied import check_mount
from .mounts import MOUNTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...model.mount import Mount
    from .mounts import MachineMounts
    from .sandbox import MicrovmSandbox

_PATIENCE_S = 120.0  # a machine may have a tenth of a processor, and emulate the rest


def attach(sandbox: MicrovmSandbox, mount: Mount, more: MachineMounts) -> None:
    """Do it, or leave nothing of it. Precondition: the caller has the sandbox's lock.

    Raises:
        InvalidRequest: The source does not exist, or it cannot be mounted there.
        Refused: As one of the kernels told it.
        SandboxLost: The machine does not answer.
    """
    check_mount(mount.target, sandbox.spec.deny)
    more.add(mount)
    if more.after:
        sandbox.mount_in_jail(more)
    try:
        _tell(sandbox, more)
    except BaseException:
        if more.after:
            sandbox.enter("unmount", {"path": more.places[mount.target]}, [])
        raise
    sandbox.attached.append(mount)
    sandbox.conditions.sources += [tree["source"] for tree in more.mounted]


def _tell(sandbox: MicrovmSandbox, more: MachineMounts) -> None:
    """Have the machine's PID 1 mount it, and hear how that went: see `guest.machine.Mounting`.

    Raises:
        Refused: As the guest's kernel told it.
    """
    first = sum(1 for each in sandbox.mounts if each.host_path)
    sandbox.told += 1
    told: Any = {
        "number": sandbox.told,
        "uid": sandbox.uid,
        "gid": sandbox.uid,
        "steps": more.inner,
        "trees": [
            (f"{MOUNTS}/{first + i}", tree["attributes"]) for i, tree in enumerate(more.mounted)
        ],
    }
    with sandbox.awake():
        sandbox.tell(channels.MOUNTS + marshal.dumps(told))
        ends, number = time.monotonic() + _PATIENCE_S, b""
        while number != b"%d" % sandbox.told:  # others were given up waiting for
            number, _, said = sandbox.hear(max(0.1, ends - time.monotonic())).partition(b" ")
            if time.monotonic() > ends:
                raise SandboxLost("the machine does not answer", hint="create a new sandbox")
    if said[:1] != b"O":
        code, _, text = said[1:].partition(b" ")
        if not code.isdigit():
            raise SandboxLost("the machine sent an invalid message", hint="create a new sandbox")
        raise Refused(int(code), text.decode("utf-8", "replace"))
