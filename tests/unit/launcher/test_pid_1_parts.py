"""Parts of PID 1 by themselves: how programs begin, who is asked for, and what it does with paths."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.launcher import wire
from ringfence.launcher.pid1 import (
    file_locks,
    forked,
    init,
    netlink_sockets,
    notifications,
    processes,
    programs,
    terminals,
    watchdog,
)
from ringfence.linux import libc, namespaces, seccomp

pytestmark = pytest.mark.anyone
_EXIT = {"x86_64": 60, "aarch64": 93}  # of exit(2), which ends a thread


def fork() -> int:
    return namespaces.fork_with(0)


def begun(paths: list[Path], **more: Any) -> tuple[int, int]:
    """What a child ends with, and why it began nothing."""
    fds = os.listdir("/proc/self/fd")
    names = [str(path) for path in paths]
    pid, fd = forked.start(
        names, ["name", "4"], {"PATH": os.environ["PATH"]}, [], fork=fork, **more
    )
    _, status = os.waitpid(pid, 0)
    why = forked.failure(fd)
    assert fds == os.listdir("/proc/self/fd")
    return os.waitstatus_to_exitcode(status), why


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_first_that_can_be_begun_is_and_else_the_reason_is_told(tmp_path: Path) -> None:
    missing, good = tmp_path / "missing", script(tmp_path / "good", "#!/bin/sh\nexit 3\n")
    plain = script(tmp_path / "plain", "exit $1\n")
    closed = script(tmp_path / "closed", "#!/bin/sh\nexit 5\n", 0o644)
    lacking = script(tmp_path / "lacking", "#!/missing/interpreter\n")
    assert (3, 0) == begun([missing, closed, lacking, tmp_path, good])
    assert (4, 0) == begun([missing, plain, good])
    assert (127, errno.ENOENT) == begun([missing, good / "below"])
    assert (127, errno.EACCES) == begun([missing, closed])
    assert (127, errno.EACCES) == begun([tmp_path])
    assert (127, errno.ELIBACC) == begun([lacking, missing])
    assert (127, errno.EACCES) == begun([closed, lacking])


def test_a_program_that_has_not_begun_is_told_from_one_that_has(tmp_path: Path) -> None:
    good = script(tmp_path / "good", "#!/bin/sh\nread line\n")
    reading, writing = os.pipe()
    into, out = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, into, 0)]

    def wait() -> None:
        os.read(reading, 1)

    pid, fd = forked.start([str(good)], ["good"], {}, actions, wait, fork=fork)
    assert not forked.has_begun(fd)
    os.write(writing, b".")
    os.close(writing)
    os.write(out, b"\n")
    os.waitpid(pid, 0)
    assert forked.has_begun(fd)
    assert 0 == forked.failure(fd)
    for each in (reading, into, out):
        os.close(each)


def test_where_no_process_can_be_made_nothing_stays_open() -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "too many")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        forked.start(["/bin/true"], ["true"], {}, [], fork=refuse)
    assert before == os.listdir("/proc/self/fd")


@pytest.mark.parametrize("leads", [True, False])
def test_it_leads_a_session_or_follows_in_a_group(tmp_path: Path, leads: bool) -> None:
    good = script(tmp_path / "good", f"#!/bin/sh\ncut -d' ' -f5,6 /proc/$$/stat >{tmp_path}/said\n")
    pid, fd = forked.start(
        [str(good)], ["good"], {"PATH": os.environ["PATH"]}, [], leads=leads, fork=fork
    )
    os.waitpid(pid, 0)
    os.close(fd)
    group, session = map(int, (tmp_path / "said").read_text().split())
    assert (leads, leads) == (group == pid, session == pid)
    assert group != os.getpgrp()
    assert leads or session == os.getsid(0)


def test_it_has_each_file_once_and_no_signal_ignored_or_blocked(
    tmp_path: Path,
) -> None:
    """Python ignores two of them itself."""
    text = (
        "#!/bin/sh\nls -l /proc/$$/fd | grep -c /said; grep -E 'Sig(Ign|Blk)' /proc/self/status\n"
    )
    good, said = script(tmp_path / "good", text), tmp_path / "said"
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(said), os.O_WRONLY | os.O_CREAT, 0o600),
    ]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    pid, fd = forked.start([str(good)], ["good"], {"PATH": os.environ["PATH"]}, actions, fork=fork)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (pid, 0) == os.waitpid(pid, 0)
    assert 0 == forked.failure(fd)
    count, _, blocked, _, ignored = said.read_text().split()
    assert ("1", 0) == (count, int(blocked, 16))
    # The C library has 32 and 33 ignored in what its posix_spawn(3) starts: we may inherit that.
    assert 0 == int(ignored, 16) & ~(0b11 << 31)


def test_a_signal_to_a_group_stays_away_from_who_sends_it() -> None:
    """A program may have joined our group: then it gets the signal alone."""

    def send() -> Any:
        os.setsid()
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
        reading, writing = os.pipe()
        found = []
        for is_leader in (False, True):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
                if is_leader:
                    os.setpgid(0, 0)
                os.write(writing, b".")
                signal.pause()
                os._exit(0)
            os.read(reading, 1)
            processes.send_to_group(pid, signal.SIGUSR1)
            found.append(os.waitpid(pid, 0)[1])
        return [found, got]

    assert [[signal.SIGUSR1] * 2, []] == result_of(send)


def test_a_process_whose_first_thread_has_ended_is_there_until_all_have() -> None:
    """By its state it looks ended, and it still runs."""
    reading, writing = os.pipe()

    def stay() -> None:
        os.write(writing, b".")
        signal.pause()

    pid = fork()
    if pid == 0:
        threading.Thread(target=stay).start()
        ctypes.CDLL(None).syscall(_EXIT[libc.MACHINE], 0)
        os._exit(1)
    try:
        os.read(reading, 1)
        while processes.state(pid) != "Z":
            os.sched_yield()
        looked = processes.is_zombie(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        then = processes.is_zombie(pid)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
    assert (False, True, True) == (looked, then, processes.is_zombie(pid))


def test_names_are_looked_for_where_the_path_says() -> None:
    assert ["a/b"] == programs.candidates("a/b", {"PATH": "/x"})
    assert ["/x/b", "./b", "/y/b"] == programs.candidates("b", {"PATH": "/x::/y"})
    assert ["/bin/b", "/usr/bin/b"] == programs.candidates("b", {})


def test_directories_are_made_with_those_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "way").symlink_to("a")
    programs.make_dirs(f"{tmp_path}//a/b")
    programs.make_dirs("a/b/c/")
    programs.make_dirs("way/d")
    assert ["b", "d"] == sorted(os.listdir("a"))
    assert (tmp_path / "a" / "b" / "c").is_dir()
    with pytest.raises(NotADirectoryError) as refused:
        programs.make_dirs("file/below")
    assert "file" == refused.value.filename
    with pytest.raises(FileExistsError):
        programs.make_dirs("a/../file")
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(FileExistsError):
        programs.make_dirs("nowhere")


def test_a_place_that_the_root_does_not_lead_to_is_left_again(tmp_path: Path) -> None:
    def enter() -> list[Any]:
        gone = tmp_path / "gone"
        gone.mkdir()
        fd = os.open(gone, os.O_PATH)
        gone.rmdir()
        try:
            programs.enter(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            return [os.getcwd()]
        return []

    assert ["/"] == result_of(enter)


@pytest.fixture
def one() -> init.Init:
    """PID 1 without its loop."""
    made = init.Init.__new__(init.Init)
    made.execs, made.by_pid, made.is_full, made.connect_key = {}, {}, False, 0
    return made


@pytest.fixture
def process() -> Iterator[int]:
    pid = fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_paths_are_described_made_moved_and_removed(one: init.Init, tmp_path: Path) -> None:
    one._do_mkdir(f"{tmp_path}/a", False)
    with pytest.raises(FileNotFoundError):
        one._do_mkdir(f"{tmp_path}/b/c", False)
    one._do_mkdir(f"{tmp_path}/b/c", True)
    (tmp_path / "file").write_text("12345")
    os.utime(tmp_path / "file", ns=(7, 1_234_567_890))
    (tmp_path / "link").symlink_to("b")
    mode, size, mtime, target = one._do_stat(f"{tmp_path}/file").split(b" ")
    assert (b"5", b"1234567890", b"") == (size, mtime, target)
    assert stat.S_ISREG(int(mode))
    mode, _, _, target = one._do_stat(f"{tmp_path}/link").split(b" ")
    assert (True, b"b") == (stat.S_ISLNK(int(mode)), target)
    one._do_move(f"{tmp_path}/file", f"{tmp_path}/a/moved")
    for name in ("link", "a/moved", "a", "b/c"):
        one._do_remove(f"{tmp_path}/{name}")
    assert ["b"] == os.listdir(tmp_path)
    (tmp_path / "b" / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        one._do_remove(f"{tmp_path}/b")


def exec_of(pid: int) -> Any:
    return SimpleNamespace(pid=pid, report=None, failure_fd=-1, number=1)


def test_only_an_exec_that_runs_has_a_pid_and_gets_signals(one: init.Init, process: int) -> None:
    one.execs[1] = exec_of(process)
    assert b"%d" % process == one._do_pid(1)
    assert b"1" == one._do_begun(1) == one._do_begun(2)
    one._do_signal(1, signal.SIGTERM)
    assert signal.SIGTERM == os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) * -1
    report: Any = object()
    one.execs[1].report = report
    for number in (1, 2):
        with pytest.raises(ProcessLookupError):
            one._do_pid(number)
        with pytest.raises(ProcessLookupError):
            one._do_signal(number, signal.SIGTERM)


def test_memory_is_waited_for_until_it_is_there_or_too_late(one: init.Init, tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("5000\n")
    for most, until in ((5000, time.monotonic() + 60), (4999, time.monotonic() + 0.01)):
        one.is_full = False
        fd = os.open(tmp_path / "usage", os.O_RDONLY)
        one._await_memory(fd, most, until)
        assert one.is_full
        assert (most < 5000) == (time.monotonic() >= until)
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)


def test_who_has_too_many_locks_is_ended_with_its_exec_or_alone(
    one: init.Init, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[Any, int]] = []
    monkeypatch.setattr(one, "_kill", lambda run, why: killed.append((run, why)), raising=False)
    monkeypatch.setattr(processes, "tag_of", lambda pid: processes.TAG_BASE - 1 if pid == 7 else 0)
    one.execs[1] = exec_of(7)
    one._kill_owner(7)
    assert [(one.execs[1], wire.KILLED_BY_MEMORY_WATCHDOG)] == killed
    one._kill_owner(os.getpid())
    one._kill_owner(process)
    assert -signal.SIGKILL == os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert 1 == len(killed)


_LOCKS = """1: POSIX  ADVISORY  WRITE 11 00:2f:45 0 EOF
2: POSIX  ADVISORY  WRITE 12 00:2f:45 0 EOF
2: -> POSIX  ADVISORY  WRITE 13 00:2f:45 0 EOF
3: FLOCK  ADVISORY  WRITE 14 00:2f:46 0 EOF
4: OFDLCK ADVISORY  WRITE -1 00:2f:47 0 EOF
5: POSIX  ADVISORY  READ  0 00:2f:48 0 EOF
6: POSIX  ADVISORY  READ 15 00:2f:49 0 EOF
7: POSIX  ADVISORY  WRITE 16 00:2f:50 0 EO"""


def test_only_owners_of_whole_lines_beyond_the_bound_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locks").write_text(_LOCKS)
    here = {name: getattr(os, name) for name in ("pread", "close", "O_RDONLY", "O_CLOEXEC")}
    monkeypatch.setattr(processes, "inner", lambda number: 0 if number == 15 else number + 100)
    asked: list[str] = []

    def opened(path: str, flags: int) -> int:
        asked.append(path)
        return os.open(tmp_path / "locks", flags)

    monkeypatch.setattr(file_locks, "os", SimpleNamespace(open=opened, **here))
    before = os.listdir("/proc/self/fd")
    assert {112} == file_locks.owners_beyond(0)
    assert set() == file_locks.owners_beyond(_LOCKS.index("2: POSIX"))
    assert ["/proc/locks"] * 2 == asked
    assert before == os.listdir("/proc/self/fd")


def test_a_refused_connection_leaves_no_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        fd = init.dial(4, port)
        with socket.socket(fileno=os.dup(fd)), server.accept()[0]:
            assert not os.get_blocking(fd)
        os.close(fd)
    before = os.listdir("/proc/self/fd")
    try:
        os.close(init.dial(4, port))
    except ConnectionRefusedError:
        pass  # as soon as that; or later, on the socket
    assert before == os.listdir("/proc/self/fd")


def test_the_time_and_threads_of_a_process_are_counted(process: int) -> None:
    began = processes.cpu_ticks(os.getpid())
    end = time.process_time() + 3 / os.sysconf("SC_CLK_TCK")
    while time.process_time() < end:
        pass
    assert 2 <= processes.cpu_ticks(os.getpid()) - began <= 200
    assert 1 == processes.threads(process)
    assert len(os.listdir("/proc/self/task")) == processes.threads(os.getpid())
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert (0, 0, True, True) == (
        processes.threads(process),
        processes.cpu_ticks(process),
        processes.is_zombie(process),
        processes.is_exiting(process),
    )
    assert not processes.is_exiting(os.getpid())
    assert b"" == processes.read("/proc/self/task")


def test_memory_files_count_for_whoever_has_them_and_once() -> None:
    plan: Any = {"memory_watchdog_bytes": 1, "id_helpers": False}
    watch = watchdog.Watchdog(plan, {}, lambda *_: None)
    own = os.getpid()
    before = watch._memory_files([own]).get(own, 0)
    fd = os.memfd_create("more")
    again = os.dup(fd)
    try:
        os.write(fd, bytes(1 << 20))
        assert before + (1 << 20) == watch._memory_files([own, own])[own]
    finally:
        os.close(fd)
        os.close(again)


_SHARED, _ALL = 60, 100  # of what a process has resident


@pytest.mark.parametrize(
    ("more", "apart"),
    [
        ({"disk": None}, "/"),
        ({"disk": {"fd": 0}, "shared_memory_bytes": 1}, "/dev/shm"),
        ({"disk": {"fd": 0}, "shared_memory_bytes": 0}, ""),
    ],
)
def test_all_that_a_sandbox_takes_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], apart: str
) -> None:
    """Pages of memory files that are mapped are those of a process already; a disk takes no memory."""
    sizes = {"/": 7, "/dev/shm": 5, "": 0}
    monkeypatch.setattr(processes, "pids", lambda: [1])
    monkeypatch.setattr(processes, "ipc_bytes", lambda: 3)
    monkeypatch.setattr(processes, "file_bytes", sizes.__getitem__)
    monkeypatch.setattr(
        processes, "resident_bytes", lambda _pid, *, shared=False: _SHARED if shared else _ALL
    )
    monkeypatch.setattr(processes, "look_closer", dict)
    total = _ALL + 3 + sizes[apart] + 20
    for most, is_over in ((total, False), (total - 1, True)):
        killed: list[str] = []
        plan: Any = {"memory_watchdog_bytes": most, "id_helpers": False, **more}
        execs: Any = {1: "exec"}
        watch = watchdog.Watchdog(plan, execs, lambda run, _why: killed.append(run))  # type: ignore[arg-type]  # noqa: B023
        monkeypatch.setattr(watch, "_memory_files", lambda _pids: {1: _SHARED + 20})
        watch.look()
        assert ["exec"] * is_over == killed
        watch.look()
        assert ["exec"] * is_over == killed, "it is not yet time to look again"


def test_who_guards_all_ends_a_sandbox_with_too_many_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan: Any = {"memory_watchdog_bytes": 1 << 40, "id_helpers": False, "disk": {"fd": 0}}
    plan["shared_memory_bytes"] = 0
    watch = watchdog.Watchdog(plan, {}, lambda *_: None)
    watch._guards_all = True
    told: list[bool] = []
    monkeypatch.setattr(watch, "_guard_all", told.append)
    for are_too_many in (True, False):
        monkeypatch.setattr(watch, "_are_too_many", lambda _pids, said=are_too_many: said)
        watch._next_look = 0.0
        watch.look()
    assert [True, False] == told


def test_locks_are_looked_for_once_memory_has_grown_while_something_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had before nothing ran says nothing of what runs now."""
    grown = 1000 + file_locks._GROWTH_KIB
    kernel_kib = iter((1000, grown, grown))
    monkeypatch.setattr(file_locks.FileLocks, "_unreclaimable_kib", lambda _locks: next(kernel_kib))
    monkeypatch.setattr(file_locks, "owners_beyond", lambda _size: {7})
    locks = file_locks.FileLocks()

    def look() -> set[int]:
        assert locks.wait_s(is_busy=True) is not None
        locks._due = 1.0  # long ago
        return locks.look()

    assert [set(), {7}] == [look(), look()]
    assert locks.wait_s(is_busy=False) is None
    assert set() == locks.look()
    assert set() == look()


