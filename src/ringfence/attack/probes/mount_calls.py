"""The mount calls, old and new. Where they get through, it is in namespaces of the probe's own."""

from __future__ import annotations

import ctypes
import struct

from .kit import HOST_USERNS, NO_SECCOMP, Outcome, call, escaped, held, probe, refused, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CWD = -100
_ATTRIBUTES = ctypes.create_string_buffer(struct.pack("=4Q", 1, 0, 0, 0), 32)

_BIND, _REC, _PRIVATE, _SHARED, _MOVE = 4096, 16384, 1 << 18, 1 << 20, 8192

_MOUNTS: dict[str, tuple[Any, ...]] = {
    "tmpfs": (b"none", b"/tmp", b"tmpfs", 0, 0),
    "proc": (b"none", b"/tmp", b"proc", 0, 0),
    "bind": (b"/usr", b"/tmp", b"none", _BIND, 0),
    "private": (b"none", b"/", b"none", _REC | _PRIVATE, 0),
    "shared": (b"none", b"/", b"none", _REC | _SHARED, 0),
}
# Whatever the flags, these are refused before they are looked at.
_NEW_CALLS: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("pivot_root", "critical", HOST_USERNS, (b"/nonexistent", b"/nonexistent")),
    ("open_tree", "critical", HOST_USERNS, (_CWD, b"/usr", 1)),
    ("open_tree_attr", "critical", HOST_USERNS, (_CWD, b"/usr", 1, _ATTRIBUTES, 32)),
    ("move_mount", "critical", HOST_USERNS, (-1, b"", -1, b"", 0)),
    ("fsopen", "critical", HOST_USERNS, (b"tmpfs", 0)),
    ("fsconfig", "critical", NO_SECCOMP, (-1, 0, b"", b"", 0)),
    ("fsmount", "critical", HOST_USERNS, (-1, 0, 0)),
    ("fspick", "critical", HOST_USERNS, (_CWD, b"/", 0xFFFF0000)),
    ("mount_setattr", "critical", HOST_USERNS, (_CWD, b"/nonexistent", 0, _ATTRIBUTES, 32)),
    ("umount2", "critical", HOST_USERNS, (b"/nonexistent", 0)),
    ("statmount", "low", NO_SECCOMP, (0, 0, 0, 0)),
    ("listmount", "low", NO_SECCOMP, (0, 0, 0, 0)),
)


def _mount(args: tuple[Any, ...]) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        result = call("mount", *args)
        return escaped("mount: worked") if result == 0 else held(f"mount: {said(result)}")

    return run


for _name, _args in _MOUNTS.items():
    probe(
        f"syscalls.mount-{_name}",
        "critical",
        HOST_USERNS,
        about=f"mount must be refused ({_name}): mounts are what keeps the host's files apart.",
    )(_mount(_args))


def _refuse(name: str, args: tuple[Any, ...]) -> Callable[[dict[str, Any]], Outcome]:
    return lambda _context: refused(name, *args)


for _name, _severity, _control, _args in _NEW_CALLS:
    probe(
        f"syscalls.{_name}",
        _severity,
        _control,
        about=f"{_name} must be refused: mounts are what keeps the host's files apart.",
    )(_refuse(_name, _args))


@probe("syscalls.sethostname", "low", HOST_USERNS)
def sethostname(_context: dict[str, Any]) -> Outcome:
    """The host name must not be changeable."""
    return refused("sethostname", b"renamed", 7)


@probe("syscalls.setdomainname", "low", HOST_USERNS)
def setdomainname(_context: dict[str, Any]) -> Outcome:
    """The domain name must not be changeable."""
    return refused("setdomainname", b"renamed", 7)
