"""Messages to the kernel that are packed and read by hand, and calls that say what failed."""

from __future__ import annotations

import errno
import os
import struct

import pytest
from tests.unit.linux.child import result_of

from ringfence.linux import fuse, landlock, libc, namespaces, seccomp

pytestmark = pytest.mark.anyone

_EXT = 1 << 30  # FUSE_INIT_EXT, include/uapi/linux/fuse.h


def agreed(offered: int, more: int = 0, besides: int = 0) -> tuple[int, int]:
    """Flags of the answer to INIT, the lower and the upper 32."""
    said = struct.pack("=IIIII", 7, 38, 0, offered, more)
    head = fuse.HEADER.pack(fuse.HEADER.size + len(said), fuse.INIT, 9, 0, 0, 0, 0, 0)
    answer = fuse.agreed(head + said, besides)
    length, error, unique = fuse.ANSWER.unpack_from(answer)
    assert (len(answer), 0, 9) == (length, error, unique)
    major, minor, _ahead, flags, *_, most, _granularity, pages, _align, upper = (
        fuse.INIT_OUT.unpack(answer[fuse.ANSWER.size :])
    )
    assert (7, 31, fuse.MOST_BYTES, fuse.MOST_BYTES >> 12) == (major, minor, most, pages)
    return flags, upper


def test_of_a_file_system_s_features_those_are_agreed_that_both_have() -> None:
    own, _ = agreed(0xFFFFFFFF)
    assert own
    assert not own & (_EXT | fuse.DO_READDIRPLUS)
    for one in (own & -own, 0):
        assert (one, 0) == agreed(one)
    assert (own | fuse.DO_READDIRPLUS, 0) == agreed(0xFFFFFFFF, besides=fuse.DO_READDIRPLUS)
    upper = fuse.ALLOW_IDMAP >> 32
    assert (own | _EXT, upper) == agreed(0xFFFFFFFF, 0xFFFFFFFF, fuse.ALLOW_IDMAP)
    without = 0xFFFFFFFF & ~_EXT
    assert (own, 0) == agreed(without, 0xFFFFFFFF, fuse.ALLOW_IDMAP), "more than it can say"


@pytest.mark.parametrize("name", ["", "a", "seven-7", "eight--8", "\udcff\udcfe"])
def test_a_name_in_a_directory_is_padded_to_eight_bytes(name: str) -> None:
    made = fuse.dirent((name, 5, 4), 77)
    raw = os.fsencode(name)
    assert 0 == len(made) % 8
    assert (5, 77, len(raw), 4) == fuse.DIRENT.unpack_from(made)
    assert raw == made[fuse.DIRENT.size :].rstrip(b"\0")


def test_a_call_that_fails_says_which_and_about_what() -> None:
    (reading, writing), file = os.pipe(), os.open("/dev/null", os.O_RDONLY)
    try:
        os.write(writing, b"hello")
        with pytest.raises(OSError, match="tee") as told:
            libc.tee(reading, file, 5)
        assert errno.EBADF == told.value.errno
        with pytest.raises(OSError, match="kcmp") as told:
            libc.same_file(os.getpid(), file, os.getpid(), 1 << 20)
        assert (errno.EBADF, str(os.getpid())) == (told.value.errno, told.value.filename)
        with pytest.raises(OSError, match="munmap"):
            libc.munmap(1, 1)
        with pytest.raises(OSError, match="setns"):
            namespaces.setns(file, 0)
        with pytest.raises(OSError, match="sethostname"):
            namespaces.sethostname("x" * 65)
        with pytest.raises(OSError, match="prlimit64"):
            libc.prlimit64(0, 99, 0, 0)
        with pytest.raises(OSError, match="landlock_restrict_self"):
            landlock.restrict_self(file)
        with pytest.raises(OSError, match="seccomp"):
            seccomp.install_filter(b"")
        for call in (lambda: landlock.allow_beneath(file, "/", 1), lambda: libc.bytes_at(1, 1)):
            before = os.listdir("/proc/self/fd")
            with pytest.raises(OSError):
                call()
            assert before == os.listdir("/proc/self/fd")
    finally:
        for fd in (reading, writing, file):
            os.close(fd)


def test_an_attempt_tells_an_errno_alone() -> None:
    getpid = {"x86_64": 39, "aarch64": 172}[os.uname().machine]
    assert 0 == libc.attempt(getpid), "whatever it returned"
    assert errno.ENOSYS == libc.attempt(1 << 20)


def test_limits_of_a_process_are_both_set_and_every_signal_is_blocked() -> None:
    def done() -> list[object]:
        libc.prlimit64(0, 7, 500, 600)  # RLIMIT_NOFILE
        libc.block_every_signal()
        with open("/proc/self/limits", encoding="ascii") as file:
            limits = next(line for line in file if line.startswith("Max open files"))
        with open("/proc/self/status", encoding="ascii") as file:
            blocked = next(line for line in file if line.startswith("SigBlk:"))
        return [limits.split()[3:5], blocked.split()[1]]

    kill_and_stop = 1 << 8 | 1 << 18
    assert [["500", "600"], f"{(1 << 64) - 1 & ~kill_and_stop:016x}"] == result_of(done)
