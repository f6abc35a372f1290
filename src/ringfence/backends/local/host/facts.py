"""Facts about this host: read once, from the kernel."""

from __future__ import annotations

import errno
import os

from ....errors import IsolationError, ResourceExhausted
from ....linux import landlock

_GIB = 1 << 30
_CAP_SYS_PTRACE = 19  # include/uapi/linux/capability.h
_CAP_SYS_ADMIN = 21
_CAPS_OF_USERS = 0, 6, 7  # CAP_CHOWN, CAP_SETGID, CAP_SETUID


class Host:
    """Facts that plans depend on.

    Attributes:
        changes_users: As host uid 0 we may run processes as any user.
        trusted_root: We may use all of host uid 0's powers: own uid ranges, idmapped mounts, any cgroup.
            Root of a container with default capabilities may not.
        opens_namespaces: Those of processes that nobody may trace, too, for as long as we need them.
        memory_bytes: Of the whole machine.
    """

    def __init__(self) -> None:
        _check_proc()
        self.uid, self.gid = os.geteuid(), os.getegid()
        is_root = self.uid == 0 and _owns_initial_user_namespace()
        self.changes_users = is_root and all(map(_has_capability, _CAPS_OF_USERS))
        self.trusted_root = self.changes_users and _has_capability(_CAP_SYS_ADMIN)
        self.opens_namespaces = self.trusted_root and _has_capability(_CAP_SYS_PTRACE)
        self.memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.landlock_abi = landlock.abi_version()
        self.scratch = next(p for p in ("/tmp", "/var/tmp", "/mnt", "/run") if os.path.isdir(p))


def _check_proc() -> None:
    """Refuse to work where /proc tells of other processes: what is written there would be theirs.

    So it is after `unshare --pid --fork` without `--mount-proc`.

    Raises:
        IsolationError: It is none, or that of another PID namespace.
    """
    try:
        seen = os.readlink("/proc/self")
    except OSError:
        seen = "nobody"
    if seen != str(os.getpid()):
        raise IsolationError(
            f"/proc is not of the PID namespace that this process is in, as {os.getpid()}: "
            f"its pid in /proc is {seen}",
            hint="mount a new one, `mount -t proc proc /proc` (with unshare: `--mount-proc`), and try again",
        )


def _owns_initial_user_namespace() -> bool:
    """Root inside somebody's user namespace can map only itself; root of the host can map anything."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        inside, outside, count = (int(word) for word in file.read().split()[:3])
    return (inside, outside) == (0, 0) and count >= 1 << 31


def _has_capability(number: int) -> bool:
    with open("/proc/self/status", encoding="utf-8") as file:
        found = [line.split()[1] for line in file if line.startswith("CapEff:")]
    return bool(int(found[0], 16) >> number & 1)


def out_of_files(exc: OSError) -> ResourceExhausted | None:
    """Map EMFILE and its like to an error with the fix; None for other errors."""
    if exc.errno == errno.ETOOMANYREFS:
        return ResourceExhausted(
            "programs of this user have too many file descriptors in flight on Unix sockets",
            hint="end the program that sends them, or raise the hard limit of `ulimit -n`",
        )
    if exc.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return ResourceExhausted("too many open files in this process", hint="raise `ulimit -n`")


class ExplainedFileLimit:  # contextlib would take longer to import than all else of a run
    """Raise `ResourceExhausted` for an error that means too many open files."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if isinstance(exc, OSError) and (problem := out_of_files(exc)):
            raise problem from exc


_current: Host | None = None


def host() -> Host:
    """The facts of this host, read on first use; read again when the identity changed."""
    global _current
    if _current is None or _current.uid != os.geteuid():
        _current = Host()
    return _current
