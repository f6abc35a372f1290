"""Identity of a process in the sandbox, and ways to change it."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess

from .kit import (
    BARE,
    BOTH,
    HOST,
    HOST_AMBIENT,
    HOST_GROUPS,
    HOST_NOBODY,
    HOST_ROOT,
    NO_SECCOMP,
    Outcome,
    attempt,
    call,
    escaped,
    first_escape,
    held,
    inconclusive,
    pids,
    probe,
    read,
    said,
    status_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PR_GET_SECUREBITS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 27, 47, 2
_SECUREBITS = 0xEF  # NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE and every lock
_CAP_CHOWN, _CAP_SYS_ADMIN = 0, 21
_CAPABILITY_VERSION_3 = 0x20080522

_SETS = (
    ("effective", "CapEff", "critical", HOST_ROOT),
    ("permitted", "CapPrm", "critical", HOST_ROOT),
    ("bounding", "CapBnd", "high", BARE),
    ("inheritable", "CapInh", "high", HOST_AMBIENT),
    ("ambient", "CapAmb", "high", HOST_AMBIENT),
)


def _empty_set(field: str) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        value = status_of("self").get(field, "?")
        return held(f"{field} {value}") if value.strip("0") == "" else escaped(f"{field} {value}")

    return run


for _name, _field, _severity, _control in _SETS:
    probe(
        f"identity.capabilities-{_name}",
        _severity,
        _control,
        where=BOTH,
        about=f"A process must not have any capability in its {_name} set.",
    )(_empty_set(_field))


@probe("identity.no-new-privs", "critical", HOST, where=BOTH)
def no_new_privs(_context: dict[str, Any]) -> Outcome:
    """A program must not gain anything by starting another one: no_new_privs must be set."""
    value = status_of("self").get("NoNewPrivs")
    return held("NoNewPrivs 1") if value == "1" else escaped(f"NoNewPrivs {value}")


@probe("identity.seccomp-mode", "critical", NO_SECCOMP, where=BOTH)
def seccomp_mode(_context: dict[str, Any]) -> Outcome:
    """A process must not run without a system-call filter."""
    value = status_of("self").get("Seccomp")
    return held("Seccomp 2") if value == "2" else escaped(f"Seccomp {value}")


@probe("identity.every-process-locked-down", "critical", NO_SECCOMP, where=BOTH)
def every_process(_context: dict[str, Any]) -> Outcome:
    """No process, PID 1 included, and no thread may lack the filter or hold a capability."""
    seen = 0
    for pid in pids():
        for task in _tasks(pid):
            seen += 1
            status = status_of(f"{pid}/task/{task}")
            if not status:
                continue  # it ended while we looked
            sets = "".join(status.get(key, "1") for _, key, _, _ in _SETS)
            if status.get("Seccomp") != "2" or status.get("NoNewPrivs") != "1" or sets.strip("0"):
                return escaped(
                    f"{pid}/{task} {status.get('Name')}: Seccomp {status.get('Seccomp')}, {sets}"
                )
    return held(f"{seen} threads of {len(pids())} processes")


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _own_namespace(kind: str) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        mine = os.readlink(f"/proc/self/ns/{kind}")
        theirs = context["namespaces"].get(kind)
        if theirs is None:
            return inconclusive("this kernel has no such namespace")
        return (
            escaped(f"{mine} is the host's")
            if mine == theirs
            else held(f"{mine}, the host's is {theirs}")
        )

    return run


for _kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
    probe(
        f"identity.namespace-{_kind}",
        "critical" if _kind in ("user", "mnt", "pid", "net") else "high",
        HOST,
        about=f"The sandbox must not share the host's {_kind} namespace.",
    )(_own_namespace(_kind))


@probe("identity.not-host-root", "critical", HOST_ROOT, where=BOTH)
def not_host_root(_context: dict[str, Any]) -> Outcome:
    """No id inside may be root of the host: such a process could write to the host's settings."""
    found = []
    for name in ("uid_map", "gid_map"):
        for line in read(f"/proc/self/{name}").decode().splitlines():
            inside, outside, count = (int(word) for word in line.split())
            if outside == 0:
                return escaped(f"{name}: {inside} is 0 on the host")
            found.append(f"{inside}-{inside + count - 1} is {outside}")
    return held(", ".join(found[:4]))


@probe("identity.become-root", "high", HOST_ROOT)
def become_root(_context: dict[str, Any]) -> Outcome:
    """A process must not be able to take uid or gid 0."""
    if os.getuid() == 0 and read("/proc/self/uid_map").split()[1:2] != [b"0"]:
        return inconclusive("this sandbox was asked to run as its own root")
    return first_escape(
        [
            attempt(lambda: os.setresuid(0, 0, 0), "setresuid(0)"),
            attempt(lambda: os.seteuid(0), "seteuid(0)"),
            attempt(lambda: os.setresgid(0, 0, 0), "setresgid(0)"),
            _fsuid(),
        ]
    )


