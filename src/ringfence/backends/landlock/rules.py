"""Landlock rules of a sandbox without mounts: what of the host it may read, and its own directories."""

from __future__ import annotations

import errno
import os
import stat

from ...errors import InvalidRequest, Unsupported
from ...model import capabilities as can
from ...model.mount import MEMORY_DIR, READ_WRITE, Mount
from ...policy import landlock
from ...policy.protected import wanted
from ..command import place
from ..local.agents import agent_code
from ..local.mounts import template
from ..local.session import is_below, no_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...model.spec import SandboxSpec

LEAST_ABI = 3  # Linux 6.2: older ones do not judge truncation
READ = landlock.READ_FILE | landlock.READ_DIR | landlock.EXECUTE
_READ_FILE = landlock.READ_FILE | landlock.EXECUTE
_WRITE = READ | landlock.WRITE_FILE | landlock.REMOVE_DIR | landlock.REMOVE_FILE
_WRITE |= landlock.MAKE_DIR | landlock.MAKE_REG | landlock.MAKE_FIFO | landlock.MAKE_SYM
_WRITE |= landlock.REFER | landlock.TRUNCATE
_DEVICE = landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE
# Of a mount: whether it is a directory, and whether it is writable.
_RIGHTS = {
    (True, False): READ,
    (True, True): _WRITE,
    (False, False): _READ_FILE,
    (False, True): _READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE,
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Besides those that the template shows: nothing in them is a secret, and no copy can take their place.
_ETC = (
    *("passwd", "group", "nsswitch.conf", "localtime", "timezone"),
    *("os-release", "protocols", "ld.so.conf", "ld.so.conf.d", "mime.types", "terminfo"),
    *("debian_version", "inputrc", "bash.bashrc", "profile", "profile.d", "perl"),
)
_OTHERS = ("/proc", "/sys/devices/system/cpu")


def system_rules(handled_fs: int) -> list[tuple[str, int]]:
    """Rules for the parts of the host that every sandbox may read and execute."""
    paths = [source for source, target, _ in template.shown() if not target.startswith("/dev/")]
    paths += [source for source, _target, _ in agent_code.interpreter()[1]]
    paths += [path for path in (f"/etc/{name}" for name in _ETC) if os.path.exists(path)]
    if _names_this_host_only("/etc/hosts"):
        paths.append("/etc/hosts")
    rules = [(path, READ if os.path.isdir(path) else _READ_FILE) for path in paths]
    rules += [(path, READ & ~landlock.EXECUTE) for path in _OTHERS if os.path.isdir(path)]
    rules += [(f"/dev/{name}", _DEVICE) for name in _DEVICES]
    # The controlling terminal of the caller, which is its sandbox's own, or none.
    return [*rules, ("/dev/tty", _DEVICE | handled_fs & landlock.IOCTL_DEV)]


def python_mounts(spec: SandboxSpec) -> list[Mount]:
    """The caller's Python and its packages, if they are to be shown."""
    found = template.python_environment() if spec.python_env else []
    return [Mount(target, source) for source, target, _ in found]


def check_python(spec: SandboxSpec, name: str) -> None:
    """Refuse a Python below a directory that the user of a sandbox of root's may not enter.

    Raises:
        Unsupported: It is; the message names the directory.
    """
    for mount in python_mounts(spec):
        path = mount.source
        while path != "/":
            path = os.path.dirname(path)
            if not os.stat(path).st_mode & stat.S_IXOTH:
                raise Unsupported(
                    f"this Python lies below {path}, which the sandbox's own user may not enter",
                    backend=name,
                    operation="python_env",
                    field="python_env",
                    hint="use a Python below /usr or /opt, or run as an ordinary user",
                )


def _names_this_host_only(path: str) -> bool:
    """Return whether a file of hosts tells of no other host than this: then `localhost` is found by it."""
    own = os.uname().nodename
    try:
        with open(path, encoding="ascii") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except (OSError, ValueError):
        return False
    return all(own in line or _is_local(line[0]) for line in lines if line)


def _is_local(address: str) -> bool:
    """Loopback, or one of the names for groups of hosts that Debian writes."""
    return address == "::1" or address.startswith(("127.", "fe00::", "ff00::", "ff02::"))


def own_rule(path: str, *, sockets: bool) -> tuple[str, int]:
    return path, _WRITE | (landlock.MAKE_SOCK if sockets else 0)


def handled(abi: int) -> tuple[int, int, int, int]:
    """Accesses that need a rule, of files and of the network; scopes; and the ABI that is used."""
    plan = landlock.plan_landlock(min(abi, landlock.NEWEST_ABI), writable=(), network=False)
    return plan.handled_fs, plan.handled_net, plan.scoped, min(abi, landlock.NEWEST_ABI)


def shown(spec: SandboxSpec) -> list[Mount]:
    """Directories and files of the host that a sandbox shows: its mounts, and its memory's directory."""
    memory = os.path.realpath(spec.memory_dir or "")
    mounts = [mount for mount in spec.mounts if not is_own(mount)]
    return [*mounts, *([Mount(memory, memory, READ_WRITE, ())] if spec.memory_dir else [])]


def is_own(mount: Mount) -> bool:
    """Return whether it is a writable directory of the sandbox's own, which lies beside its home."""
    return not mount.source and mount.is_writable


def check_mounts(spec: SandboxSpec, name: str, *, is_owner: bool) -> None:
    """Refuse mounts that take a mount: of the host at another path, or one in another.

    Args:
        is_owner: Programs run as this process's user, who may write to what it mounts.

    Raises:
        InvalidRequest, Unsupported: `field` names the part.
    """
    if spec.memory_dir and not os.path.isdir(spec.memory_dir):
        mistake = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise no_source(Mount(MEMORY_DIR, spec.memory_dir), mistake)
    mounts = shown(spec)
    writable = [mount.target for mount in mounts if mount.is_writable]
    for mount in filter(is_own, spec.mounts):
        _check_target(mount)
    own = os.path.realpath(place.base())
    for mount in mounts:
        _check_path(mount, name)
        if is_below(own, mount.target) or is_below(mount.target, own):
            raise InvalidRequest(
                f"{mount.target} has the sandboxes' own directories", field="mounts.source"
            )
        if mount.is_writable:
            _check_writable(mount, spec, name, is_owner=is_owner)
        elif any(is_below(mount.target, path) for path in writable):
            raise Unsupported(
                f"{mount.target} lies in a writable mount, below which Landlock takes no right away",
                backend=name,
                operation=can.MOUNT,
                field="mounts.access",
                hint="mount the outer directory read-only",
            )


def _check_path(mount: Mount, name: str) -> None:
    own = os.path.realpath(mount.source) if mount.is_host_path else ""
    if own != mount.target:
        raise Unsupported(
            f"{mount.source or 'a directory of its own'} cannot be shown at {mount.target}: "
            "without a mount namespace a path inside is the path on the host",
            backend=name,
            operation=can.MOUNT,
            field="mounts.target",
            hint=f"use the source's own path as the target: {own}"
            if own
            else "make it writable (rw): then it is mapped, as the home directory is",
        )
    if not os.path.exists(own):
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise no_source(mount, missing)
    _check_target(mount)


def _check_target(mount: Mount) -> None:
    if mount.target == "/" or mount.target.startswith(("/proc", "/sys", "/dev")):
        raise InvalidRequest(
            f"{mount.target} cannot be mounted by this backend", field="mounts.target"
        )


def _check_writable(mount: Mount, spec: SandboxSpec, name: str, *, is_owner: bool) -> None:
    if not is_owner:
        raise Unsupported(
            "a sandbox that root starts has its own user, which cannot write to the directory",
            backend=name,
            operation=can.MOUNT,
            field="mounts.access",
            hint="run as the owner of the directory, or copy results out with the files API",
        )
    protected = [path for path, _named in wanted(mount, spec, mount.target)]
    if protected:
        raise Unsupported(
            f"Landlock cannot protect {protected[0]} inside a writable directory",
            backend=name,
            operation=can.PROTECTED_PATHS,
            field="mounts.protect",
            hint="mount it read-only, or give up the protection with protect=() (`--unprotect all`): "
            "then review hooks and settings in it before using them",
        )


def open_mounts(mounts: Sequence[Mount]) -> list[tuple[int, int]]:
    """Descriptors of the sources, without following any link, and the accesses that each gets.

    Raises:
        InvalidRequest: A link has come to be on the way.
    """
    opened: list[tuple[int, int]] = []
    try:
        for mount in mounts:
            fd = os.open(mount.target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            opened.append((fd, _RIGHTS[is_directory, mount.is_writable]))
            if os.readlink(f"/proc/self/fd/{fd}") != mount.target:
                what = f"{mount.source} has a symlink in it now"
                hint = "mount the directory by its real path"
                raise InvalidRequest(what, field="mounts.source", hint=hint)
    except BaseException:
        for fd, _access in opened:
            os.close(fd)
        raise
    return opened
