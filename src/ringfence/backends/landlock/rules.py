"""Landlock rules of a sandbox without mounts: what of the host it may read, and its own directories."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace

from ...errors import InvalidRequest, Unsupported
from ...model import capabilities as can
from ...model.mount import MEMORY_DIR, READ_WRITE, Mount
from ...policy import landlock
from ...policy.protected import wanted
from ..command import place
from ..local.agents import agent_code
from ..local.mounts import template
from ..local.session import is_below, no_source
from .place import OWN

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
# Programs look there by fixed names, which nothing maps.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")


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
    """List what of the host a sandbox shows, each at its real path: mounts, and its memory's directory."""
    memory = os.path.realpath(spec.memory_dir or "")
    mounts = [
        replace(mount, target=os.path.realpath(mount.source))
        for mount in spec.mounts
        if mount.is_host_path
    ]
    return [*mounts, *([Mount(memory, memory, READ_WRITE, ())] if spec.memory_dir else [])]


def host_path(mount: Mount) -> str:
    """Return where programs find a mount of the host: its target, where that leads there anyway."""
    own = os.path.realpath(mount.source)
    return mount.target if os.path.realpath(mount.target) == own else own


def is_own(mount: Mount) -> bool:
    """Return whether it is a writable directory of the sandbox's own, which lies beside its home."""
    return not mount.source and mount.is_writable


def check_mounts(spec: SandboxSpec, name: str, *, is_owner: bool) -> None:
    """Refuse mounts that take a mount: at a path of the system or of the sandbox's own, or one in another.

    Args:
        is_owner: Programs run as this process's user, who may write to what it mounts.

    Raises:
        InvalidRequest, Unsupported: `field` names the part.
    """
    if spec.memory_dir and not os.path.isdir(spec.memory_dir):
        mistake = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise no_source(Mount(MEMORY_DIR, spec.memory_dir), mistake)
    for mount in spec.mounts:
        _check_target(mount)
        if mount.is_host_path:
            _check_mapped(mount, spec.mounts, name, is_owner=is_owner)
        elif not is_own(mount):
            raise Unsupported(
                f"a directory of its own cannot be shown read-only at {mount.target}: nobody could fill it",
                backend=name,
                operation=can.MOUNT,
                field="mounts.access",
                hint="make it writable (rw)",
            )
    mounts = shown(spec)
    writable = [mount.target for mount in mounts if mount.is_writable]
    own = os.path.realpath(place.base())
    for mount in mounts:
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


def _check_mapped(mount: Mount, mounts: Sequence[Mount], name: str, *, is_owner: bool) -> None:
    """Refuse a mount of the host whose target no working directory, argument or link leads to."""
    own = os.path.realpath(mount.source)
    if not os.path.exists(own):
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise no_source(mount, missing)
    if mount.nofollow and own != mount.source:
        what, hint = f"{mount.source} has a symlink in it", "mount the directory by its real path"
        raise InvalidRequest(what, field="mounts.source", hint=hint)
    if not is_owner:
        _check_readable(own, name)
    if host_path(mount) == mount.target:
        return
    covered = [each for each in OWN if is_below(each, mount.target) or own == each]
    around = [each for each in _SYSTEM if is_below(mount.target, each)]
    around += [m.target for m in mounts if m.is_host_path and not _is_there(mount, m)]
    if covered or around:
        where = f"nothing covers {covered[0]}" if covered else f"nothing else lies in {around[0]}"
        raise Unsupported(
            f"{mount.source} cannot be shown at {mount.target}: without a mount namespace {where}",
            backend=name,
            operation=can.MOUNT,
            field="mounts.target",
            hint=f"use another target, as /work or the source's own path: {own}",
        )


def _is_there(mount: Mount, other: Mount) -> bool:
    """Return whether a mount lies outside another one, or in its source at the same place."""
    if not is_below(mount.target, other.target):
        return True
    inner = mount.target[len(other.target) :]
    return os.path.realpath(mount.source) == os.path.realpath(other.source) + inner


def _check_readable(path: str, name: str) -> None:
    """Refuse what the user of a sandbox of root's, who is another one, may not read.

    Raises:
        Unsupported: The message names the first directory or file that stands in the way.
    """
    above = [path[:i] for i, letter in enumerate(path) if letter == "/" and i]
    found = [each for each in above if not os.stat(each).st_mode & stat.S_IXOTH]
    mode = os.stat(path).st_mode
    if not found and mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
        return
    raise Unsupported(
        f"{path} cannot be shown: the sandbox that root starts has its own user, who may not read"
        f" {found[0] if found else path}",
        backend=name,
        operation=can.MOUNT,
        field="mounts.source",
        hint="copy it to a directory that everybody may enter, or run as an ordinary user",
    )


def _check_target(mount: Mount) -> None:
    if mount.target == "/" or any(
        is_below(mount.target, each) for each in ("/proc", "/sys", "/dev")
    ):
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
            opened.append((fd, 0))  # also where it cannot be looked at, it is closed
            mode = os.fstat(fd).st_mode
            opened[-1] = fd, _RIGHTS[stat.S_ISDIR(mode), mount.is_writable]
            if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{fd}") != mount.target:
                what = f"{mount.source} has a symlink in it now"
                hint = "mount the directory by its real path"
                raise InvalidRequest(what, field="mounts.source", hint=hint)
    except BaseException:
        for fd, _access in opened:
            os.close(fd)
        raise
    return opened
