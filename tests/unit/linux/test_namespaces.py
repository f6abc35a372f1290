"""Children in namespaces of their own, and the maps of their ids."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.linux import libc, namespaces, privileges

_NS_GET_OWNER_UID = 0xB704  # include/uapi/linux/nsfs.h


@contextmanager
def child(flags: int, owner: int = 0) -> Iterator[tuple[int, int]]:
    """One that waits for its end: its pid and a pidfd."""
    reading, writing = os.pipe()
    pid, pidfd = namespaces.clone3(flags, owner=owner)
    if pid == 0:
        os.read(reading, 1)  # and nothing is closed: it may share our descriptors
        os._exit(3)
    try:
        yield pid, pidfd
    finally:
        os.write(writing, b"!")
        os.close(reading)
        os.close(writing)
        assert 3 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)


def namespace(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def test_a_child_is_told_by_its_pid_and_a_descriptor_of_it() -> None:
    with child(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWUTS) as (pid, pidfd):
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
            assert f"Pid:\t{pid}\n" in file.read()
        assert not os.get_inheritable(pidfd)
        assert namespace("self", "user") != namespace(pid, "user")
        assert namespace("self", "uts") != namespace(pid, "uts")
        assert namespace("self", "ipc") == namespace(pid, "ipc")


def test_a_child_that_cannot_be_is_told_and_the_next_one_can() -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="clone3") as told:
            namespaces.clone3(0x00000200 | namespaces.CLONE_NEWNS)  # CLONE_FS excludes it
        assert errno.EINVAL == told.value.errno
    with child(0):
        pass


def test_ids_are_mapped_and_read_back() -> None:
    uid, gid = os.geteuid(), os.getegid()
    with child(namespaces.CLONE_NEWUSER) as (pid, _):
        assert [] == namespaces.read_id_map(pid, "uid_map")
        namespaces.write_id_maps(pid, f"7 {uid} 1\n", f"8 {gid} 1\n", deny_setgroups=True)

        assert [(7, uid, 1)] == namespaces.read_id_map(pid, "uid_map")
        assert [(8, gid, 1)] == namespaces.read_id_map(pid, "gid_map")
        with open(f"/proc/{pid}/setgroups", encoding="ascii") as file:
            assert "deny" == file.read().strip()
        with pytest.raises(PermissionError):
            namespaces.write_id_maps(pid, f"0 {uid} 1\n", f"0 {gid} 1\n", deny_setgroups=False)


@pytest.mark.root
def test_of_root_several_extents_are_mapped_and_groups_stay() -> None:
    with child(namespaces.CLONE_NEWUSER) as (pid, _):
        namespaces.write_id_maps(pid, "0 5000 2\n9 0 1\n", "0 6000 3\n", deny_setgroups=False)

        assert [(0, 5000, 2), (9, 0, 1)] == namespaces.read_id_map(pid, "uid_map")
        assert [(0, 6000, 3)] == namespaces.read_id_map(pid, "gid_map")
        with open(f"/proc/{pid}/setgroups", encoding="ascii") as file:
            assert "allow" == file.read().strip()


@pytest.mark.root
def test_another_owns_a_user_namespace_and_root_is_itself_again() -> None:
    """Also where no child could be made."""

    def owners() -> list[object]:
        found: list[object] = []
        with child(namespaces.CLONE_NEWUSER, owner=4321) as (pid, _):
            fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
            owner = bytearray(4)
            fcntl.ioctl(fd, _NS_GET_OWNER_UID, owner)
            found += [int.from_bytes(owner, "little"), *os.getresuid(), privileges.prctl(27)]
        try:
            namespaces.clone3(0x00000200 | namespaces.CLONE_NEWNS, owner=4321)
        except OSError as exc:
            found += [exc.errno, *os.getresuid(), privileges.prctl(27)]  # PR_GET_SECUREBITS
        return found

    assert [4321, 0, 0, 0, 0, errno.EINVAL, 0, 0, 0, 0] == result_of(owners)


def test_the_owner_of_a_namespace_is_found() -> None:
    with child(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWUTS) as (pid, _):
        fd = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY)
        owner = namespaces.owner_of(fd)
        os.close(fd)
        there = os.stat(f"/proc/{pid}/ns/user")
        assert there.st_ino == os.fstat(owner).st_ino
        os.close(owner)


def test_a_sibling_is_its_maker_s_parent_s_child() -> None:
    def made() -> bool:
        reading, writing = os.pipe()
        if (child := namespaces.fork_with(0)) == 0:
            sibling = namespaces.clone_sibling()
            if sibling == 0:
                os._exit(5)
            os.write(writing, b"%d" % sibling)
            os._exit(0)
        os.waitpid(child, 0)
        sibling = int(os.read(reading, 99))
        return 5 == os.waitstatus_to_exitcode(os.waitpid(sibling, 0)[1])

    assert result_of(made)


def test_namespaces_are_left_and_joined() -> None:
    def joined() -> list[bool]:
        alone(namespaces.CLONE_NEWUTS)
        namespaces.sethostname("inner")
        inner, there = namespace("self", "uts"), os.open("/proc/self/ns/uts", os.O_RDONLY)
        namespaces.unshare(namespaces.CLONE_NEWUTS)
        namespaces.sethostname("other")
        outer = namespace("self", "uts")
        namespaces.setns(there, namespaces.CLONE_NEWUTS)
        return [inner != outer, inner == namespace("self", "uts"), "inner" == os.uname().nodename]

    assert [True] * 3 == result_of(joined)
    with pytest.raises(OSError, match="setns"):
        namespaces.setns(-1, namespaces.CLONE_NEWUTS)
    with pytest.raises(OSError, match="unshare"):
        namespaces.unshare(1 << 6)


def test_processes_that_share_are_told_from_those_that_do_not() -> None:
    with child(0) as (pid, _), open("/dev/null", encoding="ascii") as file:
        ours = os.getpid()
        twin = os.dup(file.fileno())
        other = os.open("/dev/null", os.O_RDONLY)
        assert libc.same_file(ours, file.fileno(), ours, twin)
        assert not libc.same_file(ours, file.fileno(), ours, other)
        assert not libc.share_memory_or_files(ours, pid)
        assert libc.share_memory_or_files(ours, ours)
        os.close(twin)
        os.close(other)
    with child(0x200) as (pid, _):  # CLONE_FS: their working directory alone
        assert libc.share_memory_or_files(os.getpid(), pid)
