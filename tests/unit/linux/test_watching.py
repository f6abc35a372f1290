"""Descriptors that tell of something: changes of files, timers, signals, and sockets of others."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
from tests.unit.linux.child import result_of
from tests.waiting import readable

from ringfence.linux import files, inotify, malloc, signals, timers, unix_diag

pytestmark = pytest.mark.anyone


def test_changes_are_told_by_the_watch_they_are_of_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = inotify.inotify_init1()
    try:
        with pytest.raises(BlockingIOError):
            os.read(fd, 4096)
        assert not os.get_inheritable(fd)
        mask = inotify.IN_CREATE | inotify.IN_MOVED_FROM | inotify.IN_MOVED_TO | inotify.IN_DELETE
        of_directory = inotify.inotify_add_watch(fd, os.fsencode(tmp_path), mask)
        kinds = inotify.IN_MODIFY | inotify.IN_ATTRIB | inotify.IN_DELETE_SELF
        of_file = inotify.inotify_add_watch(fd, os.fsencode(tmp_path / "file"), kinds)
        (tmp_path / "a name that is longer").mkdir()
        (tmp_path / "file").write_bytes(b"x")
        (tmp_path / "file").chmod(0o600)
        (tmp_path / "file").rename(tmp_path / "f")
        (tmp_path / "f").unlink()

        found = list(inotify.events(os.read(fd, 4096)))
    finally:
        os.close(fd)
    cookies = {cookie for _, _, cookie, _ in found} - {0}
    assert 1 == len(cookies)
    assert [
        (of_directory, inotify.IN_CREATE | inotify.IN_ISDIR, b"a name that is longer"),
        (of_file, inotify.IN_MODIFY, b""),
        (of_file, inotify.IN_ATTRIB, b""),
        (of_directory, inotify.IN_MOVED_FROM, b"file"),
        (of_directory, inotify.IN_MOVED_TO, b"f"),
        (of_file, inotify.IN_ATTRIB, b""),
        (of_file, inotify.IN_DELETE_SELF, b""),
        (of_file, inotify.IN_IGNORED, b""),
        (of_directory, inotify.IN_DELETE, b"f"),
    ] == [(watch, mask, name) for watch, mask, _, name in found]


def test_what_cannot_be_watched_is_told(tmp_path: Path) -> None:
    fd = inotify.inotify_init1()
    try:
        with pytest.raises(FileNotFoundError):
            inotify.inotify_add_watch(fd, os.fsencode(tmp_path / "missing"), inotify.IN_OPEN)
    finally:
        os.close(fd)


def test_a_timer_is_readable_once_its_time_has_come() -> None:
    fd = timers.timerfd()
    try:
        assert not os.get_inheritable(fd)
        details = Path(f"/proc/self/fdinfo/{fd}").read_text()
        assert "clockid: 1\n" in details  # CLOCK_MONOTONIC: a clock that is set changes nothing
        timers.settime(fd, 1000.5)
        assert [] == readable([fd], 0)
        details = Path(f"/proc/self/fdinfo/{fd}").read_text()
        assert "it_value: (1000, " in details or "it_value: (999, " in details
        assert "it_interval: (0, 0)" in details
        for after_s in (0.0, -5.0, 0.001):  # in place of what was set before
            timers.settime(fd, after_s)
            assert 1 == int.from_bytes(os.read(fd, 8), "little")
    finally:
        os.close(fd)


def test_signals_are_read_and_do_not_end_anybody() -> None:
    def taken() -> list[object]:
        fd = signals.signalfd([signal.SIGUSR1, signal.SIGTERM, 64])
        found: list[object] = [os.get_blocking(fd), os.get_inheritable(fd)]
        for signum in (signal.SIGTERM, 64):
            os.kill(os.getpid(), signum)
            found.append(int.from_bytes(os.read(fd, 128)[:4], "little"))
        try:
            os.read(fd, 128)
        except BlockingIOError:
            found.append("none")
        return [*found, signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])]

    assert [False, False, signal.SIGTERM, 64, "none", False] == result_of(taken)


def test_unix_sockets_are_told_with_their_peers_and_what_waits_for_them(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    parted, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    with one, other, parted, listener, clients[0], clients[1]:
        gone.close()
        one.sendall(b"hello")
        for client in clients:
            client.connect(str(tmp_path / "socket"))

        found = unix_diag.sockets()

        inode = {each: os.fstat(each.fileno()).st_ino for each in (one, other, parted, listener)}
        assert (socket.SOCK_STREAM, inode[other], 0) == _told(found[inode[one]])
        assert (socket.SOCK_STREAM, inode[one]) == _told(found[inode[other]])[:2]
        assert found[inode[other]].waiting >= 5
        assert (socket.SOCK_SEQPACKET, 0, 0) == _told(found[inode[parted]])
        assert (socket.SOCK_STREAM, 0, 2) == _told(found[inode[listener]])


def _told(each: unix_diag.UnixSocket) -> tuple[int, int, int]:
    return each.kind, each.peer, each.waiting


def test_a_path_is_opened_by_the_rules_that_are_given(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").touch()
    (tmp_path / "inside" / "link").symlink_to("file")
    (tmp_path / "inside" / "out").symlink_to(tmp_path / "outside")
    directory = os.open(tmp_path / "inside", os.O_PATH)
    try:
        old = os.umask(0)
        fd = files.openat2(
            directory, "file", os.O_CREAT | os.O_WRONLY, resolve=files.RESOLVE_BENEATH, mode=0o604
        )
        os.umask(old)
        assert not os.get_inheritable(fd)
        assert 0o604 == stat.S_IMODE(os.fstat(fd).st_mode)
        os.close(fd)
        os.close(files.openat2(directory, "link", os.O_RDONLY, resolve=files.RESOLVE_BENEATH))
        for path, resolve, code in (
            ("../outside", files.RESOLVE_BENEATH, errno.EXDEV),
            ("out", files.RESOLVE_BENEATH, errno.EXDEV),
            ("link", files.RESOLVE_NO_SYMLINKS, errno.ELOOP),
            ("../outside", files.RESOLVE_IN_ROOT, errno.ENOENT),
        ):
            with pytest.raises(OSError, match="openat2") as told:
                files.openat2(directory, path, os.O_RDONLY, resolve=resolve)
            assert code == told.value.errno
        with pytest.raises(OSError, match="openat2"):
            files.openat2(
                *(directory, f"/proc/self/fd/{directory}", os.O_PATH),
                resolve=files.RESOLVE_NO_MAGICLINKS,
            )
    finally:
        os.close(directory)


def test_the_mode_of_a_file_is_set_and_that_behind_a_link_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    (tmp_path / "link").symlink_to("file")
    directory = os.open(tmp_path, os.O_PATH)
    before = os.listdir("/proc/self/fd")
    try:
        files.chmod_nofollow(directory, "file", 0o640)
        assert 0o640 == stat.S_IMODE((tmp_path / "file").stat().st_mode)
        with pytest.raises(OSError):
            files.chmod_nofollow(directory, "link", 0o666)
        assert 0o640 == stat.S_IMODE((tmp_path / "file").stat().st_mode)
        assert before == os.listdir("/proc/self/fd")
    finally:
        os.close(directory)


def test_descriptors_are_closed_from_one_on_and_those_below_stay() -> None:
    def closed() -> list[bool]:
        fds = [os.dup2(1, number) for number in (149, 150, 151, 200)]
        files.close_from(150)
        return [os.path.exists(f"/proc/self/fd/{fd}") for fd in fds]

    assert [True, False, False, False] == result_of(closed)


def test_memory_of_the_c_library_is_set_and_given_back() -> None:
    def done() -> list[bool]:
        return [malloc.mallopt(malloc.M_ARENA_MAX, 2), malloc.malloc_trim()]

    if "glibc" in os.confstr("CS_GNU_LIBC_VERSION"):  # type: ignore[operator]
        assert [True, True] == result_of(done)
