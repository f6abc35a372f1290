"""System calls that carry a key, made by this process for itself: what is left when they are over."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
import stat
import struct
from pathlib import Path

import pytest
from tests.unit.linux.child import result_of

from ringfence.linux import libc, mappings, on_behalf

pytestmark = pytest.mark.anyone

REMOVED = 0o1000  # SHM_DEST of the mode in /proc/sysvipc/shm: gone with the last who is attached


def modes() -> dict[int, int]:
    """The segments of shared memory, by id: proc(5), /proc/sysvipc/shm."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {int(line.split()[1]): int(line.split()[2], 8) for line in lines}


def test_a_segment_goes_with_the_last_who_is_attached() -> None:
    id, address = on_behalf.segment(4096, 0)
    try:
        assert modes()[id] & REMOVED
        assert stat.S_IMODE(modes()[id]) & 0o777 == 0o600
    finally:
        on_behalf.detach(address)
    assert id not in modes()


@pytest.mark.parametrize("size", [0, 1 << 62])
def test_a_segment_that_cannot_be_leaves_nothing(size: int) -> None:
    before = modes()
    with pytest.raises(OSError, match=r"Invalid|Cannot allocate|No space"):
        on_behalf.segment(size, 0)
    assert before == modes()


def test_a_segment_that_cannot_be_attached_is_removed() -> None:
    size = (64 << 20) + 4096 * (os.getpid() % 1000)

    def made() -> list[int]:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        try:
            on_behalf.segment(size, 0)
        except OSError as exc:
            return [exc.errno or 0]
        return []

    assert [errno.ENOMEM] == result_of(made)
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    assert str(size) not in [line.split()[3] for line in lines]


def test_the_mode_of_what_is_only_looked_at_is_changed(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    fd = os.open(tmp_path / "file", os.O_PATH)
    try:
        assert 0 == on_behalf.change_mode(fd, 0o640, 0)
        assert 0o640 == stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    assert errno.ENOENT == on_behalf.change_mode(fd, 0o640, 0)


def test_owner_and_times_of_what_is_only_looked_at_are_changed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = (tmp_path / "file").stat()
    fd = os.open(tmp_path / "file", os.O_PATH)
    try:
        assert 0 == on_behalf.change_owner(fd, -1, -1, 0)
        assert 0 == on_behalf.change_owner(fd, os.getuid(), -1, 0)
        assert 0 == on_behalf.change_times(fd, struct.pack("4q", 5, 6, 7, 8), 0)
        after = (tmp_path / "file").stat()
        assert (before.st_uid, before.st_gid) == (after.st_uid, after.st_gid)
        assert (5_000_000_006, 7_000_000_008) == (after.st_atime_ns, after.st_mtime_ns)
        assert 0 == on_behalf.change_times(fd, None, 0)
        assert (tmp_path / "file").stat().st_mtime_ns > before.st_mtime_ns - 1_000_000_000
    finally:
        os.close(fd)
    assert errno.ENOENT == on_behalf.change_owner(fd, -1, -1, 0)
    assert errno.ENOENT == on_behalf.change_times(fd, None, 0)


def test_memory_is_read_as_a_whole_or_not_at_all() -> None:
    size = mmap.PAGESIZE
    start = mappings.map_at(0x30_0000_0000, size, b"/a/path\0behind")
    try:
        assert b"/a/path" == on_behalf.path(os.getpid(), start)
        assert b"path" == on_behalf.memory(os.getpid(), start + 3, 4)
        assert bytes(2) == on_behalf.memory(os.getpid(), start + size - 2, 2)
        assert b"" == on_behalf.path(os.getpid(), start + size - 1)
        for address, length in ((start + size - 2, 3), (start + size, 1), (0, 1), (1 << 64, 1)):
            with pytest.raises(OSError, match="Bad address"):
                on_behalf.memory(os.getpid(), address, length)
        with pytest.raises(OSError, match="Bad address"):
            on_behalf.path(os.getpid(), start + size)
    finally:
        libc.munmap(start, size)


def test_a_path_has_its_end_among_the_first_bytes_or_is_too_long() -> None:
    start = 0x30_0000_0000
    for length, is_read in ((4095, True), (4096, False)):
        mappings.map_at(start, 2 * mmap.PAGESIZE, b"x" * length + b"\0")
        try:
            if is_read:
                assert b"x" * length == on_behalf.path(os.getpid(), start)
            else:
                with pytest.raises(OSError, match="too long"):
                    on_behalf.path(os.getpid(), start)
        finally:
            libc.munmap(start, 2 * mmap.PAGESIZE)


def test_memory_that_ends_within_a_path_is_no_path() -> None:
    start = mappings.map_at(0x30_0000_0000, mmap.PAGESIZE, b"x" * mmap.PAGESIZE)
    try:
        with pytest.raises(OSError, match="Bad address"):
            on_behalf.path(os.getpid(), start + 1)
    finally:
        libc.munmap(start, mmap.PAGESIZE)


def test_a_descriptor_of_another_is_one_of_ours() -> None:
    reading, writing = os.pipe()
    before = os.listdir("/proc/self/fd")
    try:
        ours = on_behalf.descriptor(os.getpid(), writing, 0)
        assert writing != ours
        assert not os.get_inheritable(ours)
        os.write(ours, b"x")
        assert b"x" == os.read(reading, 1)
        os.close(ours)
        with pytest.raises(OSError, match="Bad file descriptor"):
            on_behalf.descriptor(os.getpid(), 999_999, 0)
        with pytest.raises(ProcessLookupError):
            on_behalf.descriptor(0x7FFFFFF0, 0, 0)
        assert before == os.listdir("/proc/self/fd")
    finally:
        os.close(reading)
        os.close(writing)


def test_sockets_are_made_bound_and_connected(tmp_path: Path) -> None:
    def at(name: str) -> bytes:
        return struct.pack("=H", socket.AF_UNIX) + os.fsencode(tmp_path / name) + b"\0"

    made = [on_behalf.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0) for _ in range(2)]
    listener, client = (socket.socket(fileno=fd) for fd in made)
    with listener, client:
        assert errno.ENOENT == on_behalf.connect(client.fileno(), at("socket"), 0)
        assert 0 == on_behalf.bind(listener.fileno(), at("socket"), 0)
        assert errno.EINVAL == on_behalf.bind(listener.fileno(), at("other"), 0)
        assert errno.ECONNREFUSED == on_behalf.connect(client.fileno(), at("socket"), 0)
        listener.listen()
        assert 0 == on_behalf.connect(client.fileno(), at("socket"), 0)
    with pytest.raises(OSError, match="socket"):
        on_behalf.socket(socket.AF_UNIX, 99, 0)
