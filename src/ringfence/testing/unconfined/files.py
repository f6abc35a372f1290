"""The files API over the host's own: a path means what it means to any process of this user."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from ...backends.local.agents.fileinfo import absolute, describe, first_names
from ...backends.local.agents.files import LocalFiles
from ...errors import IoError, file_error
from ...launcher.helpers import trees
from . import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...model.files import FileInfo

_HELPER = """
import sys
from ringfence.guest.trees import OPERATIONS
what, *args = sys.argv[1:]
try:
    OPERATIONS[what](0 if what == "in" else 1, *args)
except OSError as exc:
    sys.exit(f"{exc.errno} {exc.strerror}")
"""


class UnconfinedFiles(LocalFiles):
    """See `BackendFiles`.

    Args:
        root: Where relative paths start.
        check: Raises where the sandbox's state forbids touching its files.
        scope: Of the sandbox, for helper tasks.
    """

    def __init__(self, root: str, check: Callable[[str], None], scope: str) -> None:
        self._root, self._check, self._scope = root, check, scope

    def open_read(self, path: str) -> BinaryIO:
        with self._at(path) as where:
            return open(where, "rb")

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else os.O_TRUNC)
        with self._at(path) as where:
            is_new = not os.path.exists(where)
            fd = os.open(where, flags, mode)
            if is_new:
                os.fchmod(fd, mode & 0o777)  # whatever the umask is
            return open(fd, "ab" if append else "wb")

    def list(self, path: str, after: str = "", most: int | None = None) -> list[FileInfo]:
        with self._at(path) as where:
            names = first_names(os.listdir(where), after, most)
            return [_described(os.path.join(where, name)) for name in names]

    def stat(self, path: str) -> FileInfo:
        with self._at(path) as where:
            return _described(where)

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        with self._at(path) as where:
            if parents:
                os.makedirs(where, exist_ok=True)
            else:
                os.mkdir(where)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        with self._at(path) as where:
            if not stat.S_ISDIR(os.lstat(where).st_mode):
                os.unlink(where)
            elif recursive:
                trees.remove(where, one_file_system=False)
            else:
                os.rmdir(where)

    def move(self, src: str, dst: str) -> None:
        with self._at(src) as source, self._at(dst) as target:
            try:
                os.rename(source, target)
            except OSError as exc:
                if os.path.lexists(target) or os.stat(os.path.dirname(target)).st_dev == (
                    os.lstat(source).st_dev
                ):
                    raise exc
                shutil.move(source, target)

    def start_helper(self, what: str, path: str, options: str = "") -> HelperProcess:
        args = [self._absolute(path), options] if options else [self._absolute(path)]
        return HelperProcess(what, args, self._scope)

    @contextmanager
    def _at(self, path: str) -> Iterator[str]:
        """Give the path on the host; errors met there become typed."""
        where = self._absolute(path)
        try:
            yield where
        except OSError as exc:
            raise file_error(exc.errno or 0, path, exc.strerror or "") from exc

    def _absolute(self, path: str) -> str:
        self._check("files")
        return absolute(self._root, path)


class HelperProcess:
    """A helper task in a process of its own, as some set alarms and umasks; see `HelperTask`."""

    def __init__(self, what: str, args: list[str], scope: str) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        reads = what == "in"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HELPER, what, *args],
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if reads else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={"PYTHONPATH": paths, processes.TAG: scope},
        )
        self._pipe = self._process.stdin or self._process.stdout
        assert self._pipe is not None
        self.stream = self._pipe.fileno()

    def finish(self, path: str) -> None:
        problem = self._end()
        if self._process.returncode:
            number, _, text = problem.partition(" ")
            if not number.isdecimal():
                raise IoError(f"{path}: {problem or 'the helper was killed'}", retryable=True)
            raise file_error(int(number), path, text.strip())

    def abandon(self) -> None:
        self._process.kill()
        self._end()

    def _end(self) -> str:
        """Close the stream and wait; return what the helper wrote to stderr."""
        assert self._pipe is not None
        assert self._process.stderr is not None
        self._pipe.close()
        with self._process.stderr as stderr:
            problem = stderr.read()
        self._process.wait()
        return os.fsdecode(problem)


def _described(path: str) -> FileInfo:
    info = os.lstat(path)
    link = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
    name = os.path.basename(path)
    return describe(path, name, info.st_mode, info.st_size, info.st_mtime_ns, link)
