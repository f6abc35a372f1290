"""System calls that must be refused before the kernel looks at their arguments.

Arguments are chosen so that the call does nothing even where it gets through: a wrong flag, a
descriptor that is not open, a name that does not exist. Then its errno tells that it did.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import struct

from . import mount_calls, of_init, stock  # noqa: F401  they register probes of their own
from .kit import (
    BARE,
    BOTH,
    HOST_ROOT,
    NO_SECCOMP,
    Outcome,
    call,
    escaped,
    held,
    in_child,
    inconclusive,
    probe,
    raw,
    read,
    refused,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NOWHERE = b"/nonexistent/ringfence"
_BAD_TIME = ctypes.create_string_buffer(struct.pack("qq", 0, -1), 16)

# name, severity, control, what it would open, arguments
_CALLS: tuple[tuple[str, str, str, str, tuple[object, ...]], ...] = (
    ("bpf", "critical", HOST_ROOT, "programs in the kernel", (0xFFFF, 0, 0)),
    ("perf_event_open", "critical", NO_SECCOMP, "performance counters", (0, 0, -1, -1, 0)),
    ("io_uring_setup", "critical", NO_SECCOMP, "rings that no filter sees", (1, 0)),
    ("io_uring_enter", "critical", NO_SECCOMP, "rings that no filter sees", (-1, 0, 0, 0, 0, 0)),
    ("io_uring_register", "critical", NO_SECCOMP, "rings that no filter sees", (-1, 0, 0, 0)),
    ("userfaultfd", "high", NO_SECCOMP, "faults held in user space", (1,)),
    ("keyctl", "high", NO_SECCOMP, "keys that know no namespace", (0, -3, 0)),
    ("add_key", "high", NO_SECCOMP, "keys that know no namespace", (b"nokey", b"x", b"x", 1, -3)),
    (
        "request_key",
        "high",
        NO_SECCOMP,
        "keys that know no namespace",
        (b"user", b"ringfence:none", 0, 0),
    ),
    ("ptrace", "high", NO_SECCOMP, "tracing", (0, 0, 0, 0)),
    ("process_vm_readv", "high", NO_SECCOMP, "memory of others", (1, 0, 0, 0, 0, 1)),
    ("process_vm_writev", "high", NO_SECCOMP, "memory of others", (1, 0, 0, 0, 0, 1)),
    ("pidfd_getfd", "high", NO_SECCOMP, "descriptors of others", (-1, 0, 0)),
    ("kcmp", "medium", NO_SECCOMP, "addresses of the kernel, compared", (-1, -1, 0, 0, 0)),
    ("process_madvise", "medium", NO_SECCOMP, "memory of others", (-1, 0, 0, 0, 0)),
    ("process_mrelease", "medium", NO_SECCOMP, "memory of others", (-1, 0)),
    ("name_to_handle_at", "medium", NO_SECCOMP, "handles of files", (-1, b"", 0, 0, 0)),
    ("open_by_handle_at", "critical", HOST_ROOT, "files by handle", (-1, 0, 0)),
    ("setns", "critical", NO_SECCOMP, "other namespaces", (-1, 0)),
    ("kexec_load", "critical", HOST_ROOT, "another kernel", (0, 0, 0, 0x8000)),
    ("kexec_file_load", "critical", HOST_ROOT, "another kernel", (-1, -1, 0, 0, 0x8000)),
    ("init_module", "critical", HOST_ROOT, "modules of the kernel", (0, 0, b"")),
    ("finit_module", "critical", HOST_ROOT, "modules of the kernel", (-1, b"", 0x8000)),
    ("delete_module", "critical", HOST_ROOT, "modules of the kernel", (b"ringfence_none", 0x800)),
    ("reboot", "critical", HOST_ROOT, "the host's power", (0, 0, 0, 0)),
    ("swapon", "high", HOST_ROOT, "the host's swap", (_NOWHERE, 0)),
    ("swapoff", "high", HOST_ROOT, "the host's swap", (_NOWHERE,)),
    ("acct", "high", HOST_ROOT, "the host's accounting", (_NOWHERE,)),
    ("syslog", "high", HOST_ROOT, "the kernel's log", (10, 0, 0)),
    ("quotactl", "medium", HOST_ROOT, "quotas", (0xFFFF00, _NOWHERE, 0, 0)),
    ("clock_settime", "critical", NO_SECCOMP, "the host's clock", (0, _BAD_TIME)),
    ("settimeofday", "critical", NO_SECCOMP, "the host's clock", (_BAD_TIME, 0)),
    ("iopl", "critical", HOST_ROOT, "input and output ports", (3,)),
    ("ioperm", "critical", HOST_ROOT, "input and output ports", (0x80, 1, 1)),
    ("modify_ldt", "medium", NO_SECCOMP, "descriptor tables", (0, 0, 0)),
    ("vhangup", "high", "none: it would hang up the caller's terminal", "terminals", ()),
    ("fanotify_init", "medium", NO_SECCOMP, "every access to files", (0x200, 0)),
    ("memfd_secret", "low", NO_SECCOMP, "memory that no limit can take back", (0xFFFF,)),
    ("vmsplice", "medium", NO_SECCOMP, "pages of files", (-1, 0, 0, 0)),
    ("move_pages", "low", NO_SECCOMP, "memory placement of others", (1, 0, 0, 0, 0, 0xFFFF)),
    ("migrate_pages", "low", NO_SECCOMP, "memory placement of others", (0, 1, 0, 0)),
    ("mbind", "low", NO_SECCOMP, "memory placement", (1, 4096, 0xFFFF, 0, 0, 0)),
    ("ustat", "low", NO_SECCOMP, "file systems by device", (0, 0)),
    ("sysfs", "low", NO_SECCOMP, "file systems by number", (9, 0, 0)),
    ("file_setattr", "medium", NO_SECCOMP, "flags of inodes", (-1, b"", 0, 0, 0)),
    ("lsm_set_self_attr", "medium", NO_SECCOMP, "labels of security modules", (0, 0, 0, 0xFFFF)),
    ("set_mempolicy_home_node", "low", NO_SECCOMP, "memory placement", (1, 1, 99, 99)),
)


def _refuse(name: str, args: tuple[object, ...]) -> Callable[[dict[str, Any]], Outcome]:
    return lambda _context: refused(name, *args)


for _name, _severity, _control, _opens, _args in _CALLS:
    probe(
        f"syscalls.{_name}",
        _severity,
        _control,
        about=f"{_name} must be refused: it opens {_opens}.",
    )(_refuse(_name, _args))


# -- namespaces -------------------------------------------------------------------------------

_NEW_USER = 0x10000000
_KINDS = {
    "user": 0,
    "mnt": 0x20000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x80,
}


def _unshare(flags: int) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        result = call("unshare", _NEW_USER | flags)
        return escaped("unshare: worked") if result == 0 else held(f"unshare: {said(result)}")

    return run


for _kind, _flag in _KINDS.items():
    probe(
        f"syscalls.unshare-{_kind}",
        "critical",
        BARE,
        about=f"No {_kind} namespace may be made inside: it could undo what the mounts enforce.",
    )(_unshare(_flag))


def _clone(name: str) -> int:
    """A child in a new user namespace, which ends at once: its pid, or an errno."""
    if name == "clone":
        result = call("clone", _NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    elif name == "clone-high-bits":
        result = call("clone", (1 << 40) | _NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    else:
        arguments = ctypes.create_string_buffer(
            struct.pack("=11Q", _NEW_USER, 0, 0, 0, 17, *[0] * 6), 88
        )
        result = call("clone3", arguments, 88)
    if result == 0:
        os._exit(0)
    if result > 0:
        os.waitpid(result, 0)
    return result


def _clone_probe(name: str) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        result = _clone(name)
        return escaped(f"{name}: worked") if result > 0 else held(f"{name}: {said(result)}")

    return run


for _name in ("clone", "clone-high-bits", "clone3"):
    probe(
        f"syscalls.{_name}", "critical", BARE, about=f"No user namespace may be made by {_name}."
    )(_clone_probe(_name))


@probe("syscalls.namespaces-left", "high", BARE, where=BOTH)
def namespaces_left(_context: dict[str, Any]) -> Outcome:
    """Without any filter too, no user namespace may be left to make."""
    left = read("/proc/sys/user/max_user_namespaces").strip()
    return (
        held("max_user_namespaces 0")
        if left == b"0"
        else escaped(f"max_user_namespaces {left.decode()}")
    )


# -- other doors into the kernel --------------------------------------------------------------


@probe("syscalls.x32", "critical", NO_SECCOMP)
def x32(_context: dict[str, Any]) -> Outcome:
    """Calls of the x32 interface, which have numbers of their own, must not pass."""
    if os.uname().machine != "x86_64":
        return inconclusive("this machine has no x32")

    def action() -> int:
        return 1 if raw(0x40000000 | 39) > 0 else 0

    code = in_child(action)
    if code == 1:
        return escaped("getpid of x32 worked")
    return held(
        "killed by the filter" if code == -signal.SIGSYS else f"refused by the kernel ({code})"
    )


# mov eax, 20 (getpid of i386); int 0x80; ret
_I386_GETPID = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"


@probe("syscalls.i386", "critical", NO_SECCOMP)
def i386(_context: dict[str, Any]) -> Outcome:
    """Calls of the 32-bit interface, which have numbers of their own, must not pass."""
    if os.uname().machine != "x86_64":
        return inconclusive("this machine has no 32-bit interface of x86")

    def action() -> int:
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(_I386_GETPID)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return 1 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid() else 2

    code = in_child(action)
    if code == 1:
        return escaped("getpid through int 0x80 worked")
    names = {
        -signal.SIGSYS: "killed by the filter",
        -signal.SIGSEGV: "this kernel has no 32-bit interface",
    }
    return held(names.get(code, f"refused by the kernel ({code})"))


@probe("syscalls.high-argument-bits", "high", NO_SECCOMP)
def high_argument_bits(_context: dict[str, Any]) -> Outcome:
    """Bits that the kernel ignores must not get an argument past the filter."""
    high = 0x7000_0000_0000_0000
    try:
        _master, slave = os.openpty()
    except PermissionError:  # the filter refuses the request whatever the descriptor is
        slave = 0
    tried = (
        ("ioctl TIOCSTI", call("ioctl", slave, high | 0x5412, b"x"), (errno.ENOTTY,)),
        ("personality", call("personality", high | 0x40000), ()),
        ("socket AF_ALG", call("socket", high | 38, 5, 0), (errno.EAFNOSUPPORT,)),
        ("prctl subreaper", call("prctl", high | 36, 1, 0, 0, 0), ()),
        (
            "prlimit of the tag",
            call("prlimit64", 0, high | 15, ctypes.create_string_buffer(16), 0),
            (),
        ),
    )
    for what, result, expected in tried:
        if result >= 0 or -result not in (errno.EPERM, *expected):
            return escaped(f"{what}: {said(result)}")
    return held(f"{len(tried)} calls refused")


@probe("syscalls.own-filter", "high", NO_SECCOMP)
def own_filter(_context: dict[str, Any]) -> Outcome:
    """A filter of its own that allows everything must not loosen the sandbox's."""
    allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", 1, ctypes.addressof(allow)), 16)
    result = call("seccomp", 1, 0, program)
    after = call("keyctl", 0, -3, 0)
    if -after in (errno.EPERM, errno.ENOSYS):
        return held(f"seccomp: {said(result)}; keyctl after it: {said(after)}")
    return escaped(f"keyctl after it: {said(after)}")


