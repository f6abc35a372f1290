"""Devices, the kernel's own files, PID 1 and the processes of the host."""

from __future__ import annotations

import errno
import os
import stat

from .kit import (
    BOTH,
    ESCAPED,
    HOST,
    HOST_ROOT,
    Outcome,
    attempt,
    cannot_open,
    escaped,
    first_escape,
    held,
    inconclusive,
    pids,
    probe,
    read,
    status_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_WRITE = os.O_WRONLY  # opened only, never written

# -- settings of the kernel -------------------------------------------------------------------

_SETTINGS = (
    (
        "core-pattern",
        "critical",
        "/proc/sys/kernel/core_pattern",
        "The host's crash handler, run as root",
    ),
    ("modprobe", "critical", "/proc/sys/kernel/modprobe", "The host's module loader, run as root"),
    ("sysrq", "critical", "/proc/sysrq-trigger", "The key that reboots the host"),
    ("binfmt", "critical", "/proc/sys/fs/binfmt_misc/register", "The host's list of interpreters"),
    ("panic", "high", "/proc/sys/kernel/panic_on_oops", "The host's reaction to a kernel fault"),
    (
        "randomize",
        "high",
        "/proc/sys/kernel/randomize_va_space",
        "The host's address randomisation",
    ),
    ("hardlinks", "high", "/proc/sys/fs/protected_hardlinks", "The host's protection of links"),
    ("overcommit", "high", "/proc/sys/vm/overcommit_memory", "The host's memory policy"),
    ("forwarding", "medium", "/proc/sys/net/ipv4/ip_forward", "A network setting"),
    ("last-pid", "medium", "/proc/sys/kernel/ns_last_pid", "The next process id"),
    (
        "user-namespaces",
        "high",
        "/proc/sys/user/max_user_namespaces",
        "The limit that forbids namespaces",
    ),
    ("irq", "medium", "/proc/irq/default_smp_affinity", "Which processor serves interrupts"),
)


def _setting(path: str) -> Callable[[dict[str, Any]], Outcome]:
    return lambda _context: cannot_open(path, _WRITE)


for _name, _severity, _path, _what in _SETTINGS:
    probe(
        f"devices_proc.{_name}",
        _severity,
        HOST_ROOT,
        where=BOTH,
        about=f"{_what} must not be writable: {_path}.",
    )(_setting(_path))


@probe("devices_proc.any-setting", "high", HOST_ROOT)
def any_setting(_context: dict[str, Any]) -> Outcome:
    """No file below /proc/sys and none of a process may be writable."""
    seen = 0
    for directory, _names, files in os.walk("/proc/sys"):
        for name in files:
            seen += 1
            outcome = cannot_open(os.path.join(directory, name), _WRITE)
            if outcome.status == "escaped":
                return outcome
    return held(f"{seen} settings, none can be opened to write")


@probe("devices_proc.own-files", "medium", HOST)
def own_files(_context: dict[str, Any]) -> Outcome:
    """A process must not write to its own kernel files, such as oom_score_adj."""
    names = (
        "oom_score_adj",
        "coredump_filter",
        "timerslack_ns",
        "clear_refs",
        "uid_map",
        "gid_map",
        "attr/current",
    )
    return first_escape([cannot_open(f"/proc/self/{name}", _WRITE) for name in names])


@probe("devices_proc.proc-writable", "high", HOST_ROOT)
def proc_writable(_context: dict[str, Any]) -> Outcome:
    """/proc must be mounted read-only."""
    flags = os.statvfs("/proc").f_flag
    return (
        held("/proc is read-only") if flags & os.ST_RDONLY else escaped("/proc is mounted writable")
    )


# -- memory and log of the kernel -------------------------------------------------------------


@probe("devices_proc.kernel-memory", "critical", HOST_ROOT)
def kernel_memory(_context: dict[str, Any]) -> Outcome:
    """The memory of the kernel must not be readable."""
    paths = (
        "/proc/kcore",
        "/dev/mem",
        "/dev/kmem",
        "/dev/port",
        "/proc/kpageflags",
        "/proc/kpagecount",
    )
    return first_escape([cannot_open(path) for path in paths if not _is_null(path)])


def _is_null(path: str) -> bool:
    """Return whether the null device masks it."""
    try:
        return os.stat(path).st_rdev == os.makedev(1, 3)
    except OSError:
        return False


@probe("devices_proc.kernel-log", "high", HOST_ROOT)
def kernel_log(_context: dict[str, Any]) -> Outcome:
    """The kernel's log must not be readable."""
    return first_escape([cannot_open(path) for path in ("/proc/kmsg", "/dev/kmsg")])


@probe("devices_proc.kernel-addresses", "medium", HOST_ROOT)
def kernel_addresses(_context: dict[str, Any]) -> Outcome:
    """Addresses of the kernel must not show."""
    for path in ("/proc/kallsyms", "/proc/modules", "/proc/iomem"):
        for line in read(path, 4096).decode("utf-8", "replace").splitlines():
            words = line.replace("-", " ").split()
            numbers = [
                word for word in words if len(word) >= 8 and not word.strip("0123456789abcdef")
            ]
            if any(int(word, 16) for word in numbers):
                return escaped(f"{path}: {line.strip()}")
    return held("no address in kallsyms, modules or iomem")


@probe("devices_proc.masked-files", "medium", HOST)
def masked_files(_context: dict[str, Any]) -> Outcome:
    """Files of /proc that tell about the whole host must be empty."""
    for name in ("keys", "timer_list", "interrupts", "sched_debug", "latency_stats"):
        if read(f"/proc/{name}"):
            return escaped(f"/proc/{name} has content")
    for name in ("acpi", "scsi", "asound"):
        try:
            entries = os.listdir(f"/proc/{name}")
        except OSError:
            continue
        if entries:
            return escaped(f"/proc/{name} has entries")
    return held("masked or absent")


# -- PID 1 ------------------------------------------------------------------------------------


def _init_file(name: str, flags: int = os.O_RDONLY) -> Callable[[dict[str, Any]], Outcome]:
    return lambda context: cannot_open(f"/proc/{context['init']}/{name}", flags)


for _name, _severity, _flags in (
    ("mem", "critical", os.O_RDWR),
    ("mem-read", "critical", os.O_RDONLY),
    ("environ", "high", os.O_RDONLY),
    ("maps", "high", os.O_RDONLY),
    ("auxv", "medium", os.O_RDONLY),
    ("syscall", "medium", os.O_RDONLY),
    ("io", "low", os.O_RDONLY),
    ("stack", "medium", os.O_RDONLY),
    ("pagemap", "medium", os.O_RDONLY),
):
    _file = _name.partition("-")[0]
    probe(
        f"devices_proc.init-{_name}",
        _severity,
        HOST_ROOT,
        where=BOTH,
        about=f"Resources of PID 1 must not be reachable through its file {_file}.",
    )(_init_file(_file, _flags))


@probe("devices_proc.init-descriptors", "critical", HOST_ROOT, where=BOTH)
def init_descriptors(context: dict[str, Any]) -> Outcome:
    """The descriptors of PID 1, its control socket among them, must not be reachable."""
    top = f"/proc/{context['init']}"
    tried = [attempt(os.listdir, f"list {name}", f"{top}/{name}") for name in ("fd", "map_files")]
    return first_escape([*tried, *(cannot_open(f"{top}/fd/{fd}") for fd in range(16))])


@probe("devices_proc.init-links", "high", HOST_ROOT, where=BOTH)
def init_links(context: dict[str, Any]) -> Outcome:
    """The program, directory, root and namespaces of PID 1 must not be reachable."""
    names = ("exe", "cwd", "root", "ns/user", "ns/mnt", "ns/pid")
    top = f"/proc/{context['init']}"
    return first_escape([attempt(os.readlink, f"read {name}", f"{top}/{name}") for name in names])


@probe("devices_proc.init-dumpable", "high", HOST_ROOT, where=BOTH)
def init_dumpable(context: dict[str, Any]) -> Outcome:
    """PID 1 must not be traceable: the files of such a process do not belong to its user."""
    path = f"/proc/{context['init']}/environ"
    owner = os.stat(path).st_uid
    # Whoever has no number in here is shown as nobody: that may be us, too.
    if owner == os.geteuid() and cannot_open(path).status == ESCAPED:
        return escaped("its files belong to us")
    return held(f"its files belong to {owner}")


# -- processes of the host --------------------------------------------------------------------


@probe("devices_proc.host-processes", "high", HOST, where=BOTH)
def host_processes(context: dict[str, Any]) -> Outcome:
    """No process of the host may be seen."""
    marker = context["marker"].encode()
    for pid in pids():
        if marker in read(f"/proc/{pid}/cmdline"):
            return escaped(f"pid {pid} is the planted process of the host")
    return held(f"{len(pids())} processes, all our own")


@probe("devices_proc.init-is-ours", "high", HOST)
def init_is_ours(_context: dict[str, Any]) -> Outcome:
    """PID 1 must be the sandbox's own."""
    name = status_of(1).get("Name", "")
    return (
        held("PID 1 is ringfence-init")
        if name == "ringfence-init"
        else escaped(f"PID 1 is {name!r}")
    )


# -- devices ----------------------------------------------------------------------------------

# Looked at, never opened: opening a watchdog starts it.
_DANGEROUS = (
    *(
        "kvm",
        "fuse",
        "net/tun",
        "vhost-net",
        "vhost-vsock",
        "vsock",
        "loop-control",
        "mapper/control",
    ),
    *(
        "userfaultfd",
        "uinput",
        "uhid",
        "watchdog",
        "rtc0",
        "hpet",
        "snapshot",
        "autofs",
        "btrfs-control",
    ),
    *(
        "mem",
        "port",
        "kmsg",
        "cuse",
        "ppp",
        "vfio/vfio",
        "dri/card0",
        "snd/seq",
        "input/event0",
        "mei0",
        "tpm0",
    ),
)
_ALLOWED = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}