def _fsuid() -> Outcome:
    call("setfsuid", 0)
    now = call("setfsuid", -1)
    return held(f"setfsuid(0): still {now}") if now else escaped("setfsuid(0): worked")


@probe("identity.join-groups", "high", HOST_ROOT)
def join_groups(_context: dict[str, Any]) -> Outcome:
    """A process must not be able to join a group."""
    return attempt(lambda: os.setgroups([0, 4]), "setgroups")


@probe("identity.other-groups", "medium", HOST_GROUPS)
def other_groups(_context: dict[str, Any]) -> Outcome:
    """A process must not keep groups of the host."""
    extra = sorted(set(os.getgroups()) - {os.getgid(), os.getegid()})
    if not extra:
        return held("no supplementary groups")
    if set(extra) == {65534}:
        return inconclusive("the caller's groups stay: an ordinary user may not give them up")
    return escaped(f"groups {extra}")


@probe("identity.raise-capabilities", "critical", HOST_ROOT)
def raise_capabilities(_context: dict[str, Any]) -> Outcome:
    """A process must not be able to give itself a capability."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), 8)
    one = 1 << _CAP_CHOWN
    sets = ctypes.create_string_buffer(struct.pack("6I", one, one, one, 0, 0, 0), 24)
    result = call("capset", header, sets)
    return escaped("capset: worked") if result == 0 else held(f"capset: {said(result)}")


@probe("identity.raise-ambient", "critical", HOST_AMBIENT)
def raise_ambient(_context: dict[str, Any]) -> Outcome:
    """A process must not be able to pass a capability on to the programs it starts."""
    result = call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_CHOWN, 0, 0)
    return (
        escaped("PR_CAP_AMBIENT_RAISE: worked") if result == 0 else held(f"prctl: {said(result)}")
    )


@probe("identity.securebits", "high", HOST)
def securebits(_context: dict[str, Any]) -> Outcome:
    """Uid 0 must mean nothing to capabilities, for good: securebits set and locked, or none to be had."""
    bits = call("prctl", _PR_GET_SECUREBITS, 0, 0, 0, 0)
    if bits == _SECUREBITS:
        return held(f"securebits {bits:#x}")
    # Two sets bound what root's programs gain: capabilities(7), "Transformation ... during execve".
    sets = {field: status_of("self").get(field, "1") for _, field, _, _ in _SETS}
    if not "".join(sets.values()).strip("0"):
        return held(
            f"securebits {bits:#x}, but there is no capability to be had: even the bounding set is empty"
        )
    return escaped(f"securebits {bits:#x}, CapBnd {sets['CapBnd']}")


@probe("identity.setuid-program", "critical", HOST_NOBODY)
def setuid_program(_context: dict[str, Any]) -> Outcome:
    """Starting a setuid program must not change who the process is."""
    program = next((p for p in _SETUID_PROGRAMS if _is_setuid(p)), None)
    if program is None:
        return inconclusive("this host has no setuid program in /usr/bin")
    # The loader prints its auxiliary vector only when nothing was gained by execve.
    if _secure("/usr/bin/env") is None:
        return inconclusive("this host's loader does not tell")
    secure = _secure(program)
    if secure == "0":
        return held(f"{program} started without privileges")
    return escaped(f"{program} started with privileges (AT_SECURE {secure})")


def _secure(program: str) -> str | None:
    done = subprocess.run(
        [program, "--help"],
        env={"LD_SHOW_AUXV": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    lines = [line.split() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return next((words[1] for words in lines if words[:1] == ["AT_SECURE:"]), None)


_SETUID_PROGRAMS = tuple(
    f"/usr/bin/{n}" for n in ("su", "newgrp", "passwd", "chsh", "mount", "gpasswd")
)


def _is_setuid(path: str) -> bool:
    try:
        return bool(os.stat(path).st_mode & 0o4000)
    except OSError:
        return False


@probe("identity.exclusive-host-id", "high", HOST)
def exclusive_host_id(context: dict[str, Any]) -> Outcome:
    """On the host the sandbox must not have the id of the user who started it."""
    outside = _outside_id(os.getuid())
    if context["caller_uid"] != outside:
        return held(f"host id {outside}, the caller is {context['caller_uid']}")
    if os.readlink("/proc/self/ns/user") != context["namespaces"]["user"]:
        return inconclusive("an ordinary user has only one id to give: namespaces separate")
    return escaped(f"host id {outside} is the caller's")


def _outside_id(uid: int) -> int:
    """Map the uid to the host's."""
    for line in read("/proc/self/uid_map").decode().splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return -1
