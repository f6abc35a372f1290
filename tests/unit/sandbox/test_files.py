"""What `sandbox.files` adds to a backend's own operations."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from tests.unconfined import Unconfined

from ringfence import Sandbox
from ringfence.errors import FileError, FileNotFound
from ringfence.sandbox.files import Files

pytestmark = pytest.mark.anyone


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    backend = Unconfined()
    with Sandbox.create(backend=backend) as made:
        yield made
    backend.close()


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


class _Pipe(io.BytesIO):
    """As a backend gives that reads by way of another process."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation("seek")


@pytest.mark.parametrize("kind", [io.BytesIO, _Pipe])
def test_read_a_part(kind: type[io.BytesIO]) -> None:
    class Backend:
        def open_read(self, path: str) -> io.BytesIO:
            return kind(b"0123456789")

    files = Files(Backend())  # type: ignore[arg-type]

    assert b"0123456789" == files.read("f")
    assert b"345" == files.read("f", offset=3, max_bytes=3)
    assert (b"9", b"") == (files.read("f", offset=9), files.read("f", offset=99))
