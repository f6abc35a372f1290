"""Where the disks of sandboxes are, who is shown none of them, and what becomes of one that is too large."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.backends.local import journal
from ringfence.backends.local.mounts import disks
from ringfence.backends.local.sizes import sizes
from ringfence.errors import InvalidRequest, StorageFull, Unsupported
from ringfence.model.limits import Limits

pytestmark = pytest.mark.anyone


def test_no_mount_shows_the_disks_of_all(tmp_path: Path) -> None:
    """Neither the directory itself, nor one above it, nor by a link on either side."""
    top, beside = tmp_path / "above" / "disks", tmp_path / "above" / "beside"
    top.mkdir(parents=True)
    beside.mkdir()
    (tmp_path / "to-above").symlink_to(tmp_path / "above")
    (tmp_path / "to-disks").symlink_to(top)

    for source in (top, top.parent, tmp_path / "to-above", tmp_path / "to-disks"):
        for place in (top, tmp_path / "to-disks"):
            spec = SandboxSpec(mounts=(Mount("/data", str(source)),))
            with pytest.raises(
                InvalidRequest, match="where writable layers on disk are"
            ) as refusal:
                disks._check_mounts(spec, str(place))
            assert "mounts" == refusal.value.field
    disks._check_mounts(SandboxSpec(mounts=(Mount("/data", str(beside)), Mount("/own"))), str(top))


def of(**limits: int) -> Any:
    host: Any = SimpleNamespace(memory_bytes=16 << 30)
    return sizes(SandboxSpec(limits=Limits(**limits)), host)


SMALL = of(disk_bytes=1 << 20, inodes=4096)
SPEC = SandboxSpec()
TREE: Any = {}


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of an ordinary user, on a file system that counts as a disk."""
    monkeypatch.setenv(journal.DISKS, str(tmp_path))
    monkeypatch.setattr(disks, "kind_at", lambda _: "ext4")
    user = SimpleNamespace(trusted_root=False)
    monkeypatch.setattr(disks, "host", lambda: user)
    return tmp_path / f".ringfence-{tmp_path.stat().st_uid}"


class TestMaking:
    def test_a_directory_is_its_makers_and_goes_with_it(self, top: Path) -> None:
        made = disks.make("one", "1.2.3", SMALL, 0, SPEC)
        assert str(top / "disk.1.2.3.one") == made.path
        assert 0o700 == os.stat(made.path).st_mode & 0o777
        files = os.stat(f"{made.path}/files")
        assert (f"{made.path}/files", files.st_dev, files.st_ino) == tuple(
            made.tree[each] for each in ("source", "device", "inode")
        )
        assert (os.stat(made.path).st_uid, 0o755) == (files.st_uid, files.st_mode & 0o777)
        assert "may not mount an image" in made.why
        again = disks.again("one", "1.2.3")
        assert (made.path, made.why) == (again.path, again.why)
        with subprocess.Popen(["sleep", "1000"]) as sampler:
            made.sampler, made.fd = sampler, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            fd = made.fd
            made.remove()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
        assert ([], True) == (os.listdir(top), made.removed)
        assert "" == disks.again("one", "1.2.3").path

    def test_what_fails_leaves_no_directory(
        self, top: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(Unsupported, match="other users inside"):
            disks.make("one", "1.2.3", SMALL, 70000, SPEC)
        monkeypatch.setattr(disks, "_free", lambda _: (1 << 20) - 1)
        with pytest.raises(StorageFull, match="1 MiB"):
            disks.make("one", "1.2.3", SMALL, 0, SPEC)
        monkeypatch.setattr(disks, "_free", lambda _: 1 << 20)

        def refuse(*_: Any) -> None:
            raise PermissionError(1, "not permitted")

        monkeypatch.setattr(os, "chown", refuse)
        with pytest.raises(PermissionError):
            disks.make("one", "1.2.3", SMALL, 0, SPEC)
        assert [] == os.listdir(top)

    @pytest.mark.parametrize(
        ("number", "is_full"),
        [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EPERM, False)],
    )
    def test_only_a_full_disk_is_told_as_one(
        self, top: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool
    ) -> None:
        def image(*_: Any) -> Any:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(disks, "_why_no_image", str)
        monkeypatch.setattr(disks, "_image", image)
        if is_full:
            with pytest.raises(StorageFull):
                disks.make("one", "", SMALL, 0, SPEC)
        else:
            made = disks.make("one", "", SMALL, 0, SPEC)
            assert "no image can be mounted here: Operation not permitted" == made.why
            made.remove()
            assert disks.image_for("gvisor", "one", SMALL, 0, SPEC) is None
            with pytest.raises(Unsupported, match="gvisor keeps files on disk in an image only"):
                disks.image_for("gvisor", "one", SMALL, 0, SandboxSpec(disk_root=True))
        assert [] == os.listdir(top)

    def test_a_place_in_memory_is_none(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert str(top) == disks.place()
        monkeypatch.setattr(disks, "kind_at", lambda _: "tmpfs")
        with pytest.raises(Unsupported, match="is a tmpfs, in memory"):
            disks.place()

    def test_an_image_holds_what_was_asked_for_and_no_more_files(self) -> None:
        size, inodes = disks._dimensions(of(disk_bytes=300 << 20, inodes=10_000))
        assert (0, True) == (inodes % (3 * 16), inodes <= 10_000)
        assert (300 << 20) + inodes * 256 == size
        least: Any = SimpleNamespace(disk_bytes=4096, inodes=1)
        assert (1 << 20, 16) == disks._dimensions(least)

    def test_a_part_of_the_hosts_disk_stays_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        room = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_blocks=20_000)
        monkeypatch.setattr(os, "statvfs", lambda _: room)
        assert 0 == disks._free("/x"), "a twentieth"
        room.f_blocks = 1 << 40
        assert 4_096_000 - (1 << 30) == disks._free("/x"), "at most a gibibyte"


