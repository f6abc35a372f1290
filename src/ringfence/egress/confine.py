"""Confinement of the egress process, applied before it talks to untrusted peers.

It needs the network, and a few files that the host's resolver reads. It starts no program, writes
no file, listens nowhere and has a uid without rights on this machine.
"""

from __future__ import annotations

import os
import resource

from ..linux import landlock, privileges, seccomp
from ..policy import filters

# Not a sandbox's (those begin at 0x70000000), and not 65534: that one is everybody's who has no other,
# NFS servers and web servers among them, and who shares a uid may trace and kill.
UID = 0x6FFF_F000

# Files that getaddrinfo(3) reads: its configuration, the modules that it loads by name
# (nsswitch.conf), and through them the sockets of resolvers on this host.
_RESOLVER_FILES = (
    *("/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/run", "/var/run"),
    *("/nix/store", "/gnu/store", "/dev/null", "/dev/urandom"),
)
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3  # include/uapi/linux/landlock.h
_ALL_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_SCOPED = 0x1 | 0x2  # abstract unix sockets of others, signals to others: ABI 6


def confine() -> list[str]:
    """Give it all up, for good; what could not be, in words.

    Precondition: one thread, and everything is imported: modules may be where nobody else can read.
    """
    missing = []
    program = filters.load_egress_filter()  # as long as it can be read
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _raise_open_files()
    if not _become_nobody():
        missing.append("its own user id: this user namespace has none free")
    privileges.set_no_new_privs()
    if not _restrict_files():
        missing.append("Landlock: not in this kernel, or disabled")
    # After the last change of credentials, which sets it anew. Not in one process that its user
    # may look at: whoever has this uid could read secrets out of our memory.
    privileges.set_dumpable(False)
    if not _restrict_calls(program):
        missing.append("a system-call filter: none for this architecture, or no seccomp")
    return missing


def _restrict_calls(program: bytes) -> bool:
    """Last of all: nothing of the above is allowed under it."""
    try:
        if program:
            seccomp.install_filter(program)
    except OSError:
        return False
    return bool(program)


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _become_nobody() -> bool:
    """As root: another uid, no groups, no capabilities. As anybody else: no capabilities."""
    is_other = os.geteuid() != 0 or _change_ids()
    try:
        privileges.empty_bounding_set()
    except PermissionError:
        pass  # no CAP_SETPCAP (any more): nothing can come out of the set without execve(2) either
    privileges.empty_capability_sets()
    return is_other


def _change_ids() -> bool:
    uid = _uid_to_be()
    if not uid:
        return False
    try:
        privileges.empty_bounding_set()  # before the capability to do so is gone
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except PermissionError:
        return False
    return True


def _uid_to_be() -> int:
    """A uid that exists in this user namespace: a container has some thousands only. 0: none."""
    best = 0
    with open("/proc/self/uid_map", encoding="ascii") as file:
        for line in file:
            first, _, count = map(int, line.split())
            if first <= UID < first + count:
                return UID
            best = max(best, first + count - 1)
    return best if best < 65534 else 65533


def _restrict_files() -> bool:
    abi = landlock.abi_version()
    if abi < 1:
        return False
    # Not RESOLVE_UNIX (ABI 9): resolvers such as nscd and systemd-resolved are asked over sockets.
    handled = max(rights for since, rights in _ALL_OF_ABI.items() if abi >= since)
    ruleset = landlock.create_ruleset(handled, 0, _SCOPED if abi >= 6 else 0, abi=abi)
    try:
        for path in dict.fromkeys((*_RESOLVER_FILES, *_configured())):
            _allow_reading(ruleset, path)
        landlock.restrict_self(ruleset)
    finally:
        os.close(ruleset)
    return True


def _configured() -> list[str]:
    """Where the resolver's files really are: on some systems /etc only has links to them."""
    files = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf")
    return [os.path.dirname(os.path.realpath(path)) for path in files]


def _allow_reading(ruleset: int, path: str) -> None:
    is_directory = os.path.isdir(path)
    if path == "/" or not (is_directory or os.path.exists(path)):
        return
    access = _EXECUTE | _READ_FILE | _READ_DIR if is_directory else _READ_FILE
    landlock.allow_beneath(ruleset, path, access)
