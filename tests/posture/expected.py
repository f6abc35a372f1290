"""What every process of a sandbox should look like from outside; nothing more, nothing less."""

from __future__ import annotations

import os
from dataclasses import replace

from tests.posture.reading import NAMESPACES, Identity, MountedAt

LOW_IDS = 2000
NOBODY = 65534
AGENT_ID = 65536  # real and saved id of agents; see decision 0340
TO_KILL, TO_TRACE = 1 << 5, 1 << 19  # CAP_KILL, CAP_SYS_PTRACE
SANDBOX = 1000

NULL = "/dev/null r"
OUTPUTS = {1: "pipe w", 2: "pipe w"}
TERMINAL = dict.fromkeys(range(3), "/dev/pts/0 rw")

# What PID 1 always holds: its three streams, the host's control socket, its signals, its own
# likelihood to be killed for memory (see decision 0002), its own I/O counters, what it sleeps in, where
# programs ask for netlink sockets, and the cgroups of its programs and of itself: memory and processor
# (decisions 0148 and 0338).
_NONE = "anon_inode:[eventfd] rw cloexec"
LISTENER = "anon_inode:seccomp notify rw cloexec"
INIT = {
    0: "/dev/null rw",
    1: "/dev/null rw",
    2: "/dev/null rw",
    3: "socket rw cloexec",
    4: "anon_inode:[signalfd] rw nonblock cloexec",
    5: "/1/oom_score_adj w cloexec",
    6: "/proc/1/io r cloexec",
    7: "/memfd:ringfence-hibernation (deleted) r cloexec",
    8: LISTENER,
    **dict.fromkeys(range(9, 13), _NONE),
}


def init(maker: int) -> dict[int, str]:
    """What PID 1 holds, of a sandbox of the user `maker`."""
    if maker or not os.path.exists("/sys/fs/cgroup/memory/tasks"):
        return INIT
    return {**INIT, **dict.fromkeys(range(9, 13), "/tasks w cloexec")}


def hibernated(maker: int) -> dict[int, str]:
    """While it sleeps, these outlive execve(2), with what it knew before."""
    held = {fd: text.removesuffix(" cloexec") for fd, text in init(maker).items()}
    return {**held, 13: "/memfd:known (deleted) rw"}


# And for each running exec: where its end is reported and, where something else ran already when
# it was started, whether it ever began.
REPORT = "socket rw cloexec"
BEGAN = "pipe r nonblock cloexec"
# An agent is PID 1 of another user. Its counters and its likelihood to be killed are told apart by its number.
_AGENT = {
    0: "/dev/null rw",
    1: "/dev/null rw",
    2: "/dev/null rw",
    3: "socket rw cloexec",
    4: "anon_inode:[signalfd] rw nonblock cloexec",
}


def agent() -> dict[int, str]:
    """What an agent always holds, in a sandbox that root made, but for what has its number."""
    tasks = ["/tasks w cloexec"] * 4 if os.path.exists("/sys/fs/cgroup/memory/tasks") else []
    return _AGENT | dict(enumerate([*tasks, LISTENER], 7))


LIMITS = {
    "Max core file size": "1 1",
    "Max open files": "4096 4096",
    "Max locked memory": "8388608 8388608",
    "Max pending signals": "4096 4096",
    "Max msgqueue size": "819200 819200",
    "Max nice priority": "0 0",
    "Max realtime priority": "0 0",
}
# Of one that has no owner of its own on the host: three count against the caller's.
LIMITS_OF_A_USER = {
    **LIMITS,
    "Max locked memory": "2097152 2097152",
    "Max pending signals": "1024 1024",
    "Max msgqueue size": "204800 204800",
}


def inside_id(seen: Identity) -> int:
    """The user inside that a process is, or acts as if it is an agent."""
    (uid,) = seen.uids - {id_of_agents(seen)}
    return next(i + uid - o for i, o, n in seen.uid_map if o <= uid < o + n)


def id_of_agents(seen: Identity) -> int:
    """On the host."""
    return next((outside for inside, outside, _ in seen.uid_map if inside == AGENT_ID), -1)


def identity_of_agent(wanted: Identity, rights: int) -> Identity:
    """Of the agent of a user whose programs are as wanted, with some capabilities more than they have."""
    inheritable, permitted, effective, bounding, ambient = wanted.capabilities
    capabilities = (inheritable, permitted | rights, effective | rights, bounding, ambient)
    uids = wanted.uids | {id_of_agents(wanted)}
    return replace(wanted, uids=uids, capabilities=capabilities)


