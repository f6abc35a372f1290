"""Each check of the root under construction, alone: without the mounts and the host's checks around it."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.launcher import build, newroot
from ringfence.linux import mounts, namespaces

LINKS = ("absolute", "relative", "out", "way/file", "magic", "loop")
_RESTRICTED = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with links in it, beside a directory that is not in it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "inside" / "file").write_text("inside")
    (root / "absolute").symlink_to("/inside/file")
    (root / "relative").symlink_to("inside/file")
    (root / "out").symlink_to("../outside/file")
    (root / "way").symlink_to("inside")
    (root / "magic").symlink_to("/proc/self/cwd")
    (root / "loop").symlink_to("loop")
    return root


@pytest.fixture
def root(place: Path) -> Iterator[newroot.NewRoot]:
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
    shape: Any = {"uid": os.getuid(), "gid": os.getgid()}
    yield newroot.NewRoot(fd, shape, [])
    os.close(fd)


def refusal(function: Callable[..., Any], *args: Any) -> int:
    """The number with which it is refused."""
    with pytest.raises(OSError, match=r"\[Errno") as refused:
        function(*args)
    return refused.value.errno or 0


@pytest.mark.parametrize("link", LINKS)
def test_no_link_is_followed_on_the_way_or_at_the_end(root: newroot.NewRoot, link: str) -> None:
    os.close(root.open("/inside/file"))

    assert errno.ELOOP == refusal(root.open, f"/{link}")


def test_nothing_is_above_the_root(root: newroot.NewRoot) -> None:
    assert errno.ENOENT == refusal(root.open, "/../outside/file")
    os.close(root.open("/../inside/file"))


@pytest.mark.parametrize("link", ["way", "absolute", "out", "loop"])
def test_no_directory_is_made_behind_a_link(root: newroot.NewRoot, place: Path, link: str) -> None:
    root.make_dir("/inside/new/deep")

    assert refusal(root.make_dir, f"/{link}/planted") in (errno.ELOOP, errno.ENOTDIR)
    assert refusal(root.make_dir, f"/{link}") in (errno.ELOOP, errno.ENOTDIR)
    assert not (place / "inside" / "planted").exists()
    assert (place / "inside" / "new" / "deep").is_dir()


def test_a_place_for_others_to_mount_on_is_what_they_mount(
    root: newroot.NewRoot, place: Path
) -> None:
    for path, is_dir in (("/inside", True), ("/inside/file", False), ("/new/file", False)):
        newroot._mount_point(root, path, is_dir)
    assert (place / "new" / "file").is_file()
    assert "inside" == (place / "inside" / "file").read_text()

    assert errno.EINVAL == refusal(newroot._mount_point, root, "/inside", False)
    assert errno.ENOTDIR == refusal(newroot._mount_point, root, "/inside/file", True)


@pytest.mark.parametrize("link", ["absolute", "relative", "out"])
def test_nothing_is_attached_at_a_link(
    root: newroot.NewRoot, place: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a single file is mounted the last name is not opened before: only by the way of the mount."""
    moved: list[str] = []

    def move_mount(tree: int, path: str, *, dir_fd: int) -> None:
        moved.append(os.readlink(f"/proc/self/fd/{dir_fd}"))

    monkeypatch.setattr(mounts, "move_mount", move_mount)

    def attach(target: str) -> None:
        root.attach(os.open(place / "inside" / "file", os.O_PATH), target)

    attach("/inside/new")
    assert [str(place / "inside" / "new")] == moved
    assert errno.ELOOP == refusal(attach, f"/{link}")
    assert 1 == len(moved)


def test_what_a_template_made_is_rewritten_and_no_link(root: newroot.NewRoot, place: Path) -> None:
    newroot._rewrite(root, "/inside/file", b"new")

    assert "new" == (place / "inside" / "file").read_text()
    assert errno.ELOOP == refusal(newroot._rewrite, root, "/relative", b"x")
    assert errno.ELOOP == refusal(newroot._rewrite, root, "/out", b"x")
    assert "new" == (place / "inside" / "file").read_text()
    assert "outside" == (place.parent / "outside" / "file").read_text()


