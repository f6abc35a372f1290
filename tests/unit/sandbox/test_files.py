"""What `sandbox.files` adds to a backend's own operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from ringfence.errors import FileError, FileNotFound


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create(backend="fake") as made:
        yield made


def test_write_makes_directories_only_when_asked(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFound):
        sandbox.files.write("a/b/c", "text")
    sandbox.files.write("a/b/c", "text", parents=True)

    assert b"text" == sandbox.files.read("a/b/c")


def test_stat_follows_only_when_asked(sandbox: Sandbox) -> None:
    sandbox.files.write("d/file", "1234", parents=True)
    sandbox.shell("ln -s file d/near; ln -s d/near far; ln -s nothing dangling")

    assert "symlink" == sandbox.files.stat("far").kind
    assert ("file", 4) == (
        sandbox.files.stat("far", follow=True).kind,
        sandbox.files.stat("far", follow=True).size_bytes,
    )
    with pytest.raises(FileNotFound):
        sandbox.files.stat("dangling", follow=True)


def test_stat_does_not_go_round_in_circles(sandbox: Sandbox) -> None:
    sandbox.shell("ln -s two one; ln -s one two")

    with pytest.raises(FileError, match="symbolic links"):
        sandbox.files.stat("one", follow=True)
