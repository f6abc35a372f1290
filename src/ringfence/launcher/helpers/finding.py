"""Search in a tree inside a sandbox: names by pattern, text in files, replacement of text.

Each answers with JSON lines. Symlinks are never followed. A pattern that takes for ever is ended by
the kernel, and its process with it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_PATIENCE_S = 30  # with a pattern, which may take for ever over one name or one line
_LOOKS_S = 25
_LONGEST_PATH = 4096  # with the byte that ends it
_MOST_FILE_BYTES = 64 << 20
_LONGEST_LINE = 2000
_MOST_DEEP = 500


class _Answer:
    """JSON lines into a descriptor, as many as were asked for.

    Attributes:
        too_deep: A directory was not looked into because it lies too deep; None where none is looked for.
    """

    def __init__(self, stream: int, most: int, *, walks: bool = True) -> None:
        self._stream, self._left = stream, most
        self.too_deep = False if walks else None

    def skip(self, _path: str) -> None:
        """Note that this directory was not looked into."""
        self.too_deep = True

    def add(self, **facts: Any) -> bool:
        """Write a result; False once the limit is reached."""
        if self._left <= 0:
            self.end(truncated=True)
            return False
        self._left -= 1
        self._write(facts)
        return True

    def end(self, *, truncated: bool = False) -> None:
        """The last line: without it something went wrong."""
        said = {} if self.too_deep is None else {"too_deep": self.too_deep}
        self._write({"done": True, "truncated": truncated, **said})

    def _write(self, facts: dict[str, Any]) -> None:
        view = memoryview(json.dumps(facts).encode() + b"\n")
        while view:
            view = view[os.write(self._stream, view) :]


def walk(
    path: str, skip: Callable[[str], None], deepest: int = -1, depth: int = 0
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below `path`, by name, directories before what is in them.

    The kernel tells names with their kinds: nothing is asked of each, which in gVisor takes longest.

    Args:
        skip: Called for each directory that lies too deep to be looked into: Python calls itself for
            each level, and the kernel takes no longer path than 4,095 bytes.
        deepest: Directories so many levels below are of no interest; negative: all are.
    """
    try:
        with os.scandir(path) as found:
            entries = sorted(found, key=_name)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        if depth == 0:
            raise
        return  # it is not ours to see, or went away
    for entry in entries:
        child = entry.path
        if len(child) >= _LONGEST_PATH // 4 and len(os.fsencode(child)) >= _LONGEST_PATH:
            skip(path)
            return
        yield child, entry
        if depth != deepest and is_directory(entry):
            if depth < _MOST_DEEP:
                yield from walk(child, skip, deepest, depth + 1)
            else:
                skip(child)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry itself is a directory; False in doubt."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False  # only where the file system tells no kinds