def test_a_directory_of_an_image_is_one_and_no_link(
    root: newroot.NewRoot, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    newroot._image_dir(root, "inside", 0o755, False)
    newroot._image_dir(root, "made", 0o755, True)

    assert (place / "made").is_dir()
    assert errno.ELOOP == refusal(newroot._image_dir, root, "way", 0o755, False)
    assert errno.ENOTDIR == refusal(newroot._image_dir, root, "inside/file", 0o755, False)


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_of_an_image_is_never_written_through_a_link(
    root: newroot.NewRoot, place: Path, replace: bool
) -> None:
    link = place / "inside" / "out"
    link.symlink_to("../../outside/file")
    newroot._image_file(root, "/inside/file", b"new", 0o644, replace)
    newroot._image_file(root, "/inside/out", b"new", 0o644, replace)

    assert ("new" if replace else "inside") == (place / "inside" / "file").read_text()
    assert "outside" == (place.parent / "outside" / "file").read_text()
    assert link.is_symlink() is not replace
    assert errno.ELOOP == refusal(newroot._image_file, root, "/way/new", b"x", 0o644, replace)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "file", "link", "directory"])
def test_only_the_null_device_covers(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2025-31133: what else is at its place would show itself wherever something is masked."""
    mounted: list[str] = []
    monkeypatch.setattr(mounts, "mount", lambda source, *_: mounted.append(source))
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")

    newroot.cover_with_null("/dev/null", "/proc/kcore")
    assert ["/dev/null"] == mounted
    path = device if device.startswith("/") else str(tmp_path / device)
    assert errno.EPERM == refusal(newroot.cover_with_null, path, "/proc/kcore")
    assert ["/dev/null"] == mounted


@pytest.mark.root
def test_a_block_device_of_the_same_number_does_not_cover(tmp_path: Path) -> None:
    os.mknod(tmp_path / "ram3", 0o600 | stat.S_IFBLK, os.makedev(1, 3))
    assert errno.EPERM == refusal(newroot.cover_with_null, str(tmp_path / "ram3"), "/proc/kcore")


def test_a_source_that_was_replaced_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another file, by a link to the very same one, or by a link on the way to it."""
    opened: list[int] = []
    monkeypatch.setattr(mounts, "open_tree", lambda *_, dir_fd: os.dup(dir_fd))
    monkeypatch.setattr(build, "restrict_tree", lambda fd, *_: opened.append(fd))
    source = tmp_path / "way" / "source"
    source.parent.mkdir()
    source.write_text("asked for")
    info = source.stat()
    tree: Any = {"source": str(source), "device": info.st_dev, "inode": info.st_ino}

    os.close(build.open_tree(tree, -1))
    for number in ("device", "inode"):  # of another file system inodes have the same numbers
        assert errno.ESTALE == refusal(build.open_tree, {**tree, number: tree[number] + 1}, -1)
    source.rename(tmp_path / "way" / "kept")
    source.write_text("another")
    assert errno.ESTALE == refusal(build.open_tree, tree, -1)
    source.unlink()
    source.symlink_to("kept")
    assert errno.ELOOP == refusal(build.open_tree, tree, -1)
    source.unlink()
    (tmp_path / "way" / "kept").rename(source)
    os.close(build.open_tree(tree, -1))
    source.parent.rename(tmp_path / "moved")
    source.parent.symlink_to("moved")
    assert errno.ELOOP == refusal(build.open_tree, tree, -1)
    assert 2 == len(opened)


def test_what_is_mounted_below_a_source_is_as_restricted_as_it(tmp_path: Path) -> None:
    """Each mount of a tree is read-only, nosuid and nodev, not its top alone."""
    (tmp_path / "inner").mkdir()

    def flags() -> list[list[int]]:
        alone(namespaces.CLONE_NEWNS)
        mounts.mount("", "/", "", mounts.MS_REC | mounts.MS_PRIVATE)
        mounts.mount("below", str(tmp_path / "inner"), "tmpfs")
        info, found = tmp_path.stat(), []
        for attributes in (
            0,
            mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV,
        ):
            tree: Any = {
                "source": str(tmp_path), "device": info.st_dev, "inode": info.st_ino, "attributes": attributes,
            }  # fmt: skip
            fd = build.open_tree(tree, -1)
            inner = os.open("inner", os.O_RDONLY, dir_fd=fd)
            assert os.fstat(inner).st_dev != info.st_dev
            found.append([os.fstatvfs(each).f_flag & _RESTRICTED for each in (fd, inner)])
        return found

    free, restricted = result_of(flags)

    assert [_RESTRICTED] * 2 == restricted
    assert 0 == free[1], "the control"


def test_a_tree_that_cannot_be_restricted_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, *_: Any) -> None:
        closed.append(fd)
        raise PermissionError(errno.EPERM, "no")

    closed: list[int] = []
    monkeypatch.setattr(mounts, "open_tree", lambda *_, dir_fd: os.dup(dir_fd))
    monkeypatch.setattr(build, "restrict_tree", refuse)
    info = tmp_path.stat()
    tree: Any = {"source": str(tmp_path), "device": info.st_dev, "inode": info.st_ino}

    assert errno.EPERM == refusal(build.open_tree, tree, -1)
    assert errno.EBADF == refusal(os.fstat, closed[0])


