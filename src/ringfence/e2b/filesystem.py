"""E2B's filesystem service on our files: entries, moves, directories, watches."""

from __future__ import annotations

import json
import math
import os
import posixpath
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from ..errors import (
    FileError,
    FileExists,
    FileNotFound,
    NotADirectory,
    PermissionDenied,
    RingfenceError,
)
from ..model.files import DIRECTORY, FILE, OTHER, SYMLINK, FileInfo
from ..sandbox.files import Files
from .call import Call
from .codec import RpcError, field
from .entries import absolute, entries
from .rpc import deadline_s, home_of, ping_s, server_stream, unary, user_of
from .watchers import Watch

_MOST_ENTRIES, _MOST_PATHS, _DEEPEST = 20_000, 4 << 20, 64
_MOST_LISTED = 3 * _MOST_PATHS  # bytes that `find` prints
# `test -e` is false also below a directory that this user may not enter.
LOOK = r"""why=$(LC_ALL=C stat -- "$1" 2>&1 >/dev/null) || case $why in
  *"Permission denied") echo "$1: permission denied" >&2; exit 1 ;;
  *) exit 44 ;;
esac
"""
# An entry is two strings that end with NUL, which no path has: its numbers and path, a symlink's target.
_FIND = (
    LOOK
    + r"""path=$1
if [ "$2" -gt 0 ]; then
  path=$(readlink -f -- "$1"; echo /); path=${path%??}
  [ -d "$path" ] || exit 45
  [ -r "$path" ] && [ -x "$path" ] || { echo "$path: permission denied" >&2; exit 1; }
fi
find "$path" -mindepth $(($2 > 0)) -maxdepth "$2" -printf '%y %m %s %T@ %p\0%l\0' | head -z -n "$3"
"""
)
_KINDS = {"f": FILE, "d": DIRECTORY, "l": SYMLINK}
_MOVE = 'mkdir -p -- "$(dirname -- "$2")" && mv -T -- "$1" "$2"'


async def _path(call: Call, form: dict[str, Any], name: str = "path") -> str:
    return absolute(field(form, name, str, ""), await home_of(call, user_of(call)))


def _as_named(call: Call, work: Callable[[], object], script: str, *paths: str) -> None:
    """Do what the sandbox's own user may not as the user that the client names."""
    try:
        work()
    except PermissionDenied:
        user = user_of(call)
        if user is None:
            raise
        command = ["/bin/sh", "-c", script, "sh", *paths]
        result = call.inside.sandbox.exec(command, user=user)
        if not result.ok:
            raise RpcError("permission_denied", result.stderr_text.strip()) from None


def _found_by_named(call: Call, path: str, depth: int) -> list[FileInfo]:
    """Describe what is below a directory as the user that the client names; at depth 0, the entry itself.

    Raises:
        PermissionDenied: The client names no other user.
        RpcError: It is not there, or there is too much.
    """
    user = user_of(call)
    if user is None:
        raise PermissionDenied(f"{path}: permission denied", path=path)
    command = ["/bin/sh", "-c", _FIND, "sh", path, str(depth), str(2 * _MOST_ENTRIES + 2)]
    run = call.inside.sandbox.exec
    result = run(command, user=user, max_output_bytes=_MOST_LISTED)
    if result.exit_code == 44:
        raise _missing(path)
    if result.exit_code == 45:
        raise RpcError("invalid_argument", f"path is not a directory: {path}")
    words = os.fsdecode(result.stdout).split("\0")[:-1]
    if result.truncated or len(words) > 2 * _MOST_ENTRIES:
        raise _too_much()
    if not result.ok and not words:
        raise RpcError("permission_denied", result.stderr_text.strip())
    found = map(_info, words[::2], words[1::2])
    return sorted(found, key=lambda info: info.path.split("/"))


def _info(words: str, link: str) -> FileInfo:
    letter, mode, size, mtime, path = words.split(" ", 4)
    kind, name = _KINDS.get(letter, OTHER), posixpath.basename(path)
    target = link if kind == SYMLINK else None
    return FileInfo(path, name, kind, int(size), int(mode, 8), float(mtime), target)


def _too_much() -> RpcError:
    what = f"over {_MOST_ENTRIES} entries, or {_MOST_PATHS} characters in their paths"
    return RpcError("resource_exhausted", f"there are {what}")


def _missing(path: str) -> RpcError:
    return RpcError("not_found", f"path '{path}' does not exist")


