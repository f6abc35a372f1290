"""Helpers that go into namespaces of others: which mounts they bring, and as whom they are there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.backends.local.mounts.template import READ_ONLY, tree
from ringfence.launcher import enter, newroot, wire
from ringfence.launcher.jail import jailer
from ringfence.linux import mounts, namespaces, privileges

_SOMEBODY = 23456  # an ordinary user, as whom this is tried where we are root


@pytest.fixture
def place(require: Callable[[str], None]) -> Iterator[Path]:
    """Two directories that any user may read."""
    require("user namespaces")
    with tempfile.TemporaryDirectory(prefix="rf-enter-") as name:
        for path in (Path(name), Path(name, "one"), Path(name, "two"), Path(name, "two/below")):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        for path in (Path(name, "one/first"), Path(name, "two/second")):
            path.touch()
        yield Path(name)


def resolved(path: Path, attributes: int = READ_ONLY) -> Any:
    """A mount as a host process has resolved it."""
    info = path.stat()
    return {
        **tree(str(path), attributes), "device": info.st_dev, "inode": info.st_ino, "fd": 0,
    }  # fmt: skip


def be_ordinary() -> None:
    """As an ordinary user's zygote is: without rights, and dumpable."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
        os.setresuid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
        privileges.set_dumpable(True)


def has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def refused(work: Callable[[], object]) -> list[Any]:
    try:
        work()
    except OSError as exc:
        return [exc.errno, exc.strerror]
    return []


class TestTreesOfOwnNamespace:
    def test_an_ordinary_user_gets_copies_as_planned_and_in_order(self, place: Path) -> None:
        def copy() -> Any:
            be_ordinary()
            before = len(os.listdir("/proc/self/fd"))
            wanted = [resolved(place / "two"), resolved(place / "one", mounts.MOUNT_ATTR_NOEXEC)]
            fds = enter.trees_of_own_namespace([*wanted, tree("/usr", READ_ONLY)])
            after = len(os.listdir("/proc/self/fd"))
            flags = [os.fstatvfs(fd).f_flag for fd in fds]
            return [
                [sorted(os.listdir(f"/proc/self/fd/{fd}")) for fd in fds[:2]],
                "bin" in os.listdir(f"/proc/self/fd/{fds[2]}"),
                [bool(each & os.ST_RDONLY) for each in flags],
                [bool(each & os.ST_NOSUID) for each in flags],
                bool(flags[1] & os.ST_NOEXEC),
                after - before - len(fds),
                has_children(),
            ]

        names, is_usr, read_only, without_set_id, is_not_executable, kept, left = result_of(copy)
        assert [["below", "second"], ["first"]] == names
        assert is_usr
        assert [True, False, True] == read_only == without_set_id
        assert is_not_executable
        assert 1 >= kept, "the end of a socket, until this process ends"
        assert not left

    def test_one_that_cannot_be_copied_is_told_with_its_step(self, place: Path) -> None:
        """One that was replaced, since it was resolved, is not shown in place of the other."""

        def copy() -> Any:
            be_ordinary()
            one = resolved(place / "one")
            said = [refused(lambda: enter.trees_of_own_namespace([one, tree("/none", READ_ONLY)]))]
            changed: Any = {**resolved(place / "two"), "inode": one["inode"]}
            said.append(refused(lambda: enter.trees_of_own_namespace([one, changed])))
            return [said, has_children()]

        (missing, replaced), left = result_of(copy)
        assert errno.ENOENT == missing[0]
        assert missing[1].startswith("open /none: ")
        assert errno.ESTALE == replaced[0]
        assert replaced[1].startswith(f"open {place}/two: ")
        assert not left

    def test_whose_ids_cannot_be_mapped_leaves_nobody_waiting(self, place: Path) -> None:
        def copy() -> Any:
            be_ordinary()
            privileges.set_dumpable(False)  # as it is for who may not map its child's ids
            said = refused(lambda: enter.trees_of_own_namespace([resolved(place / "one")]))
            _pid, status = os.wait()
            return [said[0], os.waitstatus_to_exitcode(status), has_children()]

        number, status, left = result_of(copy)
        assert number in (errno.EACCES, errno.EPERM)
        assert (1, False) == (status, left)


