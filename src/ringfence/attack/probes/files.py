"""Files of the host: outside the mounts, in read-only mounts, and in writable ones.

`context["ro"]` and `context["rw"]` are directories that the host planted; see canaries.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat

from . import protected, set_id  # noqa: F401  they register probes of their own
from .kit import (
    BARE,
    BOTH,
    HOST,
    HOST_FD,
    HOST_ROOT,
    HOST_USERNS,
    LOOSE_MOUNTS,
    MOUNTED,
    NO_SECCOMP,
    Outcome,
    attempt,
    call,
    cannot_open,
    escaped,
    first_escape,
    held,
    holds,
    inconclusive,
    pids,
    probe,
    read,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ROOT_ENTRIES = {
    *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "dev", "proc", "tmp", "var"),
    *("home", "mnt", "opt", "srv", "run", "root"),
}


# -- a planted file outside the mounts --------------------------------------------------------


def _is_secret(path: str, context: dict[str, Any], dir_fd: int | None = None) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        # Never from a pipe: standard output can be opened, and what is read there is lost.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        return holds(os.read(fd, 4096), context["secret_digest"])
    except OSError:
        return False
    finally:
        os.close(fd)


@probe("files.secret-by-path", "critical", HOST, where=BOTH)
def secret_by_path(context: dict[str, Any]) -> Outcome:
    """A host file outside the mounts must not be readable by its path."""
    paths = [
        context["secret"],
        "/" + "../" * 40 + context["secret"],
        "../" * 40 + context["secret"].lstrip("/"),
    ]
    found = [path for path in paths if _is_secret(path, context)]
    return escaped(f"read {found[0]}") if found else held("no path leads to it")


@probe("files.secret-by-proc", "critical", HOST, where=BOTH)
def secret_by_proc(context: dict[str, Any]) -> Outcome:
    """A host file must not be readable through the root or directory of any process."""
    tried = 0
    for pid in [*map(str, pids()), "self", "thread-self"]:
        for door in ("root", "cwd", "root/proc/1/root", "cwd/" + "../" * 30):
            tried += 1
            if _is_secret(f"/proc/{pid}/{door}{context['secret']}", context):
                return escaped(f"read through /proc/{pid}/{door}")
    return held(f"{tried} doors, none leads to it")


@probe("files.secret-by-descriptor", "critical", HOST_FD, where=BOTH)
def secret_by_descriptor(context: dict[str, Any]) -> Outcome:
    """A host file must not be reachable from an inherited descriptor."""
    for fd in range(4096):
        try:
            os.fstat(fd)  # one question and not three: a machine that is emulated is slow
        except OSError:
            continue
        for way in ("../" * 30 + context["secret"].lstrip("/"), context["secret_name"]):
            if _is_secret(way, context, dir_fd=fd):
                return escaped(f"read from descriptor {fd}")
        if _is_secret(f"/proc/self/fd/{fd}", context):
            return escaped(f"descriptor {fd} is the file")
    return held("no descriptor leads to it")


@probe("files.secret-visible", "high", HOST, where=BOTH)
def secret_visible(context: dict[str, Any]) -> Outcome:
    """A host file outside the mounts must not even be seen to exist."""
    directory = os.path.dirname(context["secret"])
    for path in (context["secret"], directory):
        try:
            os.lstat(path)
        except OSError:
            continue
        return escaped(f"{path} can be seen")
    return held(f"neither {context['secret_name']} nor its directory is there")


@probe("files.secret-by-handle", "critical", HOST_ROOT, where=BOTH)
def secret_by_handle(_context: dict[str, Any]) -> Outcome:
    """A file must not be openable by a guessed handle, which needs no path at all."""
    # struct file_handle: the root directory, inode 2, of the file system that holds /usr.
    handle = ctypes.create_string_buffer(b"\x08\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0", 16)
    directory = os.open("/usr", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    result = call("open_by_handle_at", directory, handle, os.O_PATH | os.O_CLOEXEC)
    if result >= 0:
        return escaped("open_by_handle_at opened the file system's root")
    if result == -116:
        return escaped("open_by_handle_at looked for the file (ESTALE)")
    return held(f"open_by_handle_at: {said(result)}")


@probe("files.chroot", "high", HOST_ROOT)
def chroot(_context: dict[str, Any]) -> Outcome:
    """A process must not be able to change its root and climb out of the old one."""
    return attempt(lambda: os.chroot("/tmp"), "chroot")


@probe("files.root-directory", "high", HOST, where=BOTH)
def root_directory(context: dict[str, Any]) -> Outcome:
    """The root must show nothing but what the template puts there."""
    mounted = {path.split("/")[1] for path in context.get("targets", ())}
    try:
        others = sorted(set(os.listdir("/")) - _ROOT_ENTRIES - mounted)
    except PermissionError as exc:
        return held(f"it cannot be listed: {exc.strerror}")
    extra = [name for name in others if not _says_nothing(f"/{name}", context["agent_digest"])]
    return (
        escaped(f"also in /: {' '.join(extra)}")
        if extra
        else held("only the template's directories")
    )


def _says_nothing(path: str, agent: str) -> bool:
    """Return whether an entry is empty, or holds only our own agent, which is public."""
    try:
        inside = os.listdir(path)
    except NotADirectoryError:
        return os.stat(path).st_size == 0
    except OSError:
        return False  # it cannot be told
    contents = (read(f"{path}/{name}", 1 << 24) for name in inside)
    return all(hashlib.sha256(content).hexdigest() == agent for content in contents)


@probe("files.other-homes", "high", HOST_ROOT)
def other_homes(context: dict[str, Any]) -> Outcome:
    """No home directory of the host may be shown."""
    home = context["caller_home"]
    try:
        found = os.listdir(home)
    except OSError as exc:
        return held(f"{home}: {exc.strerror}")
    if home in ("/root", "/home/sandbox") and not found:
        return held(f"{home} is empty")
    return escaped(f"{home} has {len(found)} entries")


@probe("files.accounts", "critical", HOST_ROOT)
def accounts(_context: dict[str, Any]) -> Outcome:
    """The host's password hashes and keys must not be readable."""
    paths = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/sudoers", "/etc/security/opasswd")
    return first_escape([cannot_open(path) for path in paths])