def _in_time(
    found: Iterator[tuple[str, os.DirEntry[str]]],
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Pass results on until the time limit, then raise."""
    ends = time.monotonic() + _LOOKS_S
    for each in found:
        if time.monotonic() > ends:
            said = f"more lies below than can be looked through in {_LOOKS_S} s: name a directory in it"
            raise OSError(errno.ETIMEDOUT, said)
        yield each


def pattern_of(glob: str) -> re.Pattern[str]:
    """A glob over relative paths: `*` and `?` stay within a name, `**` is any number of directories."""
    glob, text, at = glob.removeprefix("./"), "", 0
    if glob.startswith("/") or ".." in glob.split("/"):
        raise OSError(
            errno.EINVAL,
            f"{glob!r} is not a pattern of names below a directory: give that as path=",
        )
    while at < len(glob):
        closing = glob.find("]", at + 2) if glob[at] == "[" else -1
        if glob.startswith("**/", at):
            text, at = text + "(?:[^/]+/)*", at + 3
        elif glob[at:] == "**":
            text, at = text + ".+", at + 2
        elif closing > 0:
            inner = glob[at + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            text, at = text + f"[{'^' + inner[1:] if inner[0] == '!' else inner}]", closing + 1
        else:
            text += {"*": "[^/]*", "?": "[^/]"}.get(glob[at]) or re.escape(glob[at])
            at += 1
    try:
        return re.compile(text + r"\Z", re.DOTALL)
    except re.error as exc:
        raise OSError(errno.EINVAL, f"not a pattern: {exc}") from exc


def find(stream: int, path: str, options: str) -> None:
    """Paths below `path` that match `pattern`."""
    asked = json.loads(options)
    signal.alarm(_PATIENCE_S)
    wanted, answer = pattern_of(asked["pattern"]), _Answer(stream, asked["most"])
    inner = len(os.path.join(path, ""))
    names = asked["pattern"].removeprefix("./")
    deepest = -1 if "**" in names else names.count("/")
    for child, entry in _in_time(walk(path, answer.skip, deepest)):
        if not wanted.match(child, inner):
            continue
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # it is not ours to see, or went away
        if not answer.add(**described(child, info)):
            return
    answer.end()


def described(path: str, info: os.stat_result) -> dict[str, Any]:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
    return {
        "path": path,
        "name": os.path.basename(path),
        "kind": kind,
        "size_bytes": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "mtime_s": info.st_mtime_ns / 1e9,
        "link_target": _target_of(path) if kind == "symlink" else None,
    }


def _target_of(path: str) -> str | None:
    """Where a link leads; None where nobody may know, as of other processes' in /proc, or it has gone."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def search(stream: int, path: str, options: str) -> None:
    """Lines of text files below `path`, or of the file there, in which `pattern` is found."""
    asked = json.loads(options)
    signal.alarm(_PATIENCE_S)
    wanted, answer = _expression(asked), _Answer(stream, asked["most"])
    names = pattern_of(asked["glob"]) if asked["glob"] else None
    for file in _files(path, answer):
        if names is not None and not names.match(os.path.relpath(file, path)):
            continue
        data = _text_of(file)
        for number, line in enumerate(data.split(b"\n") if data else (), 1):
            found = wanted.search(line)
            if found is None:
                continue
            shown = line[:_LONGEST_LINE].decode("utf-8", "replace")
            if not answer.add(path=file, line=number, column=found.start() + 1, text=shown):
                return
    answer.end()


def _expression(asked: dict[str, Any]) -> re.Pattern[bytes]:
    text = asked["pattern"].encode()
    try:
        return re.compile(
            text if asked["regex"] else re.escape(text),
            re.IGNORECASE if asked["ignore_case"] else 0,
        )
    except (re.error, OverflowError, RecursionError) as exc:
        raise OSError(
            errno.EINVAL, f"not a regular expression: {exc}; without regex= it is plain text"
        ) from exc


def _files(path: str, answer: _Answer) -> Iterator[str]:
    if not stat.S_ISDIR(os.stat(path).st_mode):
        yield path
        return
    for child, entry in _in_time(walk(path, answer.skip)):
        try:
            is_file = entry.is_file(follow_symlinks=False)
        except OSError:
            continue  # it is not ours to see
        if is_file:
            yield child


def _text_of(path: str) -> bytes:
    """The content of a text file; nothing of one that is none, or not ours to read."""
    try:
        fd, info = _open_regular(path)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        data = b"" if info.st_size > _MOST_FILE_BYTES else file.read(_MOST_FILE_BYTES)
    return b"" if b"\0" in data[:8192] else data


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)  # Python refuses a directory, and leaves it open
        raise OSError(errno.EINVAL, "is not a regular file")
    return fd, info


def replace(stream: int, path: str, options: str) -> None:
    """Replace `pattern` in `files`; each is written beside itself and put in its place at once."""
    asked = json.loads(options)
    signal.alarm(_PATIENCE_S)
    wanted, answer = _expression(asked), _Answer(stream, len(asked["files"]), walks=False)
    new = asked["replacement"].encode()
    for name in asked["files"]:
        file = os.path.join(path, name)
        try:
            count = _replace_in(
                file, wanted, new if asked["regex"] else new.replace(b"\\", b"\\\\")
            )
            answer.add(path=name, replacements=count, error=None)
        except (OSError, re.error) as exc:
            text = exc.strerror if isinstance(exc, OSError) else str(exc)
            answer.add(path=name, replacements=0, error=text)
    answer.end()


def _replace_in(path: str, wanted: re.Pattern[bytes], new: bytes) -> int:
    fd, info = _open_regular(path)
    with open(fd, "rb") as file:
        if info.st_size > _MOST_FILE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        changed, count = wanted.subn(new, file.read())
    if not count:
        return 0
    beside = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(changed)
            os.fchmod(file.fileno(), stat.S_IMODE(info.st_mode))
        os.rename(beside, path)
    except BaseException:
        try:
            os.unlink(beside)
        except OSError:
            pass
        raise
    return count
