"""A sandbox that is a directory of this host: adapters run over it without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringfence.errors import FileNotFound, NotADirectory
from ringfence.model.execs.exec import ExecResult
from ringfence.model.files import DIRECTORY, FILE, SYMLINK, FileInfo


class Kept:
    """A content of a framework's, which keeps what it is made of."""

    def __init__(self, **content: Any) -> None:
        self.__dict__ |= content


class FrameworkError(Exception):
    """An error of a framework's, which keeps what it is made of."""

    def __init__(self, *said: str, **content: Any) -> None:
        super().__init__(*said)
        self.__dict__ |= content


def complaints(*names: str) -> dict[str, Any]:
    """Errors of these names."""
    return {name: type(name, (FrameworkError,), {}) for name in names}


class Files:
    """The files of a directory of this host, as those of a sandbox."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses: Exception | None = None

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        if self.refuses is not None:
            raise self.refuses

    async def stat(self, path: str, *, follow: bool) -> FileInfo:
        self._ask("stat", path, follow)
        return self._info(path, follow=follow)

    def _info(self, path: str, *, follow: bool) -> FileInfo:
        try:
            found = os.stat(path, follow_symlinks=follow)
        except FileNotFoundError as exc:
            raise FileNotFound(f"{path}: none", path=path) from exc
        except OSError as exc:
            raise NotADirectory(f"{path}: {exc}", path=path) from exc
        kinds = {0o040000: DIRECTORY, 0o120000: SYMLINK}
        kind = kinds.get(found.st_mode & 0o170000, FILE)
        name = os.path.basename(path)
        return FileInfo(path, name, kind, found.st_size, found.st_mode & 0o7777, found.st_mtime)

    async def list(self, path: str) -> list[FileInfo]:
        self._ask("list", path)
        names = sorted(os.listdir(path))
        return [self._info(f"{path}/{name}", follow=False) for name in names]

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self._ask("read", path, max_bytes)
        return Path(path).read_bytes()

    async def write(self, path: str, data: bytes, **how: Any) -> None:
        self._ask("write", path, data, how)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    async def make_dir(self, path: str) -> None:
        self._ask("make_dir", path)
        Path(path).mkdir(parents=True, exist_ok=True)

    async def remove(self, path: str, **how: Any) -> None:
        self._ask("remove", path, how)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


class Local:
    """A sandbox whose programs run in a directory of this host."""

    def __init__(self, home: Path) -> None:
        self.id, self.state, self.home = "sbx-1", "running", home
        self.files = Files()
        self.asked: list[tuple[list[str], dict[str, Any]]] = []
        self.answer: ExecResult | Exception | None = None

    async def exec(self, argv: list[str], **how: Any) -> ExecResult:
        self.asked.append((list(argv), how))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        given = how.get("stdin")
        done = subprocess.run(
            argv, cwd=how.get("cwd") or self.home, input=given, capture_output=True, check=False
        )
        return ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    async def expose(self, port: int) -> Any:
        self.asked.append((["expose", str(port)], {}))
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(address=("127.0.0.1", 40_000 + port))

    async def terminate(self) -> None:
        self.state = "terminated"


def local_at(place: Path) -> Local:
    """One whose programs start where a link leads to."""
    (place / "real/home").mkdir(parents=True)
    (place / "home").symlink_to("real/home")
    return Local(place / "home")
