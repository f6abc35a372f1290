"""The plan for the zygote: plain values only, decided entirely by the host.

A plan is a dict (it crosses the sockets as `marshal`). Its steps are tuples ``(verb, ...)``; the
verbs are the functions of `newroot.py`. Nothing is decided in the launcher.

A sandbox is made in two halves. The zygote gets the `Shape`, the input of the first half:
namespaces, ids, cgroups, the root of the template. The whole plan waits in the sandbox's own socket
until the second half reads it there. A prebuilt sandbox has only its shape, and gets a plan later.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Tree(TypedDict):
    """A host file or directory to bind into the sandbox."""

    source: str  # absolute host path, symlinks already resolved
    device: int  # st_dev and st_ino of what the host process resolved: a swap is noticed
    inode: int  # 0: not checked
    attributes: int  # MOUNT_ATTR_*
    idmap: str  # "" or the extents of an idmapped mount: "host inside count" lines for uid
    idmap_gid: str
    fd: int  # index of an O_PATH descriptor sent along; -1 for none


class NetworkPlan(TypedDict):
    """Settings of a sandbox's own network namespace, and the sockets to open in it."""

    # Name, protocol, messages, the number that is acknowledged, the first that is IPv6's.
    batches: list[tuple[str, int, bytes, int, int]]
    port: int  # of the listener; 0: open no sockets


class Ids(TypedDict):
    uid_map: str
    gid_map: str
    id_helpers: list[str]  # newuidmap and newgidmap, which write them; none: the zygote may itself
    deny_setgroups: bool
    setup_uid: int  # inside ids while building
    setup_gid: int


class Shape(Ids):
    """Input of the zygote, and of the first half of the boot."""

    id: str
    namespaces: int  # CLONE_NEW* flags
    uid: int  # inside ids of everything that runs
    gid: int
    hostname: str
    root_size_bytes: int
    root_inodes: int
    disk: Tree | None  # a file system or directory that is the root in place of a tmpfs
    shared_memory_bytes: int  # size of a tmpfs at /dev/shm; 0: a directory of the root
    scratch: (
        str  # a host directory that exists; the root tmpfs is mounted over it in the new namespace
    )
    layers: list[Tree]
    """Files below the root's writable layer, the uppermost first; none: the template makes them."""
    template: bytes  # marshal of (trees, steps): what every sandbox of this kind has
    keep_capabilities: bool
    root_capabilities: int  # a mask: what uid 0 inside keeps, within its own user namespace
    forbid_user_namespaces: bool
    cgroup_dirs: list[str]  # directories made for this sandbox, v1: one a controller; v2: one
    cgroup_values: list[tuple[str, str]]  # file, value
    cgroup_version: int  # 0: none
    # Of `cgroup_dirs`, those that only what PID 1 starts is in, and PID 1 in the one above: v1.
    programs_cgroups: list[str]
    trees: list[Tree]  # what its steps bind, beyond the template
    placeholders: list[tuple[str, str, int, int]]  # to remove when the sandbox is gone
    note: str  # the file that tells of them, to remove after them; "" for none
    trusted_root: bool  # the zygote may open trees and map ids as host root
    borrows_proc: bool  # show the caller's own /proc where the kernel refuses a new one


class Plan(Shape):
    steps: list[tuple[Any, ...]]
    rlimits: list[tuple[int, int, int]]
    terminals: int  # that may be open at once; 0: the default
    no_new_privs: bool
    seccomp: bytes
    netlink_sockets: int  # that may be open in its network namespace
    connects: bool  # PID 1 connects for all others: see `connects`
    tag_key: int  # 64 random bits: lets PID 1, and nobody else, set the process-tree tag
    landlock: tuple[int, int, int, int, list[tuple[str, int]]] | None
    memory_watchdog_bytes: int  # 0: off
    # The filter is ours, which lets PID 1 give memory back; a user's might kill it.
    releases_idle_pages: bool
    network: NetworkPlan | None  # None: nothing but lo, or the host's own
