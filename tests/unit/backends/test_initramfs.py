"""Tests of the files that a guest's Python is given."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from ringfence.backends.local.agents import agent_code
from ringfence.backends.microvm import initramfs
from ringfence.errors import BackendUnavailable


def test_modules_that_replace_themselves_are_listed(tmp_path: Path) -> None:
    """Since Python 3.13 collections.abc puts another module in its place, which names another file."""
    python = agent_code.interpreter()[0]
    program = "import collections; print(collections.__path__[0])"
    package = subprocess.check_output([python, "-I", "-S", "-c", program], text=True).strip()

    files = initramfs._files_of_python(str(tmp_path))

    assert f"{package}/abc.py" in files


class Noted(initramfs.Archive):
    """An archive that notes what is put into it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, bytes]] = []

    def _put(self, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        self.found.append((name, mode, data))
        super()._put(name, mode, data, device)

    def files(self) -> dict[str, tuple[int, bytes]]:
        return {
            f"/{name}": (stat.S_IFMT(mode), data)
            for name, mode, data in self.found
            if not stat.S_ISDIR(mode)
        }


def test_the_first_at_a_path_is_all_that_is_there() -> None:
    """The kernel would take the last: a file of the host's could stand in for one of ours."""
    archive = Noted()
    archive.add("/init", stat.S_IFREG | 0o700, b"ours")
    archive.add("/a/b/file", stat.S_IFREG | 0o600, b"first")
    archive.add("/a", stat.S_IFLNK | 0o777, b"elsewhere")
    archive.add("/init", stat.S_IFREG | 0o777, b"another")
    archive.add("a/b/file/", stat.S_IFREG | 0o600, b"second")

    assert ["init", "a", "a/b", "a/b/file"] == [name for name, *_ in archive.found]
    assert [b"ours", b"first"] == [data for *_, data in archive.found if data]
    content = bytes(archive._out)
    numbers = [int(content[at + 6 : at + 14], 16) for at in _heads(content)]
    assert len(set(numbers)) == len(numbers), "one number would make hard links of them"
    assert archive.finished().startswith(content)


def _heads(content: bytes) -> list[int]:
    found, at = [], 0
    while at < len(content):
        assert content[at : at + 6] == b"070701"
        found.append(at)
        size, length = (int(content[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in (6, 11))
        at = ((at + 110 + length + 3) & ~3) + size
        at = (at + 3) & ~3
    return found


def test_a_file_is_copied_to_where_it_really_lies(tmp_path: Path) -> None:
    """Behind a directory that is a link as well; a second name of it is a link, and another file is none."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "libx.so.1.2").write_bytes(b"library")
    (real / "libx.so").symlink_to("libx.so.1.2")
    (real / "liby.so").symlink_to("liby.so.9")
    (real / "plain").write_bytes(b"plain")
    (real / "name").symlink_to("plain")
    (tmp_path / "link").symlink_to("real")
    archive = Noted()
    initramfs._copy(archive, f"{tmp_path}/link/libx.so")
    initramfs._copy(archive, f"{tmp_path}/link/plain")
    initramfs._copy(archive, f"{tmp_path}/link/none")

    found = {name: each for name, each in archive.files().items() if name.startswith(str(tmp_path))}
    assert {
        f"{real}/libx.so.1.2": (stat.S_IFREG, b"library"),
        f"{real}/libx.so": (stat.S_IFLNK, b"libx.so.1.2"),
        f"{real}/plain": (stat.S_IFREG, b"plain"),
    } == found
    initramfs._copy(archive, f"{real}/name")
    assert (stat.S_IFLNK, os.fsencode(real / "plain")) == archive.files()[f"{real}/name"]


def test_the_loader_has_the_name_that_the_program_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = agent_code.interpreter()[0]
    archive = Noted()
    initramfs._add_loader(archive, python)
    named = [name for name in archive.files() if "/ld-" in name]
    read = subprocess.run(["readelf", "-l", python], capture_output=True, text=True, check=False)
    if "interpreter: " in read.stdout:
        wanted = read.stdout.partition("interpreter: ")[2].partition("]")[0]
        assert [os.path.basename(wanted)] == [os.path.basename(name) for name in named]
        kind, data = archive.files()[named[0]]
        assert (stat.S_IFREG, Path(wanted).read_bytes()) == (kind, data)
    (tmp_path / "static").write_bytes(b"\x7fELF without one")
    other = Noted()
    initramfs._add_loader(other, str(tmp_path / "static"))
    assert [] == other.found
    monkeypatch.setattr(agent_code, "interpreter", lambda: (str(tmp_path / "none"), []))
    with pytest.raises(BackendUnavailable, match="does not run the agent"):
        initramfs._files_of_python(str(tmp_path))
    assert not (tmp_path / "agent").exists()