@probe("devices_proc.dangerous-devices", "critical", HOST)
def dangerous_devices(_context: dict[str, Any]) -> Outcome:
    """Devices that reach the kernel or hardware must not exist."""
    found = [name for name in _DANGEROUS if os.path.lexists(f"/dev/{name}")]
    return (
        escaped(f"/dev has {' '.join(found)}")
        if found
        else held(f"none of {len(_DANGEROUS)} is there")
    )


@probe("devices_proc.device-list", "critical", HOST)
def device_list(_context: dict[str, Any]) -> Outcome:
    """/dev must hold harmless devices and terminals of its own, no disk."""
    for directory, _names, files in os.walk("/dev"):
        for name in files:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            number = (os.major(info.st_rdev), os.minor(info.st_rdev))
            own_terminal = directory == "/dev/pts" and number[0] == 136
            if stat.S_ISBLK(info.st_mode) or (
                stat.S_ISCHR(info.st_mode) and number not in _ALLOWED and not own_terminal
            ):
                return escaped(f"{path} is device {number[0]}:{number[1]}")
    return held("only harmless devices")


@probe("devices_proc.make-device", "critical", HOST_ROOT)
def make_device(_context: dict[str, Any]) -> Outcome:
    """No device may be made, anywhere."""
    path = f"/tmp/ringfence-device-{os.getpid()}"
    try:
        return attempt(
            lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
            "mknod of a copy of /dev/null",
        )
    finally:
        if os.path.lexists(path):
            os.unlink(path)


