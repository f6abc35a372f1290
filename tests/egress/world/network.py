"""Namespaces: the host's network and mounts as the world has them, and the internet behind it.

    this process (host)  eth0 198.51.100.254 ── veth ── 198.51.100.253  the internet's process
                         default route here               every address there is is its own

As root the user namespace is the machine's, so that what is tested is root; anybody else gets one of
their own, in which they are who they are, and in the end hold no capability.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
from pathlib import Path

from ringfence.linux import mounts, namespaces, privileges

from . import places
from .authority import BUNDLE

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # include/uapi/linux/mount.h
_CAP_NET_ADMIN = 12
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION_3 = 0x20080522


class CannotEnterError(Exception):
    """This machine has no such world; says what is missing."""


def enter_host() -> None:
    """Make this process, and what it starts, live on the world's host. For good.

    Precondition: one thread.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid:
            namespaces.unshare(namespaces.CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
            _hand_down_net_admin()
        namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS)
        mounts.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    except OSError as exc:
        raise CannotEnterError(f"no namespaces: {exc}") from exc


def enter_internet() -> None:
    """The same for a process of the internet: a network of its own behind the host's."""
    namespaces.unshare(namespaces.CLONE_NEWNET)


def connect(internet_pid: int) -> None:
    """Lay the cable from here to the network of `internet_pid`, and give this end its addresses."""
    _ip("link set lo up", f"link add eth0 type veth peer name eth0 netns {internet_pid}")
    _ip(
        f"addr add {places.HOST_V4}/{places.LINK_V4} dev eth0",
        f"addr add {places.LAN_V4}/32 dev lo",
        "link set eth0 up",
        f"route add default via {places.GATEWAY_V4}",
    )
    if has_ipv6():
        _ip(
            f"-6 addr add {places.HOST_V6}/{places.LINK_V6} dev eth0 nodad",
            f"-6 route add default via {places.GATEWAY_V6} dev eth0",
        )
    _allow_low_ports()


def become_internet() -> None:
    """Give this end every address there is. Precondition: the cable is there."""
    _ip(
        "link set lo up",
        f"addr add {places.GATEWAY_V4}/{places.LINK_V4} dev eth0",
        "link set eth0 up",
        "route add local 0.0.0.0/0 dev lo",
        # In the table that is looked at first, where "every address" is.
        f"route add {places.HOST_V4}/32 dev eth0 table local",
        f"route add blackhole {places.BLACK_HOLE_V4}/32 table local",
    )
    if has_ipv6():
        _ip(
            f"-6 addr add {places.GATEWAY_V6}/{places.LINK_V6} dev eth0 nodad",
            "-6 route add local ::/0 dev lo",
            f"-6 route add {places.HOST_V6}/128 dev eth0 table local",
            f"-6 route add blackhole {places.BLACK_HOLE_V6}/128 table local",
        )
    _allow_low_ports()


def show_own_files(directory: Path) -> None:
    """Bind the world's names and certificates over the machine's."""
    for target in ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/passwd"):
        source = directory / Path(target).name
        real = os.path.realpath(target)
        if not os.path.exists(real):
            raise CannotEnterError(f"{target} leads nowhere: nothing can be bound over it")
        mounts.mount(str(source), real, "", _MS_BIND)
    if os.path.isdir(BUNDLE):
        mounts.mount(str(directory / "certs"), os.path.realpath(BUNDLE), "", _MS_BIND)


def settle() -> None:
    """Keep nothing of what the set-up needed. Root stays root."""
    if os.geteuid():
        privileges.prctl(_PR_CAP_AMBIENT, privileges.PR_CAP_AMBIENT_CLEAR_ALL)
        privileges.empty_capability_sets()
        # A change of credentials takes this away, and with it our own /proc files.
        privileges.set_dumpable(True)


def has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6")


def die_with_parent() -> None:
    privileges.die_with_parent(signal.SIGKILL)


def _hand_down_net_admin() -> None:
    """Let `ip` have CAP_NET_ADMIN: without it execve(2) takes everything from who is not root."""
    mask = (1 << 32) - 1
    every = struct.pack("6I", mask, mask, 1 << _CAP_NET_ADMIN, 511, 511, 0)
    privileges._capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), every)
    privileges.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_NET_ADMIN)


def _allow_low_ports() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")


def _ip(*lines: str) -> None:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    for line in lines:
        done = subprocess.run(
            ["ip", *line.split()], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise CannotEnterError(f"ip {line}: {done.stderr.strip()}")
