"""Reporter of changes below a directory inside a sandbox, as JSON lines, until the reader closes."""

from __future__ import annotations

import errno
import json
import os
import select
import stat

from ...linux import inotify
from .finding import is_directory, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_WATCHES = 4096
_MASK = (
    inotify.IN_CREATE
    | inotify.IN_CLOSE_WRITE
    | inotify.IN_MODIFY
    | inotify.IN_ATTRIB
    | inotify.IN_DELETE
    | inotify.IN_MOVED_FROM
    | inotify.IN_MOVED_TO
    | inotify.IN_DELETE_SELF
    | inotify.IN_MOVE_SELF
    | inotify.IN_DONT_FOLLOW
)
_KINDS = {
    inotify.IN_CREATE: "created",
    inotify.IN_CLOSE_WRITE: "written",
    inotify.IN_MODIFY: "modified",
    inotify.IN_ATTRIB: "attributes",
    inotify.IN_DELETE: "deleted",
    inotify.IN_MOVED_FROM: "moved_from",
    inotify.IN_MOVED_TO: "moved_to",
    inotify.IN_DELETE_SELF: "deleted",
    inotify.IN_MOVE_SELF: "moved_from",
}


def watch(stream: int, path: str, options: str) -> None:
    """Events below `path`; ends when it is removed, or when nobody reads `stream` any more.

    With `marks`, a directory, each time that this is opened comes as a mark: all that happened before
    has come by then, since the kernel keeps one queue.
    """
    asked = json.loads(options)
    _Watcher(stream, path, asked["recursive"], asked.get("marks", "")).run()


class _Watcher:
    def __init__(self, stream: int, path: str, recursive: bool, marks: str) -> None:
        self._stream, self._path, self._recursive = stream, path, recursive
        self._fd = inotify.inotify_init1()
        self._paths: dict[int, str] = {}
        self._mark = -1
        if marks:
            # First: a second watch of one directory replaces the first, and its own must win.
            self._mark = inotify.inotify_add_watch(self._fd, os.fsencode(marks), inotify.IN_OPEN)
        self._root = self._add(path)

    def _add(self, path: str) -> int:
        if len(self._paths) >= _MOST_WATCHES:
            raise OSError(errno.ENOSPC, f"more than {_MOST_WATCHES} directories below", path)
        number = inotify.inotify_add_watch(self._fd, os.fsencode(path), _MASK)
        self._paths[number] = path
        if self._recursive and stat.S_ISDIR(os.lstat(path).st_mode):
            for child, entry in walk(path, _refuse_depth):
                if is_directory(entry):
                    self._add_one(child)
        return number

    def _add_one(self, path: str) -> None:
        if len(self._paths) >= _MOST_WATCHES:
            raise OSError(errno.ENOSPC, f"more than {_MOST_WATCHES} directories below", path)
        try:
            self._paths[inotify.inotify_add_watch(self._fd, os.fsencode(path), _MASK)] = path
        except (FileNotFoundError, PermissionError):
            pass  # it went away, or is not ours to see

    def run(self) -> None:
        self._say({"kind": "watching", "path": self._path})
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._stream, 0)  # POLLERR: its reader is gone
        while True:
            for fd, _events in poll.poll():
                if fd == self._stream:
                    return
            for number, mask, cookie, name in inotify.events(os.read(self._fd, 1 << 16)):
                if not self._tell(number, mask, cookie, os.fsdecode(name)):
                    return

    def _tell(self, number: int, mask: int, cookie: int, name: str) -> bool:
        """Report one event; False when nothing is left to watch."""
        if mask & inotify.IN_Q_OVERFLOW:
            self._say({"kind": "overflow", "path": self._path})
            return True
        if number == self._mark and mask & inotify.IN_OPEN and not name:
            self._say({"kind": "mark", "path": self._path})
            return True
        base = self._paths.get(number)
        if base is None:
            return True
        if mask & inotify.IN_IGNORED:
            del self._paths[number]
            return number != self._root
        path = os.path.join(base, name) if name else base
        of_directory = bool(mask & inotify.IN_ISDIR)
        for bit, kind in _KINDS.items():
            if not mask & bit:
                continue
            if not name and number != self._root and "deleted" != kind:
                continue  # its parent tells
            facts = {"kind": kind, "path": path, "is_directory": of_directory}
            if cookie:
                facts["cookie"] = cookie
            self._say(facts)
        if of_directory and self._recursive and mask & (inotify.IN_CREATE | inotify.IN_MOVED_TO):
            self._follow(path)
        return True

    def _follow(self, path: str) -> None:
        """A new directory: what is in it already came before we watched."""
        self._add_one(path)
        unseen: list[str] = []
        try:
            below = list(walk(path, unseen.append))
        except OSError:
            return
        for child, entry in below:
            inner = is_directory(entry)
            self._say({"kind": "created", "path": child, "is_directory": inner})
            if inner:
                self._add_one(child)
            elif _has_content(entry):
                self._say({"kind": "modified", "path": child, "is_directory": False})
        for deepest in unseen:
            self._say({"kind": "overflow", "path": deepest, "is_directory": True})

    def _say(self, facts: dict[str, Any]) -> None:
        view = memoryview(json.dumps(facts).encode() + b"\n")
        while view:
            view = view[os.write(self._stream, view) :]


def _has_content(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat().st_size > 0
    except OSError:
        return False  # it went away


def _refuse_depth(_path: str) -> None:
    raise OSError(errno.ENAMETOOLONG, "a directory below lies too deep to be watched")
