"""What the mount calls do, each alone, in a mount namespace of one's own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.linux import mounts, namespaces

_NO_DEVICES = 4  # ST_NODEV, which `os` has as well: include/linux/statfs.h


def own_mounts() -> None:
    uid, gid = os.getuid(), os.getgid()
    alone(namespaces.CLONE_NEWNS)
    if os.getuid() != uid:  # in a user namespace, where nobody is mapped yet
        maps = f"0 {uid} 1\n", f"0 {gid} 1\n"
        namespaces.write_id_maps(os.getpid(), *maps, deny_setgroups=True)
    mounts.mount("", "/", "", mounts.MS_REC | mounts.MS_PRIVATE)


def refusal(function: Callable[..., object], *args: Any, **more: Any) -> list[object]:
    """The errno with which it is refused, and what the error is about."""
    try:
        function(*args, **more)
    except OSError as exc:
        return [exc.errno, exc.filename]
    return []


@pytest.fixture
def trees(tmp_path: Path) -> str:
    for name in ("outer", "copy", "other"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


def two_deep(base: str) -> None:
    """A file system in which another is mounted, each with a file."""
    mounts.mount("one", f"{base}/outer", "tmpfs", mounts.MS_NOSUID, "size=1m,mode=700")
    os.mkdir(f"{base}/outer/inner")
    mounts.mount("two", f"{base}/outer/inner", "tmpfs")
    for path in ("outer/shown", "outer/inner/deep"):
        os.close(os.open(f"{base}/{path}", os.O_CREAT | os.O_WRONLY, 0o600))


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_options_and_flags_are_those_that_were_given(trees: str) -> None:
    def mounted() -> list[Any]:
        own_mounts()
        two_deep(trees)
        outer, inner = os.statvfs(f"{trees}/outer"), os.statvfs(f"{trees}/outer/inner")
        return [
            outer.f_blocks * outer.f_frsize,
            os.stat(f"{trees}/outer").st_mode & 0o777,
            bool(outer.f_flag & os.ST_NOSUID),
            bool(inner.f_flag & os.ST_NOSUID),
            refusal(mounts.mount, "x", f"{trees}/none", "tmpfs"),
        ]

    assert [1 << 20, 0o700, True, False, [errno.ENOENT, f"{trees}/none"]] == result_of(mounted)


def test_a_mount_is_taken_away_unless_it_is_in_use(trees: str) -> None:
    def taken_away() -> list[Any]:
        own_mounts()
        two_deep(trees)
        outer = f"{trees}/outer"
        found: list[Any] = [refusal(mounts.umount2, outer)]
        mounts.umount2(f"{outer}/inner")
        found.append(os.listdir(f"{outer}/inner"))
        kept = os.open(f"{outer}/shown", os.O_RDONLY)
        found.append(refusal(mounts.umount2, outer))
        mounts.umount2(outer, mounts.MNT_DETACH)
        os.close(kept)
        return [*found, os.listdir(outer), refusal(mounts.umount2, outer)]

    outer = f"{trees}/outer"
    busy, none = [errno.EBUSY, outer], [errno.EINVAL, outer]
    assert [busy, [], busy, [], none] == result_of(taken_away)


@pytest.mark.parametrize("recursive", [True, False])
def test_a_tree_is_copied_with_what_is_mounted_in_it_or_without(
    trees: str, recursive: bool
) -> None:
    """By its path or by a descriptor of it, and attached at a path or over a descriptor."""

    def copied() -> list[Any]:
        own_mounts()
        two_deep(trees)
        there = os.open(f"{trees}/outer", os.O_PATH)
        by_path = mounts.open_tree(f"{trees}/outer", recursive=recursive)
        by_fd = mounts.open_tree("", dir_fd=there, recursive=recursive)
        beside = mounts.open_tree("inner", dir_fd=there)
        found: list[Any] = [os.get_inheritable(fd) for fd in (by_path, by_fd)]
        os.unlink(f"{trees}/outer/inner/deep")
        os.close(os.open(f"{trees}/outer/inner/later", os.O_CREAT, 0o600))
        mounts.move_mount(by_path, f"{trees}/copy")
        over = os.open(f"{trees}/other", os.O_PATH)
        mounts.move_mount(by_fd, "", dir_fd=over)
        for name in ("copy", "other"):
            found.append(sorted(os.listdir(f"{trees}/{name}")))
            found.append(os.listdir(f"{trees}/{name}/inner"))
        found.append(os.listdir(f"/proc/self/fd/{beside}"))
        found.append(refusal(mounts.open_tree, f"{trees}/none"))
        return [*found, refusal(mounts.move_mount, by_path, f"{trees}/none")]

    inner = ["later"] if recursive else []
    each = [["inner", "shown"], inner]
    missing = [errno.ENOENT, f"{trees}/none"]
    assert [False, False, *each, *each, ["later"], missing, missing] == result_of(copied)


@pytest.mark.parametrize("recursive", [True, False])
def test_attributes_are_set_on_a_whole_tree_or_on_its_top(trees: str, recursive: bool) -> None:
    def set_on() -> list[Any]:
        own_mounts()
        two_deep(trees)
        tree = mounts.open_tree(f"{trees}/outer")
        attributes = mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOEXEC
        mounts.mount_setattr(tree, attributes, recursive=recursive)
        mounts.move_mount(tree, f"{trees}/copy")
        flags = [os.statvfs(f"{trees}/{name}").f_flag for name in ("copy", "copy/inner", "outer")]
        wrong = refusal(mounts.mount_setattr, tree, 1 << 40)
        return [*([bool(each & os.ST_RDONLY), bool(each & os.ST_NOEXEC)] for each in flags), wrong]

    assert [[True] * 2, [recursive] * 2, [False] * 2, [errno.EINVAL, None]] == result_of(set_on)


def test_a_new_mount_is_as_it_was_asked_for_or_leaves_nothing(trees: str) -> None:
    def made() -> list[Any]:
        own_mounts()
        before = opened()
        attributes = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV
        fd = mounts.new_mount("tmpfs", {"size": "1m", "ro": ""}, attributes)
        found: list[Any] = [opened() - before, os.get_inheritable(fd)]
        mounts.move_mount(fd, f"{trees}/copy")
        told = os.statvfs(f"{trees}/copy")
        wanted = os.ST_NOSUID | _NO_DEVICES | os.ST_RDONLY
        found += [told.f_blocks * told.f_frsize, told.f_flag & (wanted | os.ST_NOEXEC) == wanted]
        os.close(fd)
        for refused in (
            ("tmpfs", {"nonsense": "1"}, 0),
            ("nonsense", {}, 0),
            ("tmpfs", {}, 1 << 9),
        ):
            found.append(refusal(mounts.new_mount, *refused))
        return [*found, opened() - before]

    told = [
        [errno.EINVAL, "nonsense"],
        [errno.ENODEV, "nonsense"],
        [errno.EINVAL, "tmpfs"],
    ]
    assert [1, False, 1 << 20, True, *told, 0] == result_of(made)


def test_a_root_is_exchanged_for_a_mount_and_nothing_else(trees: str) -> None:
    def exchanged() -> list[Any]:
        own_mounts()
        two_deep(trees)
        found: list[Any] = [refusal(mounts.pivot_root, f"{trees}/copy", f"{trees}/copy")]
        os.chdir(f"{trees}/outer")
        mounts.pivot_root(".", ".")
        mounts.umount2(".", mounts.MNT_DETACH)
        return [*found, sorted(os.listdir("/"))]

    # It is of the same mount as the root; in a user's namespace that mount is locked besides.
    told = [errno.EBUSY if 0 == os.geteuid() else errno.EINVAL, f"{trees}/copy"]
    assert [told, ["inner", "shown"]] == result_of(exchanged)
