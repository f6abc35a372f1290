"""clone3(2), unshare(2), setns(2) and the id maps of user_namespaces(7)."""

from __future__ import annotations

import _signal as signal
import fcntl
import posix as os

from . import cdata, privileges
from .libc import declare, raise_errno

# include/uapi/linux/sched.h
CLONE_NEWTIME = 0x00000080
CLONE_PIDFD = 0x00001000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_INTO_CGROUP = 0x200000000
_CLONE_PARENT = 0x8000
_NO_SETUID_FIXUP = 0x04  # include/uapi/linux/securebits.h
_NS_GET_USERNS = 0xB701  # include/uapi/linux/nsfs.h


# Looked up once, before any fork: in a child the look-up alone would copy a hundred pages.
_before_fork = cdata.python_function("PyOS_BeforeFork")
_after_fork_in_child = cdata.python_function("PyOS_AfterFork_Child")
_after_fork_in_parent = cdata.python_function("PyOS_AfterFork_Parent")


class _CloneArgs(cdata.Structure):
    """struct clone_args, include/uapi/linux/sched.h."""

    _fields_ = (
        ("flags", cdata.c_uint64),
        ("pidfd", cdata.c_uint64),
        ("child_tid", cdata.c_uint64),
        ("parent_tid", cdata.c_uint64),
        ("exit_signal", cdata.c_uint64),
        ("stack", cdata.c_uint64),
        ("stack_size", cdata.c_uint64),
        ("tls", cdata.c_uint64),
        ("set_tid", cdata.c_uint64),
        ("set_tid_size", cdata.c_uint64),
        ("cgroup", cdata.c_uint64),
    )


_clone3 = declare("clone3", cdata.c_void_p, cdata.c_size_t)
_clone = declare("clone", *(cdata.c_size_t,) * 6)
_unshare = declare("unshare", cdata.c_int)
_setns = declare("setns", cdata.c_int, cdata.c_int)
_setfsuid = declare("setfsuid", cdata.c_uint)
_sethostname = declare("sethostname", cdata.c_char_p, cdata.c_size_t)


def clone3(flags: int, *, cgroup_fd: int = -1, owner: int = 0) -> tuple[int, int]:
    """Fork into new namespaces: (0, -1) in the child, (pid, pidfd) in the parent.

    Args:
        owner: Host id that is to own the new user namespace, and that the kernel counts its inotify
            instances, pending signals and locked memory for; 0: the caller. Takes host root.

    Precondition: the calling process has one thread (after fork(2) only it is in the child).
    Source: clone3(2), Linux 5.3; CLONE_INTO_CGROUP, Linux 5.7.
    """
    pidfd = cdata.c_int(-1)
    args = _CloneArgs()
    args.flags = flags | CLONE_PIDFD | (CLONE_INTO_CGROUP if cgroup_fd >= 0 else 0)
    args.pidfd = cdata.addressof(pidfd)
    args.exit_signal = signal.SIGCHLD
    args.cgroup = max(cgroup_fd, 0)
    if owner:
        _become_owner(owner)
    # Takes the import lock that both functions below release: since Python 3.13 the release of a
    # lock that is not held ends the process.
    _before_fork()
    pid = _clone3(cdata.byref(args), cdata.sizeof(args))
    if pid != 0:
        _after_fork_in_parent()
    if owner and pid:
        _become_root_again()
    if pid < 0:
        raise_errno("clone3")
    if pid == 0:
        _after_fork_in_child()
        return 0, -1
    return pid, pidfd.value


def clone_sibling() -> int:
    """Fork a child of the caller's parent: 0 in the child, its pid in the caller.

    Precondition: as `clone3`, which containers refuse where they allow this.
    Source: clone(2), CLONE_PARENT.
    """
    return _fork(_CLONE_PARENT, 0)


def fork_with(key: int) -> int:
    """As fork(2), with a last argument that the kernel does not read, and a system-call filter can.

    Precondition: as `clone3`.
    Source: clone(2), which has five arguments.
    """
    return _fork(0, key)


def _fork(flags: int, key: int) -> int:
    _before_fork()
    pid = _clone(flags | signal.SIGCHLD, 0, 0, 0, 0, key)
    if pid == 0:
        _after_fork_in_child()
        return 0
    _after_fork_in_parent()
    if pid < 0:
        raise_errno("clone")
    return pid


def _become_owner(owner: int) -> None:
    """Take the effective id by which the kernel charges, and nothing else: rights and files stay root's.

    Source: kernel/user_namespace.c, create_user_ns; capabilities(7), SECBIT_NO_SETUID_FIXUP.
    """
    privileges.prctl(privileges.PR_SET_SECUREBITS, _NO_SETUID_FIXUP)
    os.setresuid(-1, owner, -1)
    _setfsuid(0)


def _become_root_again() -> None:
    # These calls preserve the errno of clone3: only a failure changes it.
    os.setresuid(-1, 0, -1)
    privileges.prctl(privileges.PR_SET_SECUREBITS, 0)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones.

    Source: unshare(2).
    """
    if _unshare(flags) < 0:
        raise_errno("unshare")


def setns(fd: int, flags: int) -> None:
    """Join namespaces; with a pidfd, all those of that process named by `flags` at once.

    Source: setns(2); pidfd since Linux 5.8.
    """
    if _setns(fd, flags) < 0:
        raise_errno("setns")


def owner_of(fd: int) -> int:
    """A descriptor of the user namespace that owns the namespace behind `fd`.

    Raises:
        OSError: EPERM where it is neither ours nor below ours.

    Source: ioctl_ns(2), Linux 4.9.
    """
    return fcntl.ioctl(fd, _NS_GET_USERNS)


def sethostname(name: str) -> None:
    """Name this UTS namespace.

    Source: sethostname(2).
    """
    data = name.encode()
    if _sethostname(data, len(data)) < 0:
        raise_errno("sethostname")


def write_id_maps(pid: int, uid_map: str, gid_map: str, *, deny_setgroups: bool) -> None:
    """Map the ids of the user namespace of `pid`, one extent "inside outside count" a line.

    Raises:
        OSError: EPERM where the writer may not map these ids; EINVAL for a bad map.

    Source: user_namespaces(7). An ordinary user must deny setgroups first and may map only itself.
    """
    if deny_setgroups:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", uid_map)
    _write(f"/proc/{pid}/gid_map", gid_map)


def read_id_map(pid: int, name: str) -> list[tuple[int, int, int]]:
    """Read `uid_map` or `gid_map` of the user namespace of `pid` from the kernel.

    Source: user_namespaces(7).
    """
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse_id_map(os.read(fd, 1 << 16).decode("ascii"))
    finally:
        os.close(fd)


def parse_id_map(text: str) -> list[tuple[int, int, int]]:
    """The extents of a map, one "inside outside count" a line."""
    rows = []
    for line in text.splitlines():
        inside, outside, count = (int(word) for word in line.split())
        rows.append((inside, outside, count))
    return rows


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