@probe("files.run-directory", "high", HOST)
def run_directory(_context: dict[str, Any]) -> Outcome:
    """The sockets and state of the host's services in /run must not be there."""
    try:
        found = os.listdir("/run")
    except PermissionError as exc:
        return held(f"/run cannot be listed: {exc.strerror}")
    return escaped(f"/run holds {' '.join(sorted(found)[:5])}") if found else held("/run is empty")


@probe("files.shared-memory", "high", HOST)
def shared_memory(context: dict[str, Any]) -> Outcome:
    """A host file in /dev/shm must not be readable."""
    if not context["shm_file"]:
        return inconclusive("nothing could be planted in /dev/shm")
    if _is_secret(context["shm_file"], context):
        return escaped(f"read {context['shm_file']}")
    return held("/dev/shm is the sandbox's own")


@probe("files.old-root", "critical", HOST, where=BOTH)
def old_root(context: dict[str, Any]) -> Outcome:
    """No mount may show the root of a host file system."""
    for line in read("/proc/self/mountinfo", 1 << 20).decode("utf-8", "replace").splitlines():
        _id, _parent, device, root, target = line.split()[:5]
        if root == "/" and device == context["root_device"]:
            return escaped(f"{target} is the root of the host's {device}")
    return held("only parts of host file systems are mounted")