@probe("syscalls.no-randomisation", "low", NO_SECCOMP)
def no_randomisation(_context: dict[str, Any]) -> Outcome:
    """Address randomisation must not be switched off, nor readable memory made executable."""
    for bit in (0x0040000, 0x0400000, 0x0100000):
        result = call("personality", bit)
        if result >= 0:
            return escaped(f"personality {bit:#x}: {said(result)}")
    return held("personality: EPERM")


@probe("syscalls.merge-memory", "medium", NO_SECCOMP)
def merge_memory(_context: dict[str, Any]) -> Outcome:
    """Memory must not be merged with that of others, which would tell what they hold."""
    memory = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    tried = (call("madvise", address, 4096, 12), call("prctl", 67, 1, 0, 0, 0))
    if all(result < 0 for result in tried):
        return held(f"madvise: {said(tried[0])}, prctl: {said(tried[1])}")
    return escaped("pages may be merged")


@probe("syscalls.rewrite-itself", "low", NO_SECCOMP)
def rewrite_itself(_context: dict[str, Any]) -> Outcome:
    """A process must not rewrite how it looks from outside (PR_SET_MM)."""
    return refused("prctl", 35, 0xFF, 0, 0, 1)


# -- terminals --------------------------------------------------------------------------------

_TERMINAL = {
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
    "TIOCSETD": 0x5423,
    "TIOCCONS": 0x541D,
    "TIOCVHANGUP": 0x5437,
}


