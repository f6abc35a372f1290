"""Which Landlock rules a sandbox gets: pure judgement, the launcher enforces the result.

Landlock stands behind the mounts: a hole in one is not a hole in both. It only ever adds up
permissions, so it cannot make a read-only directory inside a writable one; the mounts do.
"""

from __future__ import annotations

import os.path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# LANDLOCK_ACCESS_FS_*, include/uapi/linux/landlock.h
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # ABI 2, Linux 5.19
TRUNCATE = 1 << 14  # ABI 3, Linux 6.2
IOCTL_DEV = 1 << 15  # ABI 5, Linux 6.10
RESOLVE_UNIX = 1 << 16  # ABI 9, Linux 7.1

# LANDLOCK_ACCESS_NET_*, include/uapi/linux/landlock.h
BIND_TCP = 1 << 0  # ABI 4, Linux 6.7
CONNECT_TCP = 1 << 1
BIND_UDP = 1 << 2  # ABI 10, Linux 7.2
CONNECT_SEND_UDP = 1 << 3

# LANDLOCK_SCOPE_*, include/uapi/linux/landlock.h; ABI 6, Linux 6.12
SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
SCOPE_SIGNAL = 1 << 1

NEWEST_ABI = 10  # the newest whose rights are known here; a newer kernel still has them all

_ABI_1 = (1 << 13) - 1  # EXECUTE to MAKE_SYM
_FILE_RIGHTS = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV), (9, RESOLVE_UNIX))
_NET_RIGHTS = ((4, BIND_TCP | CONNECT_TCP), (10, BIND_UDP | CONNECT_SEND_UDP))
_READ = EXECUTE | READ_FILE | READ_DIR
# No devices may be made. RESOLVE_UNIX is granted nowhere: sockets made inside need no rule.
_WRITE = _READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK
_WRITE |= MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
_DEVICES = READ_FILE | WRITE_FILE | IOCTL_DEV
_FILE = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE

# Rights that an older kernel cannot enforce: (since ABI, Linux, text for the report).
_SINCE = (
    (2, "5.19", "any rule: with one, every rename and link between directories would fail"),
    (3, "6.2", "truncating files outside writable directories"),
    (5, "6.10", "ioctl on devices outside /dev"),
    (6, "6.12", "signals to processes outside, abstract unix sockets of outside"),
    (9, "7.1", "connecting to unix sockets by path"),
)
_SINCE_NETWORK = ((4, "6.7", "TCP bind and connect"), (10, "7.2", "UDP bind, connect and send"))


class LandlockPlan:
    """Arguments of landlock_create_ruleset and landlock_add_rule."""

    __slots__ = ("handled_fs", "handled_net", "missing", "rules", "scoped")

    def __init__(
        self,
        handled_fs: int,
        handled_net: int,
        scoped: int,
        rules: tuple[tuple[str, int], ...],
        missing: tuple[str, ...],
    ) -> None:
        self.handled_fs = handled_fs  # accesses that need a rule; 0 with the next two: no ruleset
        self.handled_net = handled_net
        self.scoped = scoped
        self.rules = rules  # (path inside the sandbox, accesses allowed beneath it)
        self.missing = missing  # what is not enforced, in words for the report

    @property
    def is_empty(self) -> bool:
        """True if this kernel can enforce nothing of the plan."""
        return not (self.handled_fs or self.handled_net or self.scoped)

    @property
    def refuses_host_sockets(self) -> bool:
        """True if the sandbox cannot reach host unix sockets by path."""
        return bool(self.handled_fs & RESOLVE_UNIX)

    @property
    def refuses_abstract_sockets(self) -> bool:
        """True if the sandbox cannot reach host abstract unix sockets even in the host's
        network.
        """
        return bool(self.scoped & SCOPE_ABSTRACT_UNIX_SOCKET)


def plan_landlock(
    abi: int,
    *,
    writable: Iterable[str],
    writable_files: Iterable[str] = (),
    read_only: Iterable[str] = (),
    without_sockets: Iterable[str] = (),
    network: bool = True,
) -> LandlockPlan:
    """Decide the rules for one sandbox.

    Args:
        abi: What the kernel says; 0 for no Landlock.
        writable: Directories whose whole tree may be written; /dev/shm is one if it is to be.
        writable_files: Mounts that are a single file; the kernel refuses a directory's rule there.
        read_only: Mounts that must not be written.
        without_sockets: Of the writable ones, directories of the host: no Unix socket may be made
            there, or in a tree that they are in.
        network: False refuses every TCP (and, from ABI 10, UDP) bind and connect.
    """
    if abi < 2:
        return LandlockPlan(0, 0, 0, (), _missing(abi, (), network))
    asked = (
        *(abi, tuple(writable), tuple(writable_files), tuple(read_only)),
        *(tuple(without_sockets), network),
    )
    if asked not in _decided:
        if len(_decided) >= _MOST_DECIDED:
            _decided.clear()
        _decided[asked] = _decide(*asked)
    return _decided[asked]


_MOST_DECIDED = 64
_decided: dict[tuple[Any, ...], LandlockPlan] = {}  # most sandboxes ask for the same


def _decide(
    abi: int,
    writable: tuple[str, ...],
    writable_files: tuple[str, ...],
    read_only: tuple[str, ...],
    without_sockets: tuple[str, ...],
    network: bool,
) -> LandlockPlan:
    handled_fs = _ABI_1 | sum(right for since, right in _FILE_RIGHTS if abi >= since)
    handled_net = 0 if network else sum(right for since, right in _NET_RIGHTS if abi >= since)
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if abi >= 6 else 0
    trees = sorted({_checked(path) for path in writable})
    rules = [("/", _READ), ("/dev", _DEVICES & handled_fs)]
    with_sockets = socket_trees(trees, without_sockets)
    rules += [
        (path, (_WRITE if path in with_sockets else _WRITE & ~MAKE_SOCK) & handled_fs)
        for path in trees
    ]
    rules += [(path, _FILE & handled_fs) for path in sorted(map(_checked, writable_files))]
    nested = tuple(
        f"read-only {path} lies in writable {tree}: its mount alone keeps it"
        for path in sorted({_checked(path) for path in read_only})
        for tree in trees
        if _is_beneath(path, tree)
    )
    return LandlockPlan(
        handled_fs, handled_net, scoped, tuple(rules), _missing(abi, nested, network)
    )


def socket_trees(trees: Iterable[str], without: Iterable[str]) -> list[str]:
    """Return the writable trees in which sockets may be made: those without a host directory.

    Landlock adds up the rights of a path and of all its parents, so a tree cannot allow a right
    that a directory in it must not have.
    """
    hosts = [_checked(path) for path in without]
    return [
        tree
        for tree in map(_checked, trees)
        if not any(_is_beneath(path, tree) or _is_beneath(tree, path) for path in hosts)
    ]


def _missing(abi: int, nested: tuple[str, ...], network: bool) -> tuple[str, ...]:
    if abi < 1:
        return (
            "everything: this kernel has no Landlock, or disables it (lsm= on its command line)",
        )
    since = _SINCE if network else _SINCE + _SINCE_NETWORK
    words = [f"{what} (needs Linux {linux})" for first, linux, what in since if abi < first]
    return (*words, *nested)


def _checked(path: str) -> str:
    """`path` as the rules see it.

    Raises:
        ValueError: It would give away the whole file system or /proc.
    """
    normal = os.path.normpath(path)
    if not path.startswith("/") or normal.strip("/") == "" or _is_beneath(normal, "/proc"):
        raise ValueError(f"not a directory of a sandbox: {path!r}")
    return normal


def _is_beneath(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree + "/")