def test_who_has_the_limit_of_its_programs_opens_nothing_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever opens a file while the limit is reached is killed for it."""
    locks, control = file_locks.FileLocks(keeps_open=True), file_locks.FileLocks()
    known = locks._unreclaimable_kib()
    assert known > 0

    def refuse(*_what: object) -> int:
        raise OSError(errno.ENOMEM, "nothing is left")

    monkeypatch.setattr("posix.open", refuse)
    assert abs(known - locks._unreclaimable_kib()) < 1 << 20
    assert 0 == control._unreclaimable_kib()
    monkeypatch.undo()
    os.close(locks._meminfo)


def test_the_exec_that_has_most_is_ended_with_its_memory_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    execs: Any = {number: number for number in (1, 2)}
    plan: Any = {"memory_watchdog_bytes": 1, "id_helpers": False}
    watch = watchdog.Watchdog(plan, execs, lambda run, _why: killed.append(run))  # type: ignore[arg-type]
    monkeypatch.setattr(processes, "tag_of", lambda pid: processes.TAG_BASE - pid)
    one, two = (processes.TAG_BASE - number for number in (1, 2))
    watch._kill_largest({one: 100, two: 90}, {})
    watch._kill_largest({one: 100, two: 90}, {2: 11})
    watch._kill_largest({one: 5, 7: 90}, {})
    assert [1, 2, 1, 2] == killed


def test_who_guards_all_ends_the_sandbox_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    limits = [(resource.RLIMIT_NPROC, 9, most) for most in (2, 1)]
    plan: Any = {"memory_watchdog_bytes": 1, "id_helpers": True, "rlimits": limits}
    watch = watchdog.Watchdog(plan, {}, lambda *_: None)
    assert not watch._are_too_many([process])
    plan["rlimits"] = limits[:1]
    assert not watch._are_too_many([process] * 2)
    assert watch._are_too_many([process] * 3)

    ended: list[int] = []
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=ended.append))
    for is_over in [True] * 10 + [False] + [True] * 10:
        watch._guard_all(is_over)
    assert [] == ended
    watch._guard_all(True)
    assert [1] == ended


@pytest.mark.parametrize("connects", [True, False])
def test_a_copy_is_asked_about_netlink_and_gets_no_socket_by_which_it_would_connect(
    connects: bool,
) -> None:
    code = notifications.asking_in_copy(connects=connects)
    verdicts = [struct.unpack_from("=HBBI", code, at)[3] for at in range(0, len(code), 8)]
    assert 1 == verdicts.count(seccomp.RET_USER_NOTIF)
    refused = [seccomp.RET_ERRNO | number for number in (errno.EAFNOSUPPORT, errno.EPERM)]
    assert [int(connects)] * 2 == [verdicts.count(each) for each in refused]


def test_netlink_sockets_are_more_than_there_may_be_where_nobody_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "protocols").write_text("protocol size sockets\nUNIX 1 5\nNETLINK  1104     3  1\n")

    def opened(path: str, mode: str) -> Any:
        assert "/proc/net/protocols" == path
        return open(tmp_path / "protocols", mode)

    monkeypatch.setattr(netlink_sockets, "open", opened, raising=False)
    assert 3 == netlink_sockets.count()
    (tmp_path / "protocols").write_text("protocol size sockets\nUNIX 1 5\n")
    assert netlink_sockets.count() > 1 << 30


def test_a_terminal_has_its_size_and_becomes_the_controlling_one() -> None:
    def take() -> list[Any]:
        master, name = terminals.new_terminal("/dev/ptmx", 5, 7)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which tells that the master is gone
        slave = os.open(name, os.O_RDWR | os.O_NOCTTY)
        try:
            os.close(os.open("/dev/tty", os.O_RDWR))
            before = True
        except OSError:
            before = False
        terminals.take(slave)
        os.close(os.open("/dev/tty", os.O_RDWR))
        rows = os.get_terminal_size(slave)
        os.close(master)
        return [before, rows.lines, rows.columns]

    assert [False, 5, 7] == result_of(take)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"."):
        terminals.new_terminal("/dev/null", 5, 7)
    assert before == os.listdir("/proc/self/fd")


def test_a_terminal_for_a_host_that_has_gone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    new_terminal = terminals.new_terminal
    monkeypatch.setattr(
        terminals, "new_terminal", lambda _inside, *size: new_terminal("/dev/ptmx", *size)
    )
    ours, theirs = wire.socketpair()
    before = os.listdir("/proc/self/fd")
    _name, slave = terminals.open_for_host(theirs, 5, 7)
    os.close(slave)
    _word, fds = wire.receive_raw(ours)
    for fd in fds:
        os.close(fd)
    ours.close()
    with pytest.raises(BrokenPipeError):
        terminals.open_for_host(theirs, 5, 7)
    assert len(before) - 1 == len(os.listdir("/proc/self/fd"))
    theirs.close()
