"""Protected paths in a writable mount: existing, absent, and reached over their ancestors.

The mount holds `.git/hooks` and `.mcp.json`; `.envrc`, `.vscode` and `vault/keys` are absent. All
of them are protected. What lies open is `open`, a directory, and some files. Below `projects` there
are two more repositories, of which git's own is protected: one with a work tree, `module`, and one
without, `bare.git`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time

from .kit import (
    LOOSE_MOUNTS,
    MOUNTED,
    Outcome,
    call,
    escaped,
    first_escape,
    held,
    inconclusive,
    probe,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CWD = -100
_EXCHANGE = 2
_MOVES_S = 0.2  # for some thousand moves; in an emulated machine, some


def _write(path: str) -> int:
    fd = call("openat", _CWD, path.encode(), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o755)
    if fd < 0:
        return fd
    os.write(fd, b"#!/bin/sh\n")
    os.close(fd)
    return 0


def _rename(old: str, new: str, flags: int = 0) -> int:
    return call("renameat2", _CWD, old.encode(), _CWD, new.encode(), flags)


def _link(old: str, new: str) -> int:
    return call("linkat", _CWD, old.encode(), _CWD, new.encode(), 0)


def _unnamed(directory: str, name: str) -> int:
    fd = call("openat", _CWD, directory.encode(), os.O_RDWR | os.O_TMPFILE, 0o755)
    if fd < 0:
        return fd
    return call(
        "linkat", _CWD, b"/proc/self/fd/%d" % fd, _CWD, f"{directory}/{name}".encode(), 0x400
    )


def _by_cwd(rw: str) -> int:
    os.chdir(f"{rw}/.git/hooks")
    return _write("by-cwd")


def _by_fd(rw: str) -> int:
    directory = os.open(f"{rw}/.git", os.O_PATH | os.O_CLOEXEC)
    return call("openat", directory, b"hooks/by-fd", os.O_WRONLY | os.O_CREAT, 0o755)


def _symlink_over(rw: str) -> int:
    """Put a symlink where something protected is to be found."""
    removed = call("unlink", f"{rw}/.mcp.json".encode())
    return removed if removed < 0 else call("symlink", b"open", f"{rw}/.mcp.json".encode())


def _through_symlink(rw: str) -> int:
    call("symlink", b"../.git", f"{rw}/open/through".encode())
    return _write(f"{rw}/open/through/hooks/through")


def _replace_ancestor(rw: str) -> int:
    os.makedirs(f"{rw}/open/git/hooks", exist_ok=True)
    away = _rename(f"{rw}/.git", f"{rw}/open/away")
    return away if away < 0 else _rename(f"{rw}/open/git", f"{rw}/.git")


def _below(rw: str, directory: str, name: str) -> int:
    call("mkdir", f"{rw}/{directory}".encode(), 0o755)
    return _write(f"{rw}/{directory}/{name}")


def _replace_config(rw: str) -> int:
    lock = f"{rw}/.git/config.lock"
    _write(lock)
    result = _rename(lock, f"{rw}/.git/config")
    call("unlink", lock.encode())
    return result


def _stand_in(rw: str, moved: str, hook: str) -> int:
    """Move a directory away and make it anew, with a hook in it."""
    # Not far: to what is another mount nothing is renamed at all.
    away = _rename(f"{rw}/{moved}", f"{rw}/{moved}.old")
    if away < 0:
        return away
    os.makedirs(f"{rw}/{os.path.dirname(hook)}")
    return _write(f"{rw}/{hook}")


def _lead_elsewhere(rw: str) -> int:
    """Put a file `.git`, which names another directory, where the repository is."""
    away = _rename(f"{rw}/projects/module/.git", f"{rw}/projects/module/old")
    return away if away < 0 else _write(f"{rw}/projects/module/.git")


def _at_once(rw: str) -> int:
    """Write a hook while another process moves what leads to it to and fro: one of them may be first."""
    enough = time.monotonic() + _MOVES_S
    pid = os.fork()
    if pid == 0:
        try:
            while time.monotonic() < enough:
                _rename(f"{rw}/projects/module", f"{rw}/projects/old")
                _rename(f"{rw}/projects/old", f"{rw}/projects/module")
        finally:
            os._exit(0)
    result = -errno.EPERM
    try:
        while time.monotonic() < enough:
            for place in ("module", "old"):
                tried = _write(f"{rw}/projects/{place}/.git/hooks/at-once")
                result = max(result, tried if tried == 0 else -errno.EPERM)
    finally:
        os.waitpid(pid, 0)
    return result


def _bind_over(rw: str) -> int:
    return call("mount", f"{rw}/open".encode(), f"{rw}/.git/hooks".encode(), b"none", 4096, 0)


def _unmount(rw: str) -> int:
    return call("umount2", f"{rw}/.git/hooks".encode(), 2)


_WAYS: dict[str, tuple[str, Callable[[str], int]]] = {
    "write-hook": (
        "A new hook must not be written.",
        lambda rw: _write(f"{rw}/.git/hooks/pre-commit"),
    ),
    "overwrite-hook": (
        "An existing hook must not be changed.",
        lambda rw: _write(f"{rw}/.git/hooks/existing"),
    ),
    "overwrite-config": (
        "The repository's settings must not be changed.",
        lambda rw: _write(f"{rw}/.git/config"),
    ),
    "replace-config": ("Nor be replaced by renaming, as git itself does.", _replace_config),
    "unlink-config": ("Nor be removed.", lambda rw: call("unlink", f"{rw}/.git/config".encode())),
    "write-file": ("A protected file must not be written.", lambda rw: _write(f"{rw}/.mcp.json")),
    "unlink-file": (
        "A protected file must not be removed.",
        lambda rw: call("unlink", f"{rw}/.mcp.json".encode()),
    ),
    "rename-over-file": (
        "A protected file must not be replaced.",
        lambda rw: _rename(f"{rw}/file", f"{rw}/.mcp.json"),
    ),
    "exchange-file": (
        "A protected file must not be exchanged for another.",
        lambda rw: _rename(f"{rw}/file2", f"{rw}/.mcp.json", _EXCHANGE),
    ),
    "link-file": (
        "A protected file must not get a name outside its protection.",
        lambda rw: _link(f"{rw}/.mcp.json", f"{rw}/open/mcp"),
    ),
    "symlink-over-file": ("Nor become a symlink.", _symlink_over),
    "create-absent": (
        "A protected path must not come to exist.",
        lambda rw: _write(f"{rw}/.envrc"),
    ),
    "create-in-absent": (
        "Nor may anything below a protected path that does not exist.",
        lambda rw: _below(rw, ".vscode", "tasks.json"),
    ),
    "mkdir-in-absent": (
        "Nor a directory below it.",
        lambda rw: (
            call("mkdir", f"{rw}/.cursor".encode(), 0o755)
            and call("mkdir", f"{rw}/.cursor/rules".encode(), 0o755)
        ),
    ),
    "remove-stand-in": (
        "The placeholder of an absent protected path must not be removable.",
        lambda rw: call("rmdir", f"{rw}/.envrc".encode()),
    ),
    "rename-over-stand-in": ("Nor be replaced.", lambda rw: _rename(f"{rw}/file3", f"{rw}/.envrc")),
    "create-below-absent": (
        "A protected path whose directory is absent too must not come to exist.",
        lambda rw: _below(rw, "vault", "keys"),
    ),
    "rename-parent": (
        "A directory on the way to a protected path must not be moved away.",
        lambda rw: _rename(f"{rw}/.git", f"{rw}/open/old"),
    ),
    "rename-absent-parent": (
        "Nor one that was absent.",
        lambda rw: _rename(f"{rw}/vault", f"{rw}/open/vault"),
    ),
    "exchange-parent": (
        "Nor be exchanged for another.",
        lambda rw: _rename(f"{rw}/.git", f"{rw}/open", _EXCHANGE),
    ),
    "replace-parent": ("Nor be replaced by another.", _replace_ancestor),
    "remove-parent": ("Nor be removed.", lambda rw: call("rmdir", f"{rw}/vault".encode())),
    "rename-mount": ("The mount itself must not be moved.", lambda rw: _rename(rw, rw + ".old")),
    "by-directory": ("A hook must not be written from inside its directory.", _by_cwd),
    "by-descriptor": ("A hook must not be written from a descriptor of its parent.", _by_fd),
    "through-symlink": ("A hook must not be written through a symlink.", _through_symlink),
    "unnamed-file": (
        "An unnamed file must not be linked into a protected directory.",
        lambda rw: _unnamed(f"{rw}/.git/hooks", "unnamed"),
    ),
    "chmod": (
        "A protected directory must not be made writable.",
        lambda rw: _chmod(f"{rw}/.git/hooks"),
    ),
    "xattr": (
        "A protected file must not get attributes.",
        lambda rw: call("setxattr", f"{rw}/.mcp.json".encode(), b"user.x", b"x", 1, 0),
    ),
    "nested-hook": (
        "A hook of a repository below the mount must not be written.",
        lambda rw: _write(f"{rw}/projects/module/.git/hooks/pre-commit"),
    ),
    "nested-config": (
        "Nor its settings, which name programs too (core.fsmonitor, core.hooksPath).",
        lambda rw: _write(f"{rw}/projects/module/.git/config"),
    ),
    "nested-bare-hook": (
        "Nor a hook of a repository without a work tree.",
        lambda rw: _write(f"{rw}/projects/bare.git/hooks/post-receive"),
    ),
    "nested-parent": (
        "A repository below the mount must not be moved away and made anew.",
        lambda rw: _stand_in(rw, "projects/module", "projects/module/.git/hooks/pre-commit"),
    ),
    "nested-grandparent": (
        "Nor the directory that it is in.",
        lambda rw: _stand_in(rw, "projects", "projects/module/.git/hooks/pre-commit"),
    ),
    "nested-elsewhere": ("Nor may git be led to another directory.", _lead_elsewhere),
    "nested-at-once": (
        "Nor may its hooks be had while somebody moves the directories on the way.",
        _at_once,
    ),
    "bind-over": ("A protected directory must not be covered by another mount.", _bind_over),
    "unmount": ("Its protection must not be unmounted.", _unmount),
}


def _chmod(path: str) -> int:
    """The call's result; an error too where the kernel says yes and does nothing, as gVisor's does."""
    before = os.stat(path).st_mode
    result = call("chmod", path.encode(), 0o777)
    return -errno.EPERM if result == 0 and os.stat(path).st_mode == before else result


_NEEDS_PRIVILEGE = {"bind-over", "unmount"}
_STAND_IN = "none: the stand-in is only there where it protects"
_FIXED = {
    "rename-mount": "none: a mount point cannot be renamed in any sandbox",
    "remove-stand-in": _STAND_IN,
    "rename-absent-parent": _STAND_IN,
    "remove-parent": _STAND_IN,
}


def _probe_of(name: str, action: Callable[[str], int]) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        result = action(context["rw"])
        return held(f"{name}: {said(result)}") if result < 0 else escaped(f"{name}: worked")

    return run


for _name, (_about, _action) in _WAYS.items():
    _control = _FIXED.get(_name, LOOSE_MOUNTS)
    if _name in _NEEDS_PRIVILEGE:
        _control = "none: the probe of mount and umount2 in syscalls has the control"
    probe(f"files.protected-{_name}", "high", _control, where=MOUNTED, about=_about)(
        _probe_of(_name, _action)
    )


@probe("files.protected-common-directory", "high", LOOSE_MOUNTS, where=MOUNTED)
def common_directory(context: dict[str, Any]) -> Outcome:
    """Git must not be led to settings elsewhere by a file `commondir` in the repository."""
    return _probe_of("commondir", lambda rw: _write(f"{rw}/.git/commondir"))(context)


@probe("files.protected-worktree-config", "medium", LOOSE_MOUNTS, where=MOUNTED)
def worktree_config(context: dict[str, Any]) -> Outcome:
    """Where the repository reads settings of the worktree, those must not be writable."""
    return _probe_of("config.worktree", lambda rw: _write(f"{rw}/.git/config.worktree"))(context)


@probe(
    "files.protected-mount-api",
    "high",
    "none: the probes of the mount calls in syscalls have the control",
    where=MOUNTED,
)
def mount_api(context: dict[str, Any]) -> Outcome:
    """A protected path must not be made writable by the newer mount calls."""
    path = f"{context['rw']}/.git/hooks".encode()
    attributes = ctypes.create_string_buffer(struct.pack("=4Q", 0, 1, 0, 0), 32)
    outcomes = []
    for name, args in (
        ("mount_setattr", (_CWD, path, 0, attributes, 32)),
        ("open_tree", (_CWD, path, 1)),
    ):
        try:
            result = call(name, *args)
        except LookupError:
            return inconclusive(f"{name}: not a call of this machine")
        outcomes.append(
            held(f"{name}: {said(result)}") if result < 0 else escaped(f"{name}: worked")
        )
    return first_escape(outcomes)
