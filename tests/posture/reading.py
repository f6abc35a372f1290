"""Reads from outside, as root of the host, what the kernel says of every process of a sandbox."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_ACCESS = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
_MODES = {
    os.O_APPEND: "append",
    os.O_NONBLOCK: "nonblock",
    os.O_CLOEXEC: "cloexec",
    os.O_PATH: "path",
}


@dataclass(frozen=True)
class Identity:
    """What must be the same for every thread of every process."""

    uids: frozenset[int]
    gids: frozenset[int]
    groups: tuple[int, ...]
    capabilities: tuple[
        int, int, int, int, int
    ]  # inheritable, permitted, effective, bounding, ambient
    no_new_privs: int
    seccomp: int
    shared_namespaces: frozenset[str]  # with the host
    namespaces: tuple[str, ...]
    uid_map: tuple[tuple[int, int, int], ...]
    gid_map: tuple[tuple[int, int, int], ...]
    setgroups: str
    root: str


@dataclass(frozen=True)
class Process:
    """One process: who it is, what it holds, what bounds it."""

    pid: int  # as the host counts
    inside: int  # as the sandbox counts
    name: str
    command: tuple[str, ...]
    threads: int
    identities: frozenset[Identity]  # one, when all threads are alike
    files: dict[int, str] = field(hash=False)  # "target access flags"
    limits: dict[str, str] = field(hash=False)
    traceable: bool  # whether its kernel files belong to its own user
    control_groups: frozenset[str]


def processes_in(first: int) -> list[Process]:
    """Every process in the PID namespace of `first`, whoever its parent is."""
    wanted = os.readlink(f"/proc/{first}/ns/pid")
    found = []
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            continue  # it ended while we looked, or has capabilities that we lack: not a sandbox's
        if wanted == namespace:
            found += _still_there(pid)
    return found


def _still_there(pid: int) -> list[Process]:
    """The process; none where it ended while we looked. That a thread of it did is no reason to miss it."""
    for _ in range(500):
        try:
            return [read_process(pid)]
        except (FileNotFoundError, ProcessLookupError):
            if not os.path.exists(f"/proc/{pid}"):
                return []
            time.sleep(0.01)  # a thread of it ended, or it did and was not waited for yet
    return [read_process(pid)]


def read_process(pid: int) -> Process:
    proc = Path(f"/proc/{pid}")
    status = _status(proc)
    tasks = sorted(os.listdir(proc / "task"))
    return Process(
        pid=pid,
        inside=int(status["NSpid"].split()[-1]),
        name=status["Name"],
        command=command_of(pid),
        threads=len(tasks),
        identities=frozenset(_identity(proc / "task" / task) for task in tasks),
        files=_files(proc),
        limits=_limits(proc),
        traceable=0 != (proc / "environ").stat().st_uid,
        control_groups=frozenset(
            line.split(":", 2)[2] for line in (proc / "cgroup").read_text().splitlines()
        ),
    )


def command_of(pid: int) -> tuple[str, ...]:
    """Its words; one empty one of a process that has ended and was not waited for yet."""
    return tuple(Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ").split("\0"))


def _status(proc: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (proc / "status").read_text().splitlines())
    return {key: value.strip() for key, _, value in lines}


def _identity(proc: Path) -> Identity:
    status = _status(proc)
    links = {kind: os.readlink(proc / "ns" / kind) for kind in NAMESPACES}
    return Identity(
        uids=frozenset(map(int, status["Uid"].split())),
        gids=frozenset(map(int, status["Gid"].split())),
        groups=tuple(map(int, status["Groups"].split())),
        capabilities=(
            int(status["CapInh"], 16),
            int(status["CapPrm"], 16),
            int(status["CapEff"], 16),
            int(status["CapBnd"], 16),
            int(status["CapAmb"], 16),
        ),
        no_new_privs=int(status["NoNewPrivs"]),
        seccomp=int(status["Seccomp"]),
        shared_namespaces=frozenset(
            kind for kind, link in links.items() if link == os.readlink(f"/proc/self/ns/{kind}")
        ),
        namespaces=tuple(links.values()),
        uid_map=_map(proc / "uid_map"),
        gid_map=_map(proc / "gid_map"),
        setgroups=_setgroups(proc),
        root=os.readlink(proc / "root"),
    )


def _setgroups(proc: Path) -> str:
    # Of a process, not of a thread.
    return (proc.parent.parent / "setgroups").read_text().strip()


def _map(path: Path) -> tuple[tuple[int, int, int], ...]:
    rows = []
    for line in path.read_text().splitlines():
        inside, outside, count = map(int, line.split())
        rows.append((inside, outside, count))
    return tuple(rows)


def _files(proc: Path) -> dict[int, str]:
    """What a process holds open for good: PID 1 looks into /proc for moments at a time."""
    for _ in range(100):
        try:
            found = {int(fd): _file(proc, fd) for fd in os.listdir(proc / "fd")}
            time.sleep(0.003)
            if found == {int(fd): _file(proc, fd) for fd in os.listdir(proc / "fd")}:
                return found
        except FileNotFoundError:
            continue
    raise AssertionError(f"{proc} never holds still")


def _file(proc: Path, fd: str) -> str:
    """`pipe:[4711] r cloexec`: what it is, and how it was opened."""
    info = (proc / "fdinfo" / fd).read_text()
    flags = int(info.partition("flags:")[2].split()[0], 8)
    words = [os.readlink(proc / "fd" / fd), _ACCESS[flags & os.O_ACCMODE]]
    return " ".join(words + [word for bit, word in _MODES.items() if flags & bit])


def anonymous(files: dict[int, str]) -> dict[int, str]:
    """The same without the numbers of pipes and sockets, and the names of cgroups."""
    return {
        fd: re.sub(r":\[\d+\]|^/sys/fs/cgroup/.*(?=/tasks )", "", text)
        for fd, text in files.items()
    }


def _limits(proc: Path) -> dict[str, str]:
    found = {}
    for line in (proc / "limits").read_text().splitlines()[1:]:
        name, soft, hard = line[:25].strip(), *line[26:].split()[:2]
        found[name] = f"{soft} {hard}"
    return found


@dataclass(frozen=True)
class MountedAt:
    """One line of mountinfo, without what changes from boot to boot."""

    shows: str  # the path shown, within its file system
    flags: frozenset[str]
    kind: str
    propagation: str


def mounts_of(pid: int) -> dict[str, MountedAt]:
    """Every mount that a process sees, by target; the newest where several are at one."""
    found = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        words = line.split()
        dash = words.index("-")
        flags = frozenset(words[5].split(",")) - {"relatime", "noatime", "nodiratime"}
        found[words[4]] = MountedAt(words[3], flags, words[dash + 1], " ".join(words[6:dash]))
    return found


def holders_of(pipe: str) -> set[int]:
    """Every process of the host that has `pipe:[...]` open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if pipe in links:
            found.add(int(pid))
    return found
