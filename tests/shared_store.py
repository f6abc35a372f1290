"""A store of shared snapshots in a directory, without fsspec; tests/suites/ray has the same on fsspec."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringfence.snapshots.shared import SharedSnapshots

SECRET = b"of the cluster"


class DirectoryFiles:
    """The methods of fsspec's `LocalFileSystem` that the store calls."""

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes) -> None:
        with open(path, "wb") as file:
            file.write(value)

    def mv(self, path: str, target: str) -> None:
        os.rename(path, target)

    def ls(self, path: str, *, detail: bool) -> list[str]:
        assert not detail
        return [f"{path}/{name}" for name in os.listdir(path)]

    def rm_file(self, path: str) -> None:
        os.remove(path)

    def rm(self, path: str, *, recursive: bool) -> None:
        assert recursive
        shutil.rmtree(path)

    def open(self, path: str, mode: str) -> Any:
        return open(path, mode)

    def invalidate_cache(self) -> None:
        """Nothing is cached."""


def url_to_fs(url: str) -> tuple[DirectoryFiles, str]:
    if "://" in url:
        raise ValueError(f"Protocol not known: {url}")
    return DirectoryFiles(), url


def make_store(
    place: Path, patch: pytest.MonkeyPatch, secret: bytes = SECRET, url: str = ""
) -> SharedSnapshots:
    """Make a store in `place`, which need not exist; `patch` puts these files in place of fsspec."""
    core = ModuleType("fsspec.core")
    core.url_to_fs = url_to_fs  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "fsspec", ModuleType("fsspec"))
    patch.setitem(sys.modules, "fsspec.core", core)
    return SharedSnapshots(url or str(place), secret)