@probe("devices_proc.host-terminals", "high", HOST)
def host_terminals(context: dict[str, Any]) -> Outcome:
    """Terminals of the host must not be there."""
    if not context["terminal"]:
        return inconclusive("the host gave no terminal to plant")
    try:
        found = os.stat(context["terminal"])
    except OSError as exc:
        return held(f"{context['terminal']}: {errno.errorcode.get(exc.errno or 0)}")
    if found.st_dev != context["terminal_device"]:
        return held(f"{context['terminal']} is another one")
    return escaped(f"{context['terminal']} is the host's")


@probe("devices_proc.sysfs", "high", HOST)
def sysfs(_context: dict[str, Any]) -> Outcome:
    """/sys must not be there: it shows the host's hardware and takes its settings."""
    try:
        found = os.listdir("/sys")
    except OSError:
        return held("/sys is absent")
    return escaped(f"/sys has {len(found)} entries") if found else held("/sys is empty")


@probe("devices_proc.kernel-file-systems", "critical", HOST)
def kernel_file_systems(context: dict[str, Any]) -> Outcome:
    """No control group, sysfs, debugfs, tracefs, bpf or key file system may be there to be used."""
    bad = {
        *(
            "cgroup",
            "cgroup2",
            "sysfs",
            "debugfs",
            "tracefs",
            "securityfs",
            "bpf",
            "configfs",
            "pstore",
        ),
        *("efivarfs", "fusectl", "binfmt_misc", "mqueue", "hugetlbfs", "overlay", "autofs"),
    }
    for line in read("/proc/self/mountinfo", 1 << 20).decode("utf-8", "replace").splitlines():
        words = line.split()
        device, target, kind = words[2], words[4], words[words.index("-") + 1]
        if kind in bad and _is_seen(target, device) and not _is_own_root(kind, target, context):
            return escaped(line)
    return held("none is mounted, or none can be seen")


def _is_seen(target: str, device: str) -> bool:
    """Return whether the mount is visible at its target, and no other covers it."""
    try:
        found = os.lstat(target).st_dev
    except FileNotFoundError:
        return False  # the mount over a parent directory has no such name
    except OSError:
        return True  # it cannot be told
    return f"{os.major(found)}:{os.minor(found)}" == device


def _is_own_root(kind: str, target: str, context: dict[str, Any]) -> bool:
    """A root of an engine's or an image's layers, which is not the host's own."""
    found = os.stat("/").st_dev
    device = f"{os.major(found)}:{os.minor(found)}"
    return kind == "overlay" and target == "/" and device != context["root_device"]


@probe("devices_proc.control-groups", "critical", HOST_ROOT)
def control_groups(_context: dict[str, Any]) -> Outcome:
    """Control groups must not be writable: release_agent runs a program as root of the host."""
    tried = []
    for base in (
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup/unified",
    ):
        for name in ("cgroup.procs", "release_agent", "tasks"):
            tried.append(cannot_open(f"{base}/{name}", _WRITE))
    return first_escape(tried)