def _terminal_call(request: int) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        _master, slave = os.openpty()
        argument = ctypes.create_string_buffer(
            b"\xff\xff\xff\x7f" if request == 0x5423 else b"#", 8
        )
        result = call("ioctl", slave, request, argument)
        if result == -errno.ENOTTY:
            return held(f"ioctl: {said(result)}")
        return escaped(f"ioctl reached the kernel: {said(result)}")

    return run


for _name, _request in _TERMINAL.items():
    probe(
        f"syscalls.{_name.lower()}",
        "high" if _name in ("TIOCSTI", "TIOCLINUX") else "low",
        "none: only a Linux console knows it" if _name == "TIOCLINUX" else NO_SECCOMP,
        about=f"{_name} must be refused: it acts in the name of the terminal's owner.",
    )(_terminal_call(_request))


@probe("syscalls.unknown-ioctl", "medium", NO_SECCOMP)
def unknown_ioctl(_context: dict[str, Any]) -> Outcome:
    """An ioctl that is not on the list must be refused."""
    directory = os.open(os.environ.get("TMPDIR", "/tmp"), os.O_RDONLY | os.O_CLOEXEC)
    result = call(
        "ioctl", directory, 0x801C581F, ctypes.create_string_buffer(64)
    )  # FS_IOC_FSGETXATTR
    generation = call(
        "ioctl", directory, 0x80087601, ctypes.create_string_buffer(8)
    )  # FS_IOC_GETVERSION
    fiqsize = call(
        "ioctl", os.open("/usr/lib/os-release", os.O_RDONLY), 0x5460, ctypes.create_string_buffer(8)
    )
    tried = (result, generation, fiqsize)
    if all(answer == -errno.ENOTTY for answer in tried):
        return held("three requests: ENOTTY")
    return escaped(f"reached the kernel: {', '.join(map(said, tried))}")