@probe("files.mount-flags", "high", HOST, where=BOTH)
def mount_flags(_context: dict[str, Any]) -> Outcome:
    """No mount may honour setuid bits, and none but the six bound devices may hold a device."""
    for line in read("/proc/self/mountinfo", 1 << 20).decode("utf-8", "replace").splitlines():
        words = line.split()
        target, flags = words[4], words[5].split(",")
        kind = words[words.index("-") + 1]
        devices = kind in ("devtmpfs", "devpts") or target.startswith("/dev/")
        if "nodev" not in flags and not devices:
            devices = _holds_but_harmless(target)
        if "nosuid" not in flags or ("nodev" not in flags and not devices):
            return escaped(f"{target} is {words[5]}")
    return held("every mount is nosuid, and nodev where it may be")


def _holds_but_harmless(target: str) -> bool:
    """A /dev that nobody here may add to, whose devices have a probe of their own; or /dev/null, as a mask."""
    if target == "/dev":
        return not os.access(target, os.W_OK)
    return os.lstat(target).st_rdev == os.makedev(1, 3)


# -- the host's programs ----------------------------------------------------------------------


@probe("files.write-to-usr", "critical", HOST_ROOT)
def write_to_usr(_context: dict[str, Any]) -> Outcome:
    """The host's programs must not be writable."""
    paths = [
        p
        for p in ("/usr/lib/os-release", "/etc/ssl/openssl.cnf", "/etc/ld.so.cache")
        if os.path.exists(p)
    ]
    return first_escape(
        [cannot_open(path, os.O_WRONLY) for path in paths]
        + [
            cannot_open(path, os.O_RDWR | os.O_TMPFILE)
            for path in ("/usr", "/usr/bin", "/usr/local")
        ]
    )


@probe("files.remount-usr", "critical", HOST_USERNS)
def remount_usr(_context: dict[str, Any]) -> Outcome:
    """A read-only mount must not be remountable as writable."""
    rec, private, remount_bind = 16384, 1 << 18, 32 | 4096
    tried = [
        ("remount /usr", call("mount", b"none", b"/usr", b"none", remount_bind, 0)),
        ("make / private", call("mount", b"none", b"/", b"none", rec | private, 0)),
        ("bind /usr", call("mount", b"/usr", b"/tmp", b"none", 4096, 0)),
    ]
    for what, result in tried:
        if result == 0:
            return escaped(f"{what}: worked")
    return held(", ".join(f"{what}: {said(result)}" for what, result in tried))


# -- metadata of a planted file outside the mounts, which everybody may write to -----------------


def _outside(name: str, about: str, action: Callable[[str], Any]) -> None:
    def run(context: dict[str, Any]) -> Outcome:
        path = context["open_file"]
        outcomes = [attempt(lambda: action(path), name)]
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return outcomes[0]
        try:
            outcomes.append(attempt(lambda: action(f"/proc/self/fd/{fd}"), f"{name} by O_PATH"))
        finally:
            os.close(fd)
        return first_escape(outcomes)

    probe(f"files.outside-{name}", "high", HOST, where=BOTH, about=about)(run)


_outside("mode", "The mode of a host file must stay.", lambda path: os.chmod(path, 0o600))
_outside("times", "The times of a host file must stay.", lambda path: os.utime(path, (1, 1)))
_outside(
    "times-now",
    "The times of a host file must stay: who may write to it may set them to now.",
    os.utime,
)
_outside(
    "owner",
    "The capabilities of a host file must stay: a chown to nobody else takes them, and anyone may.",
    lambda path: os.chown(path, -1, -1),
)


# -- read-only mount --------------------------------------------------------------------------


def _read_only(
    name: str, about: str, action: Callable[[str], Any], control: str = LOOSE_MOUNTS
) -> None:
    def run(context: dict[str, Any]) -> Outcome:
        return attempt(lambda: action(context["ro"]), name)

    probe(f"files.read-only-{name}", "critical", control, where=MOUNTED, about=about)(run)


def _touch(path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL, text: bytes = b"x") -> str:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
    return path


