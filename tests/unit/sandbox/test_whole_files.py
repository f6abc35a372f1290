"""A file that is read as a whole is bounded: a guest makes one of any size for nothing."""

from __future__ import annotations

import io

import pytest

from ringfence.errors import FileError
from ringfence.model import files
from ringfence.sandbox.files import Files

pytestmark = pytest.mark.anyone


class _Inner:
    """A file of zeros, sparse inside as outside."""

    def __init__(self, size: int) -> None:
        self.size = size

    def open_read(self, _path: str) -> io.BytesIO:
        return io.BytesIO(bytes(self.size))


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_up_to_the_bound_is_read(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_READ", 100)

    assert bytes(size) == Files(_Inner(size)).read("a")  # type: ignore[arg-type]


def test_a_longer_one_is_refused_and_its_parts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_READ", 100)
    read = Files(_Inner(101)).read  # type: ignore[arg-type]

    with pytest.raises(FileError, match=r"a: is longer than .*max_bytes="):
        read("a")
    assert (bytes(101), bytes(1)) == (read("a", max_bytes=500), read("a", offset=100))
