"""Limits that a process must not lift, and things of the host that are scarce.

The bombs themselves are set off from outside: see outside/bombs.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import stat

from .kit import (
    BOTH,
    HOST,
    HOST_ROOT,
    NO_SECCOMP,
    Outcome,
    attempt,
    call,
    escaped,
    first_escape,
    held,
    inconclusive,
    probe,
    read,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SANDBOXES = 100  # that a host should be able to have at once
_NETLINK_SOCKETS = 64
_LEAST_SIGNALS = 4096  # a user of the host's who has no more than these is given as many
_LIMITS = {
    "processes": resource.RLIMIT_NPROC,
    "open-files": resource.RLIMIT_NOFILE,
    "locked-memory": resource.RLIMIT_MEMLOCK,
    "pending-signals": resource.RLIMIT_SIGPENDING,
    "queues": resource.RLIMIT_MSGQUEUE,
    "real-time": resource.RLIMIT_RTPRIO,
}


def _raise_limit(which: int) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        _soft, hard = resource.getrlimit(which)
        if hard == resource.RLIM_INFINITY:
            return escaped("unlimited")
        try:
            resource.setrlimit(which, (hard + 1, hard + 1))
        except (OSError, ValueError) as exc:
            return held(f"{hard}; to raise it: {exc}")
        return escaped(f"raised from {hard}")

    return run


for _name, _which in _LIMITS.items():
    probe(
        f"resources.raise-{_name}",
        "medium",
        HOST_ROOT,
        where=BOTH,
        about=f"The limit of {_name} must be set, and not be raisable.",
    )(_raise_limit(_which))


@probe("resources.pending-signals", "medium", HOST)
def pending_signals(context: dict[str, Any]) -> Outcome:
    """A sandbox must not be able to take all pending signals that its user has on the whole host."""
    ours = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    everybody = context["pending_signals"]
    words = f"{ours} of the {everybody} of the user who started it"
    if ours == resource.RLIM_INFINITY or (ours > _LEAST_SIGNALS and ours == everybody):
        return escaped(words)
    return held(words)


@probe("resources.real-time", "high", HOST_ROOT)
def real_time(_context: dict[str, Any]) -> Outcome:
    """A process must not get in front of all others of the host."""
    parameter = os.sched_param(1)
    return first_escape(
        [
            attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, parameter), "SCHED_FIFO"),
            attempt(lambda: os.sched_setscheduler(0, os.SCHED_RR, parameter), "SCHED_RR"),
            attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5), "nice -5"),
            _result("real-time I/O", call("ioprio_set", 1, 0, 1 << 13)),
        ]
    )


def _result(what: str, result: int) -> Outcome:
    return escaped(f"{what}: worked") if result == 0 else held(f"{what}: {said(result)}")


@probe("resources.lock-memory", "medium", HOST_ROOT)
def lock_memory(_context: dict[str, Any]) -> Outcome:
    """No more than the allowed 8 MiB of memory may be locked."""
    size = 9 << 20
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return _result("mlock of 9 MiB", call("mlock", address, size))


@probe("resources.core-dump", "medium", HOST, where=BOTH)
def core_dump(_context: dict[str, Any]) -> Outcome:
    """A crash must neither leave a core file nor start the host's crash handler.

    A handler behind a pipe is started whatever the limit is, unless that is exactly 1.
    """
    zero = ctypes.create_string_buffer(16)
    tried = (
        call("setrlimit", resource.RLIMIT_CORE, zero),
        call("prlimit64", 0, resource.RLIMIT_CORE, zero, 0),
        call("prlimit64", 0, 1 << 32 | resource.RLIMIT_CORE, zero, 0),
        call("prlimit64", 0, resource.RLIMIT_CORE, zero, ctypes.create_string_buffer(16)),
    )
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    if limits == (1, 1):
        return held(f"the limit is 1 and stays: {', '.join(map(said, tried))}")
    return escaped(f"the limit is {limits}, with which a handler would start")


def _shared_limit(name: str, take: Callable[[], int], most: int = 4096) -> Outcome:
    """Take half of what the host allows; escaped when one sandbox may have that much."""
    text = read(f"/proc/sys/fs/inotify/{name}").strip()
    if not text.isdigit():
        return inconclusive("this kernel has no such limit")
    half = min(int(text) // 2, most)
    for taken in range(half):
        result = take()
        if result < 0:
            return held(f"{taken} of the host's {text.decode()}, then {said(result)}")
    return escaped(
        f"{half} taken, of {text.decode()} that all sandboxes of this user and the host share"
    )


@probe("resources.inotify-instances", "medium", HOST_ROOT)
def inotify_instances(_context: dict[str, Any]) -> Outcome:
    """A sandbox must not take the watchers (inotify instances) of the user who started it."""
    return _shared_limit("max_user_instances", lambda: call("inotify_init1", os.O_CLOEXEC))


@probe("resources.inotify-watches", "medium", HOST_ROOT)
def inotify_watches(_context: dict[str, Any]) -> Outcome:
    """A sandbox must not be allowed most of the inotify watches that its user has on the whole host."""
    ours, everybody = (
        int(read(f"/proc/sys/{name}").strip() or 0)
        for name in ("user/max_inotify_watches", "fs/inotify/max_user_watches")
    )
    if not everybody:
        return inconclusive("this kernel has no such limit")
    said = f"{ours} of the {everybody} that this host allows a user"
    return held(said) if ours <= everybody // 2 else escaped(said)


@probe("resources.netlink-sockets", "high", NO_SECCOMP)
def netlink_sockets(_context: dict[str, Any]) -> Outcome:
    """Sockets whose content counts against no memory limit must be few, also before they are bound."""
    made: list[socket.socket] = []
    try:
        while len(made) < 4 * _NETLINK_SOCKETS:
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
    except OSError as exc:
        if len(made) <= _NETLINK_SOCKETS:
            return held(f"{len(made)}, then {exc.strerror}")
    finally:
        for each in made:
            each.close()
    return escaped(f"{len(made)} in one process")


@probe("resources.terminals", "medium", HOST)
def terminals(_context: dict[str, Any]) -> Outcome:
    """A sandbox must not be able to take the terminals of the whole host."""
    most = int(read("/proc/sys/kernel/pty/max").strip() or 4096)
    opened: list[int] = []
    try:
        while len(opened) < most // _SANDBOXES:
            opened.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as exc:
        return held(f"{len(opened)} of the host's {most}, then {exc.strerror}")
    finally:
        for fd in opened:
            os.close(fd)
    return escaped(
        f"{most // _SANDBOXES} taken by one process, of {most} that the host has for everybody"
    )


_WORDS = "none: on a plain host nobody may open what PID 1 has"


@probe("resources.words-of-init", "high", _WORDS)
def words_of_init(_context: dict[str, Any]) -> Outcome:
    """The standard error of PID 1 must not be a host file that a guest could fill."""
    found = []
    for stream in (1, 2):
        try:
            fd = os.open(f"/proc/1/fd/{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            found.append(held(f"{stream}: {exc.strerror}"))
            continue
        try:
            found.append(_may_fill(fd))
        finally:
            os.close(fd)
    return first_escape(found)


_FAR = 64 << 20


def _may_fill(fd: int) -> Outcome:
    """Test a write of one byte far behind the file's end: the hole before it takes no space."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return held("it can be opened, and is no file")
    return attempt(lambda: os.pwrite(fd, b"x", _FAR), f"write at {_FAR} of an errors file")


@probe("resources.open-files", "medium", HOST)
def open_files(_context: dict[str, Any]) -> Outcome:
    """A sandbox must not be able to take the open files of the whole host."""
    most = int(read("/proc/sys/fs/file-max").strip() or 0)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if resource.RLIM_INFINITY in (processes, files):
        return escaped("no limit at all")
    product = processes * files
    words = f"{processes} processes with {files} files each, of {most} on the host"
    return held(words) if product < most // 10 * 9 else escaped(words)
