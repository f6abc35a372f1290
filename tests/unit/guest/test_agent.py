"""Each request of an agent, its refusals, and that none keeps a descriptor or a process."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.guest.serving import (
    GUEST_UID,
    PATIENCE_S,
    ServingAgent,
    answer_of,
    open_place,
    report_of,
)
from tests.waiting import readable

from ringfence.guest.tags import Tags
from ringfence.launcher import wire

IS_ROOT = os.geteuid() == 0
MISSING = "/no/such/place"


@pytest.fixture(scope="module", params=[False, True], ids=["machine code", "plain"])
def shared(request: pytest.FixtureRequest) -> Iterator[ServingAgent]:
    agent = ServingAgent(is_plain=request.param)
    yield agent
    agent.close()


@pytest.fixture
def agent(shared: ServingAgent) -> Iterator[ServingAgent]:
    """The agent of this module; after each test it has as many descriptors as before."""
    before = shared.descriptors()
    yield shared
    assert before == shared.descriptors(), "descriptors were kept"


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as path:
        yield path


def refused(ask: Callable[[], object]) -> int | None:
    """Return the errno of a refusal."""
    with pytest.raises(OSError) as caught:
        ask()
    return caught.value.errno


def drained(fd: int) -> bytes:
    """Read a pipe to its end, and close it."""
    with open(fd, "rb") as file:
        return file.read()


def shell(agent: ServingAgent, script: str, **how: object) -> tuple[wire.ExecReport, bytes]:
    """Run a shell script with its output in a pipe."""
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    report = agent.run("sh", "-c", script, fds=[null, write, os.dup(2)], **how)
    return report, drained(read)


class TestExecs:
    def test_one_runs_as_the_guest_in_its_directory_with_its_streams(
        self, agent: ServingAgent, place: Path
    ) -> None:
        report, output = shell(agent, "id -u; pwd; echo $X; exit 3", cwd=str(place), env={"X": "7"})

        assert [str(GUEST_UID), str(place), "7"] == output.decode().split()
        assert (3, 0, 0, 0) == (
            os.waitstatus_to_exitcode(report.wait_status),
            report.spawn_errno,
            report.timed_out,
            report.killed_by,
        )
        assert report.duration_ns > 0
        assert report.peak_memory_bytes > 1 << 16
        assert {wire.UNKNOWN} == {report.user_ns, report.system_ns, report.io_read_bytes}
        assert wire.UNKNOWN == report.io_write_bytes

    def test_with_two_streams_standard_input_is_empty(self, agent: ServingAgent) -> None:
        read, write = os.pipe()

        report = agent.run("sh", "-c", "cat; echo read", fds=[write, os.dup(2)])

        assert (b"read\n", 0) == (drained(read), report.wait_status)

    @pytest.mark.parametrize(
        ("argv", "cwd", "stage", "number"),
        [
            (["true"], MISSING, wire.STAGE_CWD, errno.ENOENT),
            (["true"], "/dev/null", wire.STAGE_CWD, errno.ENOTDIR),
            ([MISSING], "/", wire.STAGE_COMMAND, errno.ENOENT),
            (["/tmp"], "/", wire.STAGE_COMMAND, errno.EACCES),
        ],
    )
    @pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
    def test_one_that_cannot_be_says_how_far_it_came_and_keeps_no_stream(
        self,
        agent: ServingAgent,
        argv: list[str],
        cwd: str,
        stage: int,
        number: int,
        is_alone: bool,
    ) -> None:
        other = None if is_alone else agent.start("sleep", "600")
        read, write = os.pipe()

        report = agent.run(*argv, cwd=cwd, fds=[os.dup(0), write, os.dup(2)])

        assert (number, stage) == (report.spawn_errno, report.failed_stage)
        assert drained(read) == b""
        if other is not None:
            agent.ask("kill", other[0])
            report_of(other[1])

    @pytest.mark.root
    def test_where_one_began_says_nothing_of_where_the_next_begins(
        self, agent: ServingAgent, place: Path
    ) -> None:
        other, end = agent.start("sleep", "600", cwd=str(place))
        shell(agent, "true", cwd=str(place))

        assert os.readlink(f"/proc/{agent.process.pid}/cwd") == "/"
        agent.ask("kill", other)
        report_of(end)

    @pytest.mark.parametrize("leads", [True, False])
    @pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
    def test_one_leads_a_session_or_joins_a_group_of_the_agents(
        self, agent: ServingAgent, leads: bool, is_alone: bool
    ) -> None:
        other = None if is_alone else agent.start("sleep", "600")

        report, output = shell(agent, "cut -d ' ' -f 1,5,6 /proc/$$/stat", leads=leads)

        pid, group, session = map(int, output.split())
        ours = os.getsid(agent.process.pid)
        assert (pid == group, pid == session, ours == session) == (leads, leads, not leads)
        assert group != os.getpgid(agent.process.pid)
        assert report.wait_status == 0
        if other is not None:
            agent.ask("kill", other[0])
            report_of(other[1])
        agent.ask("end_all")
        assert children_of(agent) == [], "the leader of the group is gone"

    @pytest.mark.parametrize("leads", [True, False])
    def test_a_start_leaves_no_other_child_than_the_exec(
        self, agent: ServingAgent, leads: bool
    ) -> None:
        for _ in range(2):
            number, end = agent.start("sleep", "600", leads=leads)
            assert [int(agent.ask("pid", number))] == children_of(agent)
            agent.ask("kill", number)
            report_of(end)

    @pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
    def test_a_program_has_the_guests_ids_and_nothing_of_the_agents(
        self, agent: ServingAgent, is_alone: bool
    ) -> None:
        other = None if is_alone else agent.start("sleep", "600")

        script = "grep -E '^(Uid|Gid|SigBlk|SigIgn)' /proc/self/status; ls /proc/self/fd"
        _report, output = shell(agent, script)

        lines = [line.split() for line in output.decode().splitlines()]
        assert ["Uid:", *[str(GUEST_UID)] * 4] == lines[0]
        gid = GUEST_UID if IS_ROOT else os.getegid()
        assert ["Gid:", *[str(gid)] * 4] == lines[1]
        own_of_libc = 3 << 31  # signals 32 and 33
        assert {0} == {int(line[1], 16) & ~own_of_libc for line in lines[2:4]}
        assert ["0", "1", "2", "3"] == [line[0] for line in lines[4:]]
        if IS_ROOT:
            status = Path(f"/proc/{agent.process.pid}/status").read_text()
            assert "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n" in status
        if other is not None:
            agent.ask("kill", other[0])
            report_of(other[1])

    def test_orphans_are_the_agents(self, agent: ServingAgent) -> None:
        number, reply = agent.start("sh", "-c", "sleep 600 & exit 0")
        report_of(reply)
        [orphan] = processes_of(agent, number)

        stat_line = Path(f"/proc/{orphan}/stat").read_text()
        agent.ask("kill", number)

        assert agent.process.pid == int(stat_line.rpartition(")")[2].split()[1])
        assert children_of(agent) == [], "the kill has collected it"

    def test_one_that_ends_while_the_agent_is_stopped_was_in_time(
        self, agent: ServingAgent
    ) -> None:
        """Its deadline passes before the agent has seen the end."""
        stdin, write = os.pipe()
        began = time.monotonic()
        number, reply = agent.start(
            "cat", fds=[stdin, os.open("/dev/null", os.O_WRONLY), os.dup(2)], timeout_s=0.3
        )
        pid = int(agent.ask("pid", number))
        os.kill(agent.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED)
        is_early = time.monotonic() - began < 0.3
        os.close(write)
        while not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z"):
            pass
        time.sleep(max(0.0, began + 0.35 - time.monotonic()))
        os.kill(agent.process.pid, signal.SIGCONT)

        report = report_of(reply)
        assert not is_early or (0, 0) == (report.timed_out, report.killed_by)

    def test_the_deadline_of_one_kills_its_tree_and_no_other(self, agent: ServingAgent) -> None:
        other, end_of_other = agent.start("sleep", "600")

        report, output = shell(
            agent, "(trap '' TERM; sleep 600) & echo begun; wait", timeout_s=0.05
        )

        assert (1, wire.KILLED_BY_TIMEOUT) == (report.timed_out, report.killed_by)
        assert output in (b"begun\n", b""), "it could not end while a process had the pipe"
        assert int(agent.ask("pid", other))
        agent.ask("kill", other)
        ended = report_of(end_of_other)
        assert (0, wire.KILLED_BY_REQUEST) == (ended.timed_out, ended.killed_by)

    def test_one_that_ends_before_its_deadline_is_not_timed_out(self, agent: ServingAgent) -> None:
        report = agent.run("true", timeout_s=PATIENCE_S)

        assert (0, 0, 0) == (report.timed_out, report.killed_by, report.wait_status)

    def test_a_kill_ends_what_an_ended_exec_has_left(self, agent: ServingAgent) -> None:
        number, reply = agent.start("sh", "-c", "sleep 600 & exit 0")
        assert report_of(reply).wait_status == 0
        assert has_processes_of(agent, number)

        agent.ask("kill", number)

        assert not has_processes_of(agent, number)

    def test_end_all_ends_those_of_running_and_of_ended_execs(self, agent: ServingAgent) -> None:
        over, reply = agent.start("sh", "-c", "sleep 600 & exit 0")
        report_of(reply)
        running, end = agent.start("sleep", "600")

        while int(agent.ask("end_all")):
            pass

        assert signal.SIGKILL == report_of(end).wait_status
        assert not has_processes_of(agent, over)
        assert not has_processes_of(agent, running)

    def test_signals_reach_the_first_process_or_its_group_until_it_has_ended(
        self, agent: ServingAgent
    ) -> None:
        for is_group in (False, True):
            read, write = os.pipe()
            number, reply = agent.start(
                "sh",
                "-c",
                "trap 'kill $!; exit 5' USR1; sleep 600 & echo; wait",
                fds=[os.open("/dev/null", os.O_RDWR), write, os.dup(2)],
            )
            assert os.read(read, 1) == b"\n"
            agent.ask("signal", number, int(signal.SIGUSR1), is_group)

            status = report_of(reply).wait_status
            os.close(read)
            assert 5 == os.waitstatus_to_exitcode(status)
            for ask in ("signal", number, int(signal.SIGUSR1), is_group), ("pid", number):
                assert errno.ESRCH == refused(lambda ask=ask: agent.ask(*ask))  # type: ignore[misc]

    def test_a_group_is_signalled_with_its_children(self, agent: ServingAgent) -> None:
        number, reply = agent.start("sh", "-c", "sleep 600; exit 0")
        while len(processes_of(agent, number)) < 2:
            pass

        agent.ask("signal", number, int(signal.SIGKILL), True)

        assert signal.SIGKILL == report_of(reply).wait_status
        while has_processes_of(agent, number):
            pass

    def test_the_number_of_a_pid_request_is_its_process(self, agent: ServingAgent) -> None:
        number, reply = agent.start("sleep", "600")

        pid = int(agent.ask("pid", number))

        assert [pid] == processes_of(agent, number)
        agent.ask("kill", number)
        report_of(reply)

    def test_resizing_what_has_no_terminal_is_no_error(self, agent: ServingAgent) -> None:
        number, reply = agent.start("sleep", "600")

        for each in (number, 1):
            assert agent.ask("resize", each, 20, 30) == b""

        agent.ask("kill", number)
        report_of(reply)

    @pytest.mark.root
    def test_programs_are_killed_for_memory_before_the_agent(self, agent: ServingAgent) -> None:
        own = int(Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text())

        _report, output = shell(agent, "cat /proc/self/oom_score_adj")

        assert min(1000, own + 500) == int(output)
        assert own == int(Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text())


def processes_of(agent: ServingAgent, number: int) -> list[int]:
    """List the processes of an exec; the agent itself carries the tag of the last one."""
    return [pid for pid in Tags(0).members(number) if pid != agent.process.pid]


def children_of(agent: ServingAgent) -> list[int]:
    """List the agent's children, the ended ones too."""
    number = agent.process.pid
    return [
        int(each) for each in Path(f"/proc/{number}/task/{number}/children").read_text().split()
    ]