async def stat(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Describe an entry; a symlink itself."""
    path = await _path(call, form)

    def look() -> dict[str, Any]:
        try:
            return _entry(call, path)
        except (FileNotFound, NotADirectory) as exc:
            raise _missing(path) from exc

    return {"entry": await call.call(look)}


async def list_dir(call: Call, form: dict[str, Any]) -> bytes:
    """List a directory, and those in it down to `depth`."""
    path, depth = await _path(call, form), field(form, "depth", int, 1) or 1
    files = call.inside.sandbox.files
    if depth < 0:
        raise RpcError("invalid_argument", "depth should be at least 1")

    def answer() -> bytes:
        # As JSON, made beside the event loop, entry by entry: all at once would hold it.
        try:
            infos = _below(files, path, depth)
        except PermissionDenied:
            infos = _found_by_named(call, path, min(depth, _DEEPEST))
        found = entries(files, call.inside.inner.files, infos)
        return f'{{"entries":[{",".join(map(json.dumps, found))}]}}'.encode()

    found: bytes = await call.call(answer)
    return found


def _entry(call: Call, path: str) -> dict[str, Any]:
    files = call.inside.sandbox.files
    try:
        info = files.stat(path)
    except PermissionDenied:
        (info,) = _found_by_named(call, path, 0)
    return entries(files, call.inside.inner.files, [info])[0]


def _below(files: Files, path: str, depth: int) -> list[FileInfo]:
    found: list[FileInfo] = []
    room = _MOST_PATHS

    def add(directory: str, left: int) -> None:
        nonlocal room
        for info in files.list(directory):
            room -= len(info.path)
            if len(found) >= _MOST_ENTRIES or room < 0:
                raise _too_much()
            found.append(info)
            if left > 1 and info.kind == DIRECTORY:
                add(info.path, left - 1)

    try:
        add(files.stat(path, follow=True).path, min(depth, _DEEPEST))
    except FileNotFound as exc:
        raise _missing(path) from exc
    except NotADirectory as exc:
        raise RpcError("invalid_argument", f"path is not a directory: {path}") from exc
    return found


async def make_dir(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    path, files = await _path(call, form), call.inside.sandbox.files

    def make() -> dict[str, Any]:
        try:
            there = files.stat(path, follow=True)
        except (FileError, FileNotFound):
            there = None
        if there is not None and there.kind == DIRECTORY:
            raise RpcError("already_exists", f"directory already exists: {path}")
        try:
            _as_named(call, lambda: files.make_dir(path, parents=True), 'mkdir -p -- "$1"', path)
        except (FileExists, NotADirectory) as exc:
            if there is None and isinstance(exc, NotADirectory):
                why = f"error getting file info: stat {path}: not a directory"
                raise RpcError("internal", why) from exc
            why = f"path already exists but it is not a directory: {path}"
            raise RpcError("invalid_argument", why) from exc
        return _entry(call, path)

    return {"entry": await call.call(make)}


async def move(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Rename, with the directories above the new name made."""
    source = await _path(call, form, "source")
    target = await _path(call, form, "destination")
    files = call.inside.sandbox.files

    def make_and_move() -> None:
        files.make_dir(posixpath.dirname(target), parents=True)
        files.move(source, target)

    def rename() -> dict[str, Any]:
        try:
            _entry(call, source)
        except (FileNotFound, NotADirectory) as exc:
            raise _missing(source) from exc
        _as_named(call, make_and_move, _MOVE, source, target)
        return _entry(call, target)

    return {"entry": await call.call(rename)}


async def remove(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Remove a file or a whole tree; what is not there is removed already."""
    path, files = await _path(call, form), call.inside.sandbox.files

    def gone() -> None:
        try:
            _as_named(call, lambda: files.remove(path, recursive=True), 'rm -rf -- "$1"', path)
        except (FileNotFound, NotADirectory):
            pass

    await call.call(gone)
    return {}


# -- watches ---------------------------------------------------------------------------------------


async def _watch(call: Call, form: dict[str, Any]) -> Watch:
    path, files = await _path(call, form), call.inside.sandbox.files
    is_recursive = field(form, "recursive", bool, False)
    try:
        info = await call.call(files.stat, path, follow=True)
    except (FileNotFound, NotADirectory) as exc:
        raise _missing(path) from exc
    if info.kind != DIRECTORY:
        raise RpcError("invalid_argument", f"path {path} is not a directory")

    def look(paths: list[str]) -> dict[str, dict[str, Any]]:
        there: dict[str, FileInfo] = {}
        for each in paths:
            with suppress(RingfenceError):
                there[each] = files.stat(each)
        found = entries(files, call.inside.inner.files, [*there.values()])
        return dict(zip(there, found, strict=True))

    return Watch(
        call.service,
        call.inside,
        info.path,
        is_recursive=is_recursive,
        look=look if field(form, "includeEntry", bool, False) else None,
    )


async def watch_dir(call: Call, form: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    watch, left_s = await _watch(call, form), deadline_s(call)
    await watch.begin()
    return _changes(call, watch, math.inf if left_s is None else time.monotonic() + left_s)


async def _changes(call: Call, watch: Watch, until: float) -> AsyncIterator[dict[str, Any]]:
    try:
        yield {"start": {}}
        while (left_s := until - time.monotonic()) > 0:
            found = await watch.next(min(left_s, ping_s(call)))
            if found is None:
                return
            for each in found:
                yield {"filesystem": each}
            if not found:
                yield {"keepalive": {}}
        raise RpcError("deadline_exceeded", "the deadline of the request is over")
    finally:
        await watch.close()


async def create_watcher(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Begin a watch whose changes are kept until they are asked for."""
    watch = await _watch(call, form)
    return {"watcherId": await call.shared.watchers.add(watch)}


async def watcher_events(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Return the changes since they were last asked for."""
    watcher_id = field(form, "watcherId", str, "")
    return {"events": await call.shared.watchers.events(call.inside.sandbox_id, watcher_id)}


async def remove_watcher(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    watcher_id = field(form, "watcherId", str, "")
    await call.shared.watchers.remove(call.inside.sandbox_id, watcher_id)
    return {}


_AT = "/filesystem.Filesystem"
ROUTES = [
    unary(f"{_AT}/Stat", stat),
    unary(f"{_AT}/ListDir", list_dir),
    unary(f"{_AT}/MakeDir", make_dir),
    unary(f"{_AT}/Move", move),
    unary(f"{_AT}/Remove", remove),
    server_stream(f"{_AT}/WatchDir", watch_dir),
    unary(f"{_AT}/CreateWatcher", create_watcher),
    unary(f"{_AT}/GetWatcherEvents", watcher_events),
    unary(f"{_AT}/RemoveWatcher", remove_watcher),
]
