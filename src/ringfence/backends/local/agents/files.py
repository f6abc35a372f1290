"""The part of a sandbox's files that is the same however they are reached: names, trees, removal."""

from __future__ import annotations

import os

from ....errors import FileError
from ....model.files import DIRECTORY, FileInfo
from .fileinfo import absolute, describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ...protocol import HelperTask
    from ..sandbox import LocalSandbox

    Progress = Callable[[int, str], None]


class LocalFiles:
    def __init__(self, sandbox: LocalSandbox) -> None:
        self._home = sandbox

    def open_read(self, path: str) -> BinaryIO:
        raise NotImplementedError

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        raise NotImplementedError

    def start_helper(self, what: str, path: str, options: str = "") -> HelperTask:
        """A helper inside that reads or writes one tree."""
        raise NotImplementedError

    def stat(self, path: str) -> FileInfo:
        where = self._absolute(path)
        return described(where, os.path.basename(where), self._ask(where, "stat", where))

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        where = self._absolute(path)
        self._ask(where, "mkdir", where, parents)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        where = self._absolute(path)
        if where == "/":
            raise FileError("the root cannot be removed", path=path)
        if recursive and self.stat(where).kind == DIRECTORY:
            self._remove_tree(where)
        else:
            self._ask(where, "remove", where)

    def upload_tree(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        from .copies import upload

        upload(self, local, self._absolute(remote), progress)

    def download_tree(
        self, remote: str, local: str, *, overwrite: bool = False, progress: Progress | None = None
    ) -> None:
        from .copies import download

        download(self, self._absolute(remote), local, progress, overwrite=overwrite)

    def _absolute(self, path: str) -> str:
        return absolute(self._home.root, path)

    def _ask(self, path: str, verb: str, *args: object) -> bytes:
        """Send a request about `path` to the agent inside."""
        raise NotImplementedError

    def _remove_tree(self, path: str) -> None:
        """By a helper: who answers must not be kept busy by however many files there are."""
        raise NotImplementedError


def described(path: str, name: str, words: bytes) -> FileInfo:
    """From what is said inside: mode, size, time and where a link points."""
    mode, size, mtime_ns, link = words.split(b" ", 3)
    return describe(path, name, int(mode), int(size), int(mtime_ns), os.fsdecode(link))