def has_processes_of(agent: ServingAgent, number: int) -> bool:
    return bool(processes_of(agent, number))


class TestTerminals:
    def open(self, agent: ServingAgent, script: str) -> tuple[int, wire.Socket, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        agent.number += 1
        arguments = (["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, "/", 0.0, (21, 43))
        reply = agent.ask_later(
            "exec", agent.number, *arguments, True, GUEST_UID, fds=[theirs.detach()]
        )
        return agent.number, reply, ours

    def test_one_has_the_size_asked_for_and_controls_its_session(self, agent: ServingAgent) -> None:
        _number, reply, ours = self.open(agent, "stty size; tty -s && : </dev/tty && echo has one")
        with ours:
            output = b""
            while data := ours.recv(1 << 16):
                output += data

        assert ["21 43", "has one"] == output.decode().split("\r\n")[:2]
        assert report_of(reply).wait_status == 0

    def test_a_new_size_reaches_the_program(self, agent: ServingAgent) -> None:
        number, reply, ours = self.open(agent, "trap 'stty size; exit' WINCH; echo on; read x")
        with ours:
            assert ours.recv(100).startswith(b"on")
            agent.ask("resize", number, 50, 99)
            output = b""
            while data := ours.recv(1 << 16):
                output += data

        assert b"50 99" in output
        report_of(reply)

    @pytest.mark.parametrize("argv", [[MISSING]])
    def test_one_that_cannot_be_closes_its_socket(
        self, agent: ServingAgent, argv: list[str]
    ) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        agent.number += 1
        arguments: Any = (argv, {}, "/", 0.0, (21, 43), True, GUEST_UID)

        reply = agent.ask_later("exec", agent.number, *arguments, fds=[theirs.detach()])

        assert errno.ENOENT == report_of(reply).spawn_errno
        with ours:
            assert ours.recv(1) == b""


class TestFiles:
    def write(self, agent: ServingAgent, path: str, data: bytes, flags: int, mode: int) -> None:
        read, write = os.pipe()
        with closing(agent.ask_later("write", path, flags, mode, fds=[read])) as reply:
            with open(write, "wb") as file:
                answer_of(reply)
                file.write(data)
            answer_of(reply)

    def read(self, agent: ServingAgent, path: str) -> bytes:
        read, write = os.pipe()
        with closing(agent.ask_later("read", path, fds=[write])) as reply:
            try:
                answer_of(reply)
            except OSError:
                assert drained(read) == b""
                raise
            data = drained(read)
            answer_of(reply)
        return data

    def test_files_are_written_and_read_whole_as_the_guest(
        self, agent: ServingAgent, place: Path
    ) -> None:
        path, data = place / "file", os.urandom(3 << 20)

        self.write(agent, str(path), data, os.O_WRONLY | os.O_CREAT, 0o640)

        info = path.stat()
        assert (GUEST_UID, 0o640) == (info.st_uid, stat.S_IMODE(info.st_mode))
        assert not IS_ROOT or GUEST_UID == info.st_gid
        assert data == self.read(agent, str(path))

    def test_a_host_that_is_slow_with_one_file_keeps_no_other_request_waiting(
        self, agent: ServingAgent, place: Path
    ) -> None:
        (place / "file").write_bytes(bytes(3 << 20))
        out, write = os.pipe()
        read, into = os.pipe()
        path, flags = str(place / "new"), os.O_WRONLY | os.O_CREAT
        reading = agent.ask_later("read", str(place / "file"), fds=[write])
        writing = agent.ask_later("write", path, flags, 0o600, fds=[read])
        with closing(reading), closing(writing):
            answer_of(reading)
            answer_of(writing)
            os.write(into, b"begun")
            for _ in range(3):
                agent.ask("stat", "/")

            assert len(drained(out)) == 3 << 20
            answer_of(reading)
            os.close(into)
            answer_of(writing)
        assert (place / "new").read_bytes() == b"begun"

    def test_a_write_uses_the_flags_it_is_given(self, agent: ServingAgent, place: Path) -> None:
        path = place / "file"
        path.write_bytes(b"old")
        path.chmod(0o666)

        self.write(agent, str(path), b"new", os.O_WRONLY | os.O_APPEND, 0)

        assert path.read_bytes() == b"oldnew"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        assert errno.EEXIST == refused(lambda: self.write(agent, str(path), b"", flags, 0))

    def test_what_is_no_regular_file_is_refused_without_waiting(
        self, agent: ServingAgent, place: Path
    ) -> None:
        os.mkfifo(place / "fifo", 0o666)
        (place / "fifo").chmod(0o666)
        (place / "link").symlink_to("/proc/self/status")
        cases = {"/": errno.EISDIR, "/dev/null": errno.EINVAL, MISSING: errno.ENOENT}
        cases |= {str(place / "fifo"): errno.EINVAL, str(place / "link"): errno.EACCES}

        assert cases == {
            path: refused(lambda path=path: self.read(agent, path))  # type: ignore[misc]
            for path in cases
        }
        assert b"Name:" in self.read(agent, "/proc/1/status"), "by its own name, it may be read"

    @pytest.mark.root
    def test_what_the_guests_user_may_not_is_refused(
        self, agent: ServingAgent, place: Path
    ) -> None:
        """Control: the agent itself, as root, could do each of them."""
        private = place / "private"
        private.mkdir(0o700)
        (private / "file").write_text("secret")
        (place / "file").write_text("secret")
        (place / "file").chmod(0o600)
        read_only = place / "read-only"
        read_only.mkdir(0o755)
        (read_only / "file").write_text("")
        moved = str(place / "moved")
        attempts: dict[str, Callable[[], object]] = {
            "read": lambda: self.read(agent, str(place / "file")),
            "write": lambda: self.write(agent, str(read_only / "file"), b"", os.O_WRONLY, 0),
            "create": lambda: self.write(
                agent, str(read_only / "new"), b"", os.O_WRONLY | os.O_CREAT, 0o600
            ),
            "stat": lambda: agent.ask("stat", str(private / "file")),
            "list": lambda: self.listed(agent, str(private)),
            "mkdir": lambda: agent.ask("mkdir", str(read_only / "dir"), False),
            "mkdir -p": lambda: agent.ask("mkdir", str(read_only / "a/b"), True),
            "remove": lambda: agent.ask("remove", str(read_only / "file")),
            "move": lambda: agent.ask("move", str(read_only / "file"), moved),
        }

        assert dict.fromkeys(attempts, errno.EACCES) == {
            name: refused(attempt) for name, attempt in attempts.items()
        }

    @pytest.mark.root
    def test_rights_are_those_of_the_guests_user(self, agent: ServingAgent, place: Path) -> None:
        for name, mode in (("none", 0o600), ("read", 0o644), ("both", 0o666), ("write", 0o622)):
            (place / name).write_text("")
            (place / name).chmod(mode)
        (place / "dir").mkdir(0o755)
        names = ["none", "read", "both", "write", "dir", ".", "missing"]

        answer = agent.ask("rights", [str(place / name) for name in names])

        assert b"00 10 11 01 10 11 00".replace(b" ", b"") == answer
        assert not [each for each in place.iterdir() if each.name.startswith(".ringfence")]

    def listed(self, agent: ServingAgent, path: str) -> list[bytes]:
        body = os.memfd_create("body")
        agent.ask("list", path, fds=[os.dup(body)])
        return drained_from_start(body).split(b"\0")[:-1]

    def test_directories_are_made_listed_and_removed(
        self, agent: ServingAgent, place: Path
    ) -> None:
        one = str(place / "one")
        agent.ask("mkdir", one, False)
        agent.ask("mkdir", f"{one}/two/three", True)
        agent.ask("mkdir", f"{one}/two/three", True)
        (place / "one/link").symlink_to("two")
        agent.ask("move", f"{one}/two/three", f"{one}/three")

        names = self.listed(agent, one)

        assert [b"link", b"three", b"two"] == sorted(names[::2])
        assert names[1 + 2 * names[::2].index(b"link")].endswith(b" two")
        assert errno.EEXIST == refused(lambda: agent.ask("mkdir", one, False))
        assert errno.ENOENT == refused(lambda: agent.ask("mkdir", f"{one}/a/b", False))
        assert errno.ENOTEMPTY == refused(lambda: agent.ask("remove", one))
        for each in ("link", "two", "three"):
            agent.ask("remove", f"{one}/{each}")
        assert [] == os.listdir(one)

    def test_a_name_that_cannot_be_looked_at_is_not_left_out(
        self, agent: ServingAgent, place: Path
    ) -> None:
        """A directory may be listed and not entered."""
        closed = place / "closed"
        closed.mkdir()
        (closed / "file").touch()
        closed.chmod(0o444)

        assert errno.EACCES == refused(lambda: self.listed(agent, str(closed)))

        closed.chmod(0o755)
        assert [b"file"] == self.listed(agent, str(closed))[::2]

    @pytest.mark.root
    def test_the_child_of_a_tree_operation_is_the_guests_with_two_descriptors(
        self, agent: ServingAgent, place: Path
    ) -> None:
        (place / "file").write_bytes(bytes(3 << 20))
        read, write = os.pipe()
        with closing(agent.ask_later("tree", "out", [str(place), "ours"], fds=[write])) as reply:
            readable([read], PATIENCE_S)  # it has begun, and nobody reads
            [child] = children_of(agent)
            status = Path(f"/proc/{child}/status").read_text()
            links = [os.readlink(each) for each in Path(f"/proc/{child}/fd").iterdir()]
            drained(read)
            answer_of(reply)

        ids = "\t".join([str(GUEST_UID)] * 4)
        assert f"Uid:\t{ids}\nGid:\t{ids}\n" in status
        kinds = sorted(link.partition(":")[0] for link in links)
        assert kinds.count("socket") == 1
        assert kinds.count("pipe") == 1
        assert kinds.count("/dev/null") >= 3
        assert "anon_inode" not in kinds

    def test_a_description_has_mode_size_time_and_target(
        self, agent: ServingAgent, place: Path
    ) -> None:
        (place / "file").write_bytes(b"12345")
        (place / "link").symlink_to("to a file")
        for name, target in (("file", ""), ("link", "to a file")):
            info = (place / name).lstat()
            expected = f"{info.st_mode} {info.st_size} {info.st_mtime_ns} {target}"

            assert expected.encode() == agent.ask("stat", str(place / name))

    def test_a_tree_operation_runs_as_the_guest_with_nothing_of_the_agents(
        self, agent: ServingAgent, place: Path
    ) -> None:
        (place / "a").mkdir()
        (place / "a/file").write_text("x")
        read, write = os.pipe()

        with closing(agent.ask_later("tree", "out", [str(place), "ours"], fds=[write])) as reply:
            tar = drained(read)
            assert answer_of(reply) == b""

        assert b"a/file" in tar
        assert errno.ENOENT == refused(lambda: agent.ask("tree", "remove", [f"{place}/none"]))
        assert errno.EPROTO == refused(lambda: agent.ask("tree", "no such operation", []))

    @pytest.mark.root
    def test_a_tree_operation_is_refused_what_the_guests_user_may_not(
        self, agent: ServingAgent, place: Path
    ) -> None:
        (place / "private").mkdir(0o700)
        (place / "private/inner").mkdir()
        path = str(place / "private/inner")

        assert errno.EACCES == refused(lambda: agent.ask("tree", "remove", [path]))

        os.chmod(place / "private", 0o777)
        agent.ask("tree", "remove", [path])


def drained_from_start(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


class TestConnections:
    def dial(self, agent: ServingAgent, port: int, version: int = 4) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        try:
            agent.ask("dial", version, port, fds=[theirs.detach()])
        except OSError:
            ours.close()
            raise
        return ours

    def test_bytes_go_both_ways_and_each_end_is_told(self, agent: ServingAgent) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            self.dial(agent, server.getsockname()[1]) as ours,
        ):
            there, _ = server.accept()
            with there:
                there.settimeout(PATIENCE_S)
                ours.sendall(b"question")
                ours.shutdown(socket.SHUT_WR)
                question = b""
                while data := there.recv(100):
                    question += data
                there.sendall(b"answer")
            answer = b""
            while data := ours.recv(100):
                answer += data

        assert (b"question", b"answer") == (question, answer)

    def test_where_nothing_listens_the_refusal_is_the_kernels(self, agent: ServingAgent) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

        assert errno.ECONNREFUSED == refused(lambda: self.dial(agent, port))

    @pytest.mark.parametrize("is_open", [True, False])
    def test_it_is_not_saved_while_a_connection_is_open(
        self, is_open: bool, agent: ServingAgent
    ) -> None:
        if not is_open:
            agent.ask("settle")
            return
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            self.dial(agent, server.getsockname()[1]) as ours,
        ):
            there, _ = server.accept()
            with there:
                there.settimeout(PATIENCE_S)
                assert errno.EBUSY == refused(lambda: agent.ask("settle"))
                ours.shutdown(socket.SHUT_WR)
                assert there.recv(1) == b""
            assert ours.recv(1) == b"", "the agent has closed both"


class TestSaving:
    def start(self, agent: ServingAgent, script: str) -> tuple[int, wire.Socket, list[int]]:
        agent.number += 1
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        arguments = (["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, "/", 0.0, None, True)
        fds = [stdin, stdout, os.open("/dev/null", os.O_WRONLY)]
        reply = agent.ask_later("exec", agent.number, *arguments, GUEST_UID, True, fds=fds)
        return agent.number, reply, [our_stdin, our_stdout]

    def test_a_relayed_exec_goes_on_with_other_streams(self, agent: ServingAgent) -> None:
        script = "while read x; do echo got $x; done"
        number, reply, (stdin, stdout) = self.start(agent, script)
        os.write(stdin, b"one\n")
        assert os.read(stdout, 100) == b"got one\n"
        assert errno.EBUSY == refused(lambda: agent.ask("settle")), "without its number"
        assert errno.ESRCH == refused(lambda: self.join(agent, number)), "before it is saved"

        agent.ask("settle", number)

        assert wire.receive_raw(reply) == (b"", []), "its end is told to who joins"
        reply.close()
        os.close(stdin)
        assert drained(stdout) == b"", "the agent holds nothing of the host's"
        end, stdin, stdout = self.join(agent, number)
        assert errno.ESRCH == refused(lambda: self.join(agent, number)), "only once"
        os.write(stdin, b"two\n")
        os.close(stdin)
        assert drained(stdout) == b"got two\n"
        assert report_of(end).wait_status == 0

    def test_a_program_may_open_its_relayed_streams_again(self, agent: ServingAgent) -> None:
        """Pipes belong to whoever made them: these to the guest's user."""
        _number, reply, (stdin, stdout) = self.start(agent, "cat /dev/stdin > /dev/stdout")
        os.write(stdin, b"through\n")
        os.close(stdin)

        assert drained(stdout) == b"through\n"
        assert report_of(reply).wait_status == 0

    def join(self, agent: ServingAgent, number: int) -> tuple[wire.Socket, int, int]:
        ours, theirs = wire.socketpair()
        ours.settimeout(PATIENCE_S)
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        fds = [theirs.detach(), stdin, stdout, os.open("/dev/null", os.O_WRONLY)]
        try:
            agent.ask("join", number, (0, 1, 2), fds=fds)
        except OSError:
            ours.close()
            os.close(our_stdin)
            os.close(our_stdout)
            raise
        return ours, our_stdin, our_stdout

    def test_what_an_ended_exec_has_left_is_closed_by_saving(self, agent: ServingAgent) -> None:
        number, reply, (stdin, stdout) = self.start(agent, "sleep 600 & exit 0")
        assert report_of(reply).wait_status == 0

        agent.ask("settle")

        assert drained(stdout) == b""
        os.close(stdin)
        agent.ask("kill", number)

    def test_one_whose_output_nobody_reads_ends_all_the_same(self, agent: ServingAgent) -> None:
        _number, reply, (stdin, stdout) = self.start(agent, "read x; echo y; echo z")
        os.close(stdout)
        os.write(stdin, b"go\n")
        os.close(stdin)

        assert report_of(reply).killed_by == wire.KILLED_BY_NOBODY

    def test_joining_an_unknown_exec_is_refused(self, agent: ServingAgent) -> None:
        assert errno.ESRCH == refused(lambda: self.join(agent, 1))

    def test_input_that_the_program_does_not_read_keeps_it_from_being_saved(
        self, agent: ServingAgent
    ) -> None:
        number, reply, (stdin, stdout) = self.start(agent, "echo on; exec sleep 600")
        assert os.read(stdout, 10) == b"on\n"
        os.set_blocking(stdin, False)
        written = 0
        poll = select.poll()
        poll.register(stdin, select.POLLOUT)
        while poll.poll(200):  # until both pipes and what lies between are full
            try:
                written += os.write(stdin, bytes(1 << 16))
            except BlockingIOError:
                continue

        with pytest.raises(OSError, match="input that it does not read") as caught:
            agent.ask("settle", number)

        assert errno.EBUSY == caught.value.errno
        assert written > 1 << 16
        agent.ask("kill", number)
        report_of(reply)
        os.close(stdin)
        os.close(stdout)


class TestFacts:
    def test_bounds_and_usage_are_numbers_of_the_agents_own_root(self, agent: ServingAgent) -> None:
        root = os.statvfs("/")

        _most, files, size, inodes = map(int, agent.ask("bounds").split())
        processes, memory, _used, used_inodes = map(int, agent.ask("usage").split())

        assert (root.f_blocks * root.f_frsize, root.f_files) == (size, inodes)
        assert files > 0
        assert processes > 0
        assert memory > 1 << 20
        assert 0 < used_inodes <= inodes or not inodes

    def test_calls_are_tried_one_by_one_as_the_guest(self, agent: ServingAgent) -> None:
        getpid, setuid = 39, 105  # include/uapi, x86-64
        if os.uname().machine != "x86_64":
            pytest.skip("numbers of system calls are those of x86-64")

        with closing(agent.ask_later("try", [(getpid, ()), (setuid, (0,)), (getpid, ())])) as reply:
            found = [int(wire.receive_raw(reply)[0]) for _ in range(3)]
            assert wire.receive_raw(reply) == (b"", [])

        assert [0, errno.EPERM, 0] == found

    def test_calls_are_tried_without_the_descriptors_of_the_agent(
        self, agent: ServingAgent
    ) -> None:
        fcntl, get_flags = 72, 1  # include/uapi, x86-64
        if os.uname().machine != "x86_64":
            pytest.skip("numbers of system calls are those of x86-64")

        calls = [(fcntl, (fd, get_flags, 0)) for fd in range(40)]
        with closing(agent.ask_later("try", calls)) as reply:
            found = [int(wire.receive_raw(reply)[0]) for _ in calls]

        assert 5 == len([each for each in found if each != errno.EBADF]), (
            "/dev/null, and its answer"
        )

    def test_a_throttled_agent_believes_no_processor_time(self) -> None:
        agent = ServingAgent(counts_cpu=True)
        try:
            assert agent.ask("throttled") == b""
            assert agent.run("true").user_ns == wire.UNKNOWN
        finally:
            agent.close()

    def test_limits_hold_for_what_it_starts(self) -> None:
        agent = ServingAgent(rlimits=[(4, 0, 0), (7, 100, 200)])
        try:
            _report, output = shell(agent, "ulimit -c; ulimit -n; ulimit -Hn; umask")
        finally:
            agent.close()

        assert ["0", "100", "200", "0022"] == output.decode().split()

    @pytest.mark.root
    def test_what_it_was_started_with_is_let_go(self) -> None:
        """Where others can open the descriptors of the first process, those would be of the host's."""
        agent = ServingAgent()
        links = [os.readlink(f"/proc/{agent.process.pid}/fd/{fd}") for fd in range(3)]
        agent.close()

        assert ["/dev/null"] * 3 == links

    def test_a_filter_that_the_kernel_refuses_ends_it_with_the_step(self) -> None:
        with pytest.raises(AssertionError, match=r"b'E\d+ agent: "):
            ServingAgent(seccomp=bytes(8))

    def test_it_ends_when_the_host_hangs_up(self) -> None:
        agent = ServingAgent()
        agent.close()

        assert agent.process.returncode == 0
