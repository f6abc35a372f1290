"""Landlock rules of a sandbox without mounts: what of the host it may read, and its own directories."""

from __future__ import annotations

import os
import stat

from ...errors import InvalidRequest, Unsupported
from ...model import capabilities as can
from ...policy import landlock
from ..local.agents import agent_code
from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...model.mount import Mount
    from ...model.spec import SandboxSpec

LEAST_ABI = 3  # Linux 6.2: older ones do not judge truncation
_READ = landlock.READ_FILE | landlock.READ_DIR | landlock.EXECUTE
_READ_FILE = landlock.READ_FILE | landlock.EXECUTE
_WRITE = _READ | landlock.WRITE_FILE | landlock.REMOVE_DIR | landlock.REMOVE_FILE
_WRITE |= landlock.MAKE_DIR | landlock.MAKE_REG | landlock.MAKE_FIFO | landlock.MAKE_SYM
_WRITE |= landlock.REFER | landlock.TRUNCATE
_DEVICE = landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Besides those that the template shows: nothing in them is a secret, and no copy can take their place.
_ETC = (
    *("passwd", "group", "nsswitch.conf", "localtime", "timezone"),
    *("os-release", "protocols", "ld.so.conf", "ld.so.conf.d", "mime.types", "terminfo"),
    *("debian_version", "inputrc", "bash.bashrc", "profile", "profile.d", "perl"),
)
_OTHERS = ("/proc", "/sys/devices/system/cpu")


def system_rules() -> list[tuple[str, int]]:
    """Rules for the parts of the host that every sandbox may read and execute."""
    paths = [source for source, target, _ in template.shown() if not target.startswith("/dev/")]
    paths += [source for source, _target, _ in agent_code.interpreter()[1]]
    paths += [path for path in (f"/etc/{name}" for name in _ETC) if os.path.exists(path)]
    rules = [(path, _READ if os.path.isdir(path) else _READ_FILE) for path in paths]
    rules += [(path, _READ & ~landlock.EXECUTE) for path in _OTHERS if os.path.isdir(path)]
    return rules + [(f"/dev/{name}", _DEVICE) for name in _DEVICES]


def own_rule(path: str, *, sockets: bool) -> tuple[str, int]:
    """The rule for a directory of the sandbox's own."""
    return path, _WRITE | (landlock.MAKE_SOCK if sockets else 0)


def handled(abi: int) -> tuple[int, int, int, int]:
    """Accesses that need a rule, of files and of the network; scopes; and the ABI that is used."""
    plan = landlock.plan_landlock(min(abi, landlock.NEWEST_ABI), writable=(), network=False)
    return plan.handled_fs, plan.handled_net, plan.scoped, min(abi, landlock.NEWEST_ABI)


def check_mounts(spec: SandboxSpec, name: str) -> None:
    """Refuse mounts that take a mount: at another path, of a directory of its own, or one in another.

    Raises:
        InvalidRequest, Unsupported: `field` names the part.
    """
    targets: list[str] = []
    for mount in spec.mounts:
        if not mount.is_host_path or os.path.realpath(mount.source) != mount.target:
            own = os.path.realpath(mount.source) if mount.is_host_path else ""
            raise Unsupported(
                f"{mount.source or 'a directory of its own'} cannot be shown at {mount.target}: "
                "without a mount namespace a path inside is the path on the host",
                backend=name,
                operation=can.MOUNT,
                field="mounts.target",
                hint=f"use the source's own path as the target: {own}"
                if own
                else "write to the home directory instead",
            )
        if mount.target == "/" or mount.target.startswith(("/proc", "/sys", "/dev")):
            raise InvalidRequest(f"{mount.target} cannot be shown", field="mounts.target")
        if mount.is_writable:
            raise Unsupported(
                "Landlock cannot protect paths such as .git/hooks inside a writable directory",
                backend=name,
                operation=can.PROTECTED_PATHS,
                field="mounts.access",
                hint="mount it read-only, and copy results out with the files API",
            )
        targets.append(mount.target)


def open_mounts(mounts: Sequence[Mount]) -> list[tuple[int, int]]:
    """Descriptors of the sources, without following any link, and the accesses that each gets.

    Raises:
        InvalidRequest: A link has come to be on the way.
    """
    opened: list[tuple[int, int]] = []
    try:
        for mount in mounts:
            fd = os.open(mount.target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.append((fd, _READ if stat.S_ISDIR(os.fstat(fd).st_mode) else _READ_FILE))
            if os.readlink(f"/proc/self/fd/{fd}") != mount.target:
                raise InvalidRequest(f"{mount.source}: a path with links", field="mounts.source")
    except BaseException:
        for fd, _access in opened:
            os.close(fd)
        raise
    return opened
