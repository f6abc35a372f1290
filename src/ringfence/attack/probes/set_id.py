"""Set-id bits in a writable mount: on the host they would make anybody the owner of the mount."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from .kit import MOUNTED, NO_SECCOMP, Outcome, call, escaped, held, probe, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MODE = 0o4755
_CWD = -100
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def _plain(path: bytes) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o755)


def _existing(name: str) -> Callable[[bytes], int]:
    def action(path: bytes) -> int:
        fd = _plain(path)
        try:
            return {
                "chmod": lambda: call("chmod", path, _MODE),
                "fchmod": lambda: call("fchmod", fd, _MODE),
                "fchmodat": lambda: call("fchmodat", _CWD, path, _MODE),
                "fchmodat2": lambda: call("fchmodat2", _CWD, path, _MODE, 0),
                "fchmodat2-empty": lambda: call("fchmodat2", fd, b"", _MODE, 0x1000),
                "chmod-proc": lambda: call("chmod", b"/proc/self/fd/%d" % fd, _MODE),
                "setgid": lambda: call("chmod", path, 0o2755),
                "high-bits": lambda: call("fchmod", fd, (1 << 32) | _MODE),
            }[name]()
        finally:
            os.close(fd)

    return action


def _open_how(path: bytes) -> int:
    how = ctypes.create_string_buffer(struct.pack("=QQQ", _CREATE, _MODE, 0), 24)
    return call("openat2", _CWD, path, how, 24)


def _unnamed(path: bytes) -> int:
    directory = os.path.dirname(path)
    fd = call("openat", _CWD, directory, os.O_RDWR | os.O_TMPFILE, _MODE)
    if fd < 0:
        return fd
    return call("linkat", _CWD, b"/proc/self/fd/%d" % fd, _CWD, path, 0x400)


_WAYS: dict[str, Callable[[bytes], int]] = {
    "creat": lambda path: call("creat", path, _MODE),
    "open": lambda path: call("open", path, _CREATE, _MODE),
    "openat": lambda path: call("openat", _CWD, path, _CREATE, _MODE),
    "openat2": _open_how,
    "mknod": lambda path: call("mknod", path, stat.S_IFREG | _MODE, 0),
    "mknodat": lambda path: call("mknodat", _CWD, path, stat.S_IFREG | _MODE, 0),
    "mkdir": lambda path: call("mkdir", path, 0o2755),
    "mkdirat": lambda path: call("mkdirat", _CWD, path, 0o2755),
    "tmpfile": _unnamed,
}
for _name in (
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "fchmodat2-empty",
    "chmod-proc",
    "setgid",
    "high-bits",
):
    _WAYS[_name] = _existing(_name)


def _probe_of(name: str, action: Callable[[bytes], int]) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        path = f"{context['rw']}/set-id-{name}"
        os.umask(0)
        try:
            result = action(path.encode())
        except LookupError:
            return held(f"{name}: not a call of this machine")
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return held(f"{name}: {said(result)}")
        finally:
            _remove(path)
        if mode & 0o6000:
            return escaped(f"{name}: mode {mode & 0o7777:o}")
        return held(f"{name}: {said(result)}, mode {mode & 0o7777:o}")

    return run


def _remove(path: str) -> None:
    for remove in (os.unlink, os.rmdir):
        try:
            remove(path)
        except OSError:
            continue


_WORTH = {"mkdir": "low", "mkdirat": "low", "setgid": "high"}
# The kernel itself ignores set-id bits of a new directory's mode, so no control can show them.
_IGNORED = "none: mkdir drops set-id bits by itself"

for _name, _action in _WAYS.items():
    probe(
        f"files.set-id-{_name}",
        _WORTH.get(_name, "critical"),
        _IGNORED if _name.startswith("mkdir") else NO_SECCOMP,
        where=MOUNTED,
        about=f"No set-id bit may be put on a file of the host by {_name}.",
    )(_probe_of(_name, _action))