def identity_made_by_root(seen: Identity, *, inside: int = SANDBOX) -> Identity:
    """Of a process with the id `inside` in a sandbox that root made."""
    first = seen.uid_map[0][1]
    maps = (
        (0, first, LOW_IDS),
        (NOBODY, first + LOW_IDS + 1, 1),
        (AGENT_ID, first + LOW_IDS + 2, 1),
    )
    host_id = first + inside if inside < LOW_IDS else first + LOW_IDS + 1
    return _identity(seen, host_id, host_id, maps, maps, "allow")


def identity_made_by(seen: Identity, uid: int, gid: int) -> Identity:
    """Of a process in a sandbox that the ordinary user `uid` made."""
    uid_map, gid_map = ((SANDBOX, uid, 1),), ((SANDBOX, gid, 1),)
    return _identity(seen, uid, gid, uid_map, gid_map, "deny")


def identity_of_range(
    seen: Identity, uid: int, *, inside: int = SANDBOX, capabilities: int = 0
) -> Identity:
    """Of a process with the id `inside` in a sandbox of the ordinary user `uid`, who has a range of ids.

    Args:
        capabilities: A mask of those that root inside keeps.
    """
    first = seen.uid_map[0][1]
    rest = (SANDBOX + 1, first + SANDBOX + 1, LOW_IDS - SANDBOX - 1)
    others = (NOBODY, first + LOW_IDS + 1, 1), (AGENT_ID, first + LOW_IDS + 2, 1)
    maps = ((0, first, SANDBOX), (SANDBOX, uid, 1), rest, *others)
    host_id = {SANDBOX: uid, NOBODY: first + LOW_IDS + 1}.get(inside, first + inside)
    wanted = _identity(seen, host_id, host_id, maps, maps, "allow")
    return replace(wanted, capabilities=(0, capabilities, capabilities, capabilities, 0))


def _identity(
    seen: Identity,
    uid: int,
    gid: int,
    uid_map: tuple[tuple[int, int, int], ...],
    gid_map: tuple[tuple[int, int, int], ...],
    setgroups: str,
) -> Identity:
    return Identity(
        uids=frozenset({uid}),
        gids=frozenset({gid}),
        groups=(),
        capabilities=(0, 0, 0, 0, 0),
        no_new_privs=1,
        seccomp=2,
        shared_namespaces=frozenset(),
        namespaces=seen.namespaces,  # compared with PID 1's by the test
        uid_map=uid_map,
        gid_map=gid_map,
        setgroups=setgroups,
        root="/",
    )


assert 7 == len(NAMESPACES)

_READ_ONLY = frozenset({"ro", "nosuid", "nodev"})
_DEVICE = frozenset({"ro", "nosuid", "noexec"})
_PRIVATE = ""  # propagation: no peer, no master

ETC = MountedAt("", _READ_ONLY, "", _PRIVATE)


def mounts() -> dict[str, MountedAt]:
    """Those of every sandbox, but what the host has of /etc."""
    found = {
        "/": MountedAt("/", frozenset({"rw", "nosuid", "nodev"}), "tmpfs", _PRIVATE),
        "/proc": MountedAt("/", _READ_ONLY | {"noexec"}, "proc", _PRIVATE),
        "/dev/pts": MountedAt("/", frozenset({"rw", "nosuid", "noexec"}), "devpts", _PRIVATE),
    }
    # Its name is gone, and its mode is 0444: the daemon alone gives it another content.
    boot_id = MountedAt("/dev/boot_id//deleted", host_directory("rw"), "tmpfs", _PRIVATE)
    found["/proc/sys/kernel/random/boot_id"] = boot_id
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        found[f"/dev/{name}"] = MountedAt(f"/{name}", _DEVICE, "devtmpfs", _PRIVATE)
    for name in ("interrupts", "kcore", "keys", "latency_stats", "sched_debug", "timer_list"):
        if os.path.exists(f"/proc/{name}"):
            found[f"/proc/{name}"] = MountedAt("/null", _DEVICE, "devtmpfs", _PRIVATE)
    for name in ("acpi", "asound", "scsi"):
        if os.path.exists(f"/proc/{name}"):
            flags = _READ_ONLY | {"noexec"}
            found[f"/proc/{name}"] = MountedAt("/dev/empty", flags, "tmpfs", _PRIVATE)
    return found


def host_directory(*flags: str) -> frozenset[str]:
    """Flags of a mounted directory of the host."""
    return frozenset({"nosuid", "nodev", *flags})
