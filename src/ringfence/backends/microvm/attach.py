"""Adding a mount to a machine that runs: in its hull, where it holds, and then in the machine."""

from __future__ import annotations

import marshal
import time

from ...errors import InvalidRequest, SandboxLost
from ...guest import channels
from ..local import journal
from ..local.answers import Refused
from ..local.denied import check_mount
from ..local.host import host
from .mounts import MOUNTS, MachineMounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...model.mount import Mount
    from ...model.session import ResolvedMount
    from .sandbox import MicrovmSandbox

_PATIENCE_S = 120.0  # a machine may have a tenth of a processor, and emulate the rest


def attach(sandbox: MicrovmSandbox, mount: Mount) -> ResolvedMount:
    """Do it, or leave nothing of it. Precondition: the caller has the sandbox's lock.

    Raises:
        InvalidRequest: The source does not exist, or it cannot be mounted there.
        SandboxLost: The machine does not answer.
    """
    check_mount(mount.target, sandbox.spec.deny)
    more = MachineMounts(sandbox.spec, sandbox.first_host_id, sandbox.mounts)
    try:
        more.add(mount)
        place = _show(sandbox, more)
        try:
            _tell(sandbox, more)
        except BaseException:
            if place:
                sandbox.enter("unmount", {"path": place}, [])
            raise
    except BaseException as exc:
        for each in more.protected:
            each.remove_placeholders()
        if isinstance(exc, Refused):
            raise InvalidRequest(f"{mount.target}: {exc.strerror}", field="mount") from exc
        raise
    finally:
        more.close()
    sandbox.protected += more.protected
    sandbox.attached.append(mount)
    sandbox.conditions.sources += [tree["source"] for tree in more.mounted]
    if more.protected:
        made = [made for each in sandbox.protected for made in each.placeholders]
        journal.erase(sandbox.note)
        sandbox.note = journal.note(sandbox.id, made)
    return more.mounts[-1]


def _show(sandbox: MicrovmSandbox, more: MachineMounts) -> str:
    """Have who serves files find it in the hull: where; empty for what is of the machine's own."""
    if not more.after:
        return ""
    made = [made for each in sandbox.protected for made in each.placeholders]
    request = {
        "trusted_root": host().trusted_root,
        "uid": 0,
        "gid": 0,
        "trees": more.mounted,
        "steps": more.after,
        "id": sandbox.id,
        "placeholders": [*made, *more.placeholders],
        "note": (journal.path_of(sandbox.id) or "") if more.placeholders else sandbox.note or "",
    }
    sandbox.enter("mount", request, more.fds)
    return next(str(path) for verb, path, *_ in more.after if verb == "bind")


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
            raise SandboxLost("the machine speaks nonsense", hint="create a new sandbox")
        raise Refused(int(code), text.decode("utf-8", "replace"))