def _reopen(ro: str) -> str:
    fd = os.open(f"{ro}/file", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _touch(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)
    finally:
        os.close(fd)


def _map_shared(ro: str) -> str:
    fd = os.open(f"{ro}/file", os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, 4, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
            memory[0:1] = b"m"
    finally:
        os.close(fd)
    return "mapped"


def _map_read_only(ro: str) -> str:
    """A shared mapping of a file opened for reading must not become writable."""
    fd = os.open(f"{ro}/file", os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = call("mmap", 0, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        result = call("mprotect", address, 4096, mmap.PROT_READ | mmap.PROT_WRITE)
        if result < 0:
            raise OSError(-result, "mprotect")
    finally:
        os.close(fd)
    return "writable"


def _hard_link_out(ro: str) -> str:
    os.link(f"{ro}/file", f"{ro}/linked")
    return "linked"


def _move_out(ro: str) -> str:
    os.rename(f"{ro}/file", f"{ro}/moved")
    return "moved"


def _unnamed(ro: str) -> str:
    fd = os.open(ro, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o644)
    result = call("linkat", -100, b"/proc/self/fd/%d" % fd, -100, f"{ro}/unnamed".encode(), 0x400)
    os.close(fd)
    if result < 0:
        raise OSError(-result, "linkat")
    return "made"


def _chmod_by_fd(ro: str) -> str:
    fd = os.open(f"{ro}/file", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
    return "changed"


_read_only("create", "No file may be created in a read-only mount.", lambda ro: _touch(f"{ro}/new"))
_read_only(
    "append",
    "No file in a read-only mount may be written.",
    lambda ro: _touch(f"{ro}/file", os.O_WRONLY | os.O_APPEND),
)
_read_only(
    "truncate-open",
    "No file there may be emptied by opening it.",
    lambda ro: _touch(f"{ro}/file", os.O_WRONLY | os.O_TRUNC),
)
_read_only("truncate", "No file there may be cut.", lambda ro: os.truncate(f"{ro}/file", 1))
_read_only("reopen", "A file opened for reading must not be reopened for writing.", _reopen)
_read_only("map-shared", "No file there may be mapped writable.", _map_shared)
_read_only(
    "map-upgrade",
    "A read-only mapping must not become writable.",
    _map_read_only,
    "none: no descriptor opened for reading can be mapped writable anywhere",
)
_read_only("unlink", "No file there may be removed.", lambda ro: os.unlink(f"{ro}/doomed"))
_read_only("rename", "No file there may be renamed.", _move_out)
_read_only("link", "No name may be added to a file there.", _hard_link_out)
_read_only(
    "symlink",
    "No symlink may be made there.",
    lambda ro: os.symlink("/etc/passwd", f"{ro}/symlink"),
)
_read_only("mkdir", "No directory may be made there.", lambda ro: os.mkdir(f"{ro}/directory"))
_read_only("rmdir", "No directory there may be removed.", lambda ro: os.rmdir(f"{ro}/empty"))
_read_only("mkfifo", "No FIFO may be made there.", lambda ro: os.mkfifo(f"{ro}/fifo"))
_read_only("chmod", "No mode there may be changed.", lambda ro: os.chmod(f"{ro}/file", 0o666))
_read_only("fchmod", "No mode there may be changed through a descriptor.", _chmod_by_fd)
_read_only("utime", "No time there may be changed.", lambda ro: os.utime(f"{ro}/file", (1, 1)))
_read_only(
    "xattr", "No attribute there may be set.", lambda ro: os.setxattr(f"{ro}/file", "user.x", b"x")
)
_read_only("unnamed-file", "No unnamed file may be made and linked there.", _unnamed)


@probe("files.read-only-submount", "high", LOOSE_MOUNTS, where=MOUNTED)
def read_only_file_mount(context: dict[str, Any]) -> Outcome:
    """A single file mounted read-only must not be writable."""
    return attempt(lambda: _touch(context["ro_file"], os.O_WRONLY | os.O_APPEND), "append to it")


# -- writable mount ---------------------------------------------------------------------------


@probe("files.lease", "medium", NO_SECCOMP, where=MOUNTED)
def lease(context: dict[str, Any]) -> Outcome:
    """A lease on a shared file must not be had: the host's next open would wait for it."""
    path = f"{context['rw']}/leased"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return attempt(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK), "F_SETLEASE")
    finally:
        os.close(fd)
        os.unlink(path)


@probe("files.device-node", "critical", HOST_ROOT, where=MOUNTED)
def device_node(context: dict[str, Any]) -> Outcome:
    """No device node may be made in a writable mount."""
    outcomes = []
    for name, kind, device in (("null", stat.S_IFCHR, (1, 3)), ("disk", stat.S_IFBLK, (7, 255))):
        path = f"{context['rw']}/{name}"
        arguments = (path, kind | 0o600, os.makedev(*device))
        outcomes.append(attempt(os.mknod, f"mknod {name}", *arguments))
    return first_escape(outcomes)


@probe("files.whiteout-node", "medium", BARE, where=MOUNTED)
def whiteout_node(context: dict[str, Any]) -> Outcome:
    """Nor the device 0:0, which hides files once the directory is a layer."""
    path = f"{context['rw']}/whiteout"
    return attempt(lambda: os.mknod(path, stat.S_IFCHR | 0o600, 0), "mknod 0:0")


@probe("files.rename-whiteout", "medium", BARE, where=MOUNTED)
def rename_whiteout(context: dict[str, Any]) -> Outcome:
    """Nor by renaming: RENAME_WHITEOUT leaves one behind."""
    old, new = f"{context['rw']}/renamed", f"{context['rw']}/renamed-to"
    os.close(os.open(old, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    result = call("renameat2", -100, old.encode(), -100, new.encode(), 4)
    return (
        escaped("RENAME_WHITEOUT: worked")
        if result == 0
        else held(f"RENAME_WHITEOUT: {said(result)}")
    )


@probe("files.file-capability", "critical", HOST_ROOT, where=MOUNTED)
def file_capability(context: dict[str, Any]) -> Outcome:
    """No file in a writable mount may be given capabilities, which the host would honour."""
    path = f"{context['rw']}/capable"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o755))
    everything = b"\x01\0\0\x02" + b"\xff" * 16  # VFS_CAP_REVISION_2, effective
    return first_escape(
        [
            attempt(
                lambda: os.setxattr(path, "security.capability", everything), "security.capability"
            ),
            attempt(
                lambda: os.setxattr(path, "trusted.overlay.opaque", b"y"), "trusted.overlay.opaque"
            ),
        ]
    )


@probe("files.give-away", "high", HOST_ROOT, where=MOUNTED)
def give_away(context: dict[str, Any]) -> Outcome:
    """No file in a writable mount may be given to another user."""
    strangers = sorted({0, 1, 65534} - {os.geteuid()})
    path = f"{context['rw']}/given"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    return first_escape([attempt(os.chown, f"chown {uid}", path, uid, uid) for uid in strangers])


@probe("files.immutable-flag", "low", NO_SECCOMP, where=MOUNTED)
def immutable_flag(context: dict[str, Any]) -> Outcome:
    """Inode flags of a file in a writable mount must not be changeable."""
    path = f"{context['rw']}/flags"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        flags = fcntl.ioctl(fd, 0x80086601, b"\0" * 8)  # FS_IOC_GETFLAGS
    except OSError as exc:
        os.close(fd)
        return inconclusive(f"this file system has no flags: {exc.strerror}")
    try:
        return attempt(lambda: fcntl.ioctl(fd, 0x40086602, flags), "FS_IOC_SETFLAGS")
    finally:
        os.close(fd)


@probe(
    "files.shared-lock",
    "low",
    "none: locks on files that sandboxes share are a known, slow channel",
)
def shared_lock(_context: dict[str, Any]) -> Outcome:
    """A lock on a host file that other sandboxes see must not be had."""
    fd = os.open("/usr/lib/os-release", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return attempt(
            lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), "flock on /usr/lib/os-release"
        )
    finally:
        os.close(fd)
