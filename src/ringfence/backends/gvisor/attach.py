"""Mounts added to a running gVisor sandbox: in its jail, which enforces them, and then in the
guest.

gVisor's file server has a copy of the jail's mounts, to which what is mounted in a shared one is added by the
host's kernel. So the guest's kernel is served it without having been told, at a place where nobody inside may
look; a program of ours, which runs inside for a moment, mounts it where it is to be. See decision 0111.
"""

from __future__ import annotations

import os

from ...errors import Unsupported
from ...launcher.machine_code.mount_program import MountProgram
from ...linux import mounts
from ...model.session import ResolvedMount
from ..local.host.facts import host
from ..local.mounts.denied import check_mount
from ..local.session import is_below, session_root
from . import places
from .asked import NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.mount import Mount
    from ..local.jailed.jail_mounts import JailMounts
    from .sandbox import GvisorSandbox

NOT_HERE = "what mounts inside is a program for x86-64"
_RIGHTS = ("CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_CHOWN")
_GUEST_USER = 0  # as gVisor itself counts: see `plan.id_map`


def attach(sandbox: GvisorSandbox, mount: Mount, more: JailMounts) -> None:
    """Do it, or leave nothing of it. Precondition: the caller has the sandbox's lock.

    Raises:
        InvalidRequest: The source does not exist, or the target is denied.
        Refused: As one of the kernels told it.
        Unsupported: On other processors.
    """
    if not is_here():
        raise Unsupported(NOT_HERE, backend=NAME, operation="attach")
    check_mount(mount.target, sandbox.spec.deny)
    if mount.is_host_path:
        place = more.add_of_host(mount)
        sandbox.mount_in_jail(more)
        is_dir = os.path.isdir(more.mounted[-1]["source"])
        _show(sandbox, place, mount.target, is_dir=is_dir)
        return
    own = f"{session_root(sandbox.spec)}/{mount.source}" if mount.source else mount.target
    program = MountProgram()
    program.own(own, _GUEST_USER)
    if mount.is_writable and own != mount.target:
        program.bind(own, mount.target)
    _run(sandbox, program)
    if mount.is_writable:
        more.places[mount.target] = _in_jail(more, own)
    else:
        # The host's kernel makes it read-only, as this one would not.
        place = f"{places.MOUNTS}/{more.count}"
        more.after += [
            ("dir", f"{places.POINTS}/{more.count}", 0o755, False),
            ("bind_inside", _in_jail(more, own), place, mounts.MOUNT_ATTR_RDONLY),
        ]
        sandbox.mount_in_jail(more)
        _show(sandbox, place, mount.target, is_dir=True)
        more.places[mount.target] = place
    more.mounts.append(ResolvedMount(mount.target, mount.access))


def is_here() -> bool:
    """Return whether this processor can run the mount program."""
    return os.uname().machine == "x86_64"


def _in_jail(more: JailMounts, path: str) -> str:
    around = [target for target in more.places if is_below(path, target)]
    if not around:
        return places.ROOTFS + path
    target = max(around, key=len)
    return more.places[target] + path.removeprefix(target)


def _show(sandbox: GvisorSandbox, place: str, target: str, *, is_dir: bool) -> None:
    program = MountProgram()
    program.show(places.IN_GUEST + place.removeprefix(places.MOUNTS), target, is_dir=is_dir)
    try:
        _run(sandbox, program)
    except BaseException:
        sandbox.enter("unmount", {"path": place}, [])
        raise
    sandbox.shows_later = True


def _run(sandbox: GvisorSandbox, program: MountProgram) -> None:
    """Have it run inside, with the rights of who is root of all that is inside."""
    # Directories on the way are that one's, where there is more than one id.
    user = sandbox.uid if host().trusted_root else _GUEST_USER
    name = f"/mount-{sandbox.id}"
    argv = [
        *(places.RUNSC, f"--root={places.STATE}", *sandbox.flags()),
        *("exec", f"--user={user}:{user}", *(f"--cap={right}" for right in _RIGHTS)),
        *("--cwd=/", sandbox.id, places.IN_GUEST + name),
    ]
    request = {
        "argv": argv,
        "env": {"PATH": "/bin"},
        "file": (places.POINTS + name, program.packed()),
    }
    with sandbox.awake():
        sandbox.enter("run", request, [])