def test_every_step_closes_what_it_opens(
    root: newroot.NewRoot, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PID 1 takes the steps: what stays open there is within reach of all that it starts."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(mounts, "mount", lambda *_: None)
    monkeypatch.setattr(mounts, "mount_setattr", lambda *_: None)
    monkeypatch.setattr(mounts, "move_mount", lambda *_, dir_fd=-1: None)
    monkeypatch.setattr(mounts, "open_tree", lambda _, *, dir_fd: os.dup(dir_fd))
    own = os.getuid()
    root.shape["uid"], root.covers = own, "/inside"
    root.trees = [os.open("/", os.O_PATH) for _ in range(3)]
    steps: list[tuple[Any, ...]] = [
        ("dir", "/made", 0o755, True),
        ("symlink", "/pointing", "made"),
        ("file", "/made/file", b"content", 0o640),
        ("rewrite", "/made/file", b"other"),
        ("show", "/shown", 0, True),
        ("show", "/shown-file", 1, False),
        ("image_dir", "made", 0o755, True),
        ("image_file", "/made/image", b"content", 0o644, True),
        ("image_file", "/made/image", b"not again", 0o644, False),
        ("bind", "/bound", 2),
        ("session_dir", "/session"),
        ("bind_inside", "/made", "/bound", 1),
        ("pin", "/made"),
        ("protect", "/made"),
        ("hide", "/made/hidden/deep", True),
        ("hide", "/made/file", False),
        ("hide", "/absent", False),
        ("mask", "/made"),
        ("mask", "/absent"),
    ]
    opened = len(os.listdir("/proc/self/fd"))
    for step in steps:
        newroot.run_steps(root, [step])
        opened -= step[0] in ("show", "bind")  # a tree that was open before
        assert opened == len(os.listdir("/proc/self/fd")), step

    assert "other" == (place / "made" / "file").read_text()
    assert 0o640 == (place / "made" / "file").stat().st_mode & 0o777
    assert "content" == (place / "made" / "image").read_text()
    assert not (place / "absent").exists()


def test_a_boot_id_is_a_random_uuid_of_a_line() -> None:
    texts = [newroot.boot_id().decode() for _ in range(8)]
    found = [uuid.UUID(text.removesuffix("\n")) for text in texts]
    assert [f"{each}\n" for each in found] == texts
    assert {(4, uuid.RFC_4122)} == {(each.version, each.variant) for each in found}
    assert 8 == len(set(found))