@pytest.mark.root
@pytest.mark.parametrize("make", [enter.host_tree, jailer._open_tree])
def test_who_is_root_copies_what_is_open_with_ids_mapped(
    place: Path, make: Callable[[Any, int], int]
) -> None:
    """With what is mounted below, unless ids are mapped: the kernel maps those of one mount."""

    def copy() -> Any:
        alone(namespaces.CLONE_NEWNS)
        mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
        mounts.mount("below", str(place / "two/below"), "tmpfs")
        (place / "two/below/mounted").touch()
        source = os.open(place / "two", os.O_PATH | os.O_DIRECTORY)
        before = len(os.listdir("/proc/self/fd"))
        plain = make(resolved(place / "two"), source)
        ids = {"idmap": "0 1000 1", "idmap_gid": "0 1001 1"}
        mapped = make(resolved(place / "two") | ids, source)
        below = [os.listdir(f"/proc/self/fd/{fd}/below") for fd in (plain, mapped)]
        infos = [os.stat("second", dir_fd=fd) for fd in (plain, mapped)]
        owners = [[info.st_uid, info.st_gid] for info in infos]
        read_only = [bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY) for fd in (plain, mapped)]
        return [below, owners, read_only, len(os.listdir("/proc/self/fd")) - before]

    below, owners, read_only, opened = result_of(copy)
    assert [["mounted"], []] == below
    assert [[0, 0], [1000, 1001]] == owners
    assert [True, True] == read_only
    assert opened in (2, 3), "the copies, and at most the namespace of the ids"


def test_who_joins_is_that_user_there_without_the_callers_groups(place: Path) -> None:
    def go() -> Any:
        ready, told = os.pipe()
        release, done = os.pipe()
        if os.geteuid() == 0:
            os.setgroups([4242])
        pid = namespaces.fork_with(0)
        if pid == 0:
            os.close(done)
            namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS)
            os.write(told, b"u")
            os.read(release, 1)
            os._exit(0)
        os.read(ready, 1)
        maps = f"7 {os.geteuid()} 1", f"8 {os.getegid()} 1"
        is_root = os.geteuid() == 0
        namespaces.write_id_maps(pid, *maps, deny_setgroups=not is_root)
        fds = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt")]
        enter.join(fds[0], fds[1], 7, 8)
        there = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("user", "mnt")]
        wanted = [os.fstat(fd).st_ino for fd in fds]
        found = [there == wanted, os.getresuid(), os.getresgid(), is_root and os.getgroups()]
        os.close(done)
        return found

    is_there, uids, gids, groups = result_of(go)
    assert is_there
    assert ([7] * 3, [8] * 3) == (uids, gids)
    assert groups in (False, [])


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (OSError(errno.ENOSPC, "is full"), b"E28 odd: [Errno 28] is full"),
        (newroot.BuildError("bind /x", OSError(errno.ENOENT, "gone")), b"E2 bind /x: [Errno 2] gone"),
        (ValueError("odd"), b"E71 odd: [Errno 71] ValueError('odd')"),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, said: bytes
) -> None:
    def fail(*_args: Any) -> None:
        raise problem

    monkeypatch.setitem(enter._OPERATIONS, "odd", fail)
    reply, answer = wire.socketpair()
    enter.serve({"op": "odd"}, reply, [])
    assert (said, []) == wire.receive_raw(answer)
    enter.serve({"op": "absent"}, reply, [])
    assert wire.receive_raw(answer)[0].startswith(b"E71 absent: ")
    reply.close()
    answer.close()