class TestSampling:
    """A scripted sampler says sizes; what is over its size is ended, or all of it."""

    LIMIT = 1 << 20

    def look(
        self, said: str, monkeypatch: pytest.MonkeyPatch, *, relieves: bool = True, free: int = 1
    ) -> tuple[list[str], list[Any], Any]:
        ended: list[str] = []
        asked: list[Any] = []

        class Writers:
            def __init__(self, _sandbox: Any) -> None:
                pass

            def look(self) -> list[str]:
                return ["a writer"]

            def relieve(self, found: list[str], why: str, *, grows: bool) -> bool:
                asked.append((found, why, grows))
                return relieves

        monkeypatch.setattr(disks, "Writers", Writers)
        monkeypatch.setattr(disks, "_free", lambda _: free)
        disk = disks.Disk(TREE, -1, "/none/such")
        disk.removed = False
        disk.sampler = subprocess.Popen(["printf", said], stdout=subprocess.PIPE)
        sandbox: Any = SimpleNamespace(end_because=ended.append)
        disks._look(disk, SMALL, sandbox)
        assert disk.sampler.returncode is not None
        return ended, asked, disk

    def test_the_limit_itself_is_no_more_than_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended, asked, disk = self.look(f"{self.LIMIT} 4096\n", monkeypatch)
        assert ([], (self.LIMIT, 4096)) == (asked, disk.used)
        assert ["the program that samples the size of its files has ended"] == ended

    def test_what_is_over_is_relieved_as_it_grows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        over = self.LIMIT + 1
        said = f"{over} 1\n{over} 1\n{over} 2\n{over} 1\n1 4097\n"
        _, asked, _ = self.look(said, monkeypatch)
        assert [True, True, False, True] == [grows for _, _, grows in asked]
        assert "more than limits.disk_bytes" in asked[0][1]
        assert "more than limits.inodes" in asked[-1][1]

    def test_what_nothing_relieves_ends_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended, asked, _ = self.look(f"{self.LIMIT + 1} 1\n2 1\n", monkeypatch, relieves=False)
        assert (1, 1) == (len(asked), len(ended))
        assert "limits.disk_bytes" in ended[0]
        ended, asked, _ = self.look(f"{self.LIMIT + (1 << 30) + 1} 1\n", monkeypatch)
        assert ([], 1) == (asked, len(ended)), "far beyond it nobody is asked"
        ended, asked, _ = self.look("1 1\n", monkeypatch, free=-1)
        assert ([], ["the disk of the host is nearly full"]) == (asked, ended)

    def test_one_that_was_removed_is_not_ended_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended: list[str] = []
        disk = disks.Disk(TREE, -1, "/none/such")
        disk.removed = True
        disk.sampler = subprocess.Popen(["true"], stdout=subprocess.PIPE)
        disks._look(disk, SMALL, SimpleNamespace(end_because=ended.append))
        assert [] == ended
        disk.removed, disk.sampler = (
            False,
            subprocess.Popen(["printf", "1 1\n"], stdout=subprocess.PIPE),
        )
        disks._look(disk, SMALL, SimpleNamespace(end_because=ended.append))
        assert 1 == len(ended), "its directory is gone, and nobody said so"
