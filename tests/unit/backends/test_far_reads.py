"""Far hosts: the command that leads there, what is read through the agent, and ends; places of launchers."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.command import far, place, stream
from ringfence.backends.command import sandbox as launched
from ringfence.backends.command.far import FarLauncher, FarReader
from ringfence.backends.command.stream import StreamSandbox
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.protections import Reader
from ringfence.errors import BackendUnavailable
from ringfence.guest.isolation import NAMESPACES
from ringfence.launcher import wire
from ringfence.model import capabilities as can
from ringfence.model.capabilities import DEGRADED, ENFORCED, Protection
from ringfence.model.limits import Limits
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone


class TestWayThere:
    def test_ssh_asks_nothing_and_forwards_nothing(self) -> None:
        found = far.ssh(
            "far",
            "a.test",
            user="u",
            port=2222,
            identity="/key",
            options=("A=1", "B=2"),
            program="s",
        ).argv
        assert ("s", *far._FIXED) == found[: 1 + len(far._FIXED)]
        assert {"BatchMode=yes", "ClearAllForwardings=yes", "-T", "-a", "-x"} <= {*found}
        assert ("--", "u@a.test") == found[-2:], "no host is an option"
        rest = found[1 + len(far._FIXED) : -2]
        assert ("-o", "A=1", "-o", "B=2") == rest[:4]
        assert ("-i", "/key", "-o", "IdentitiesOnly=yes", "-p", "2222") == rest[4:]
        plain = far.ssh("far", "a.test")
        assert ("ssh", *far._FIXED, "--", "a.test") == plain.argv
        assert plain.quoted

    def test_a_shell_at_the_far_end_reads_the_words_as_they_are(self) -> None:
        there = ["python3", "-c", "print('a b'); x = \"$HOME\""]
        quoted = FarLauncher("far", ("ssh", "h"), quoted=True).command(there)
        assert (["ssh", "h"], there) == (quoted[:2], shlex.split(quoted[2]))
        assert 3 == len(quoted)
        assert ["c", *there] == FarLauncher("far", ("c",)).command(there)

    def test_what_is_not_installed_is_told(self) -> None:
        FarLauncher("far", ("sh", "x")).check()
        with pytest.raises(BackendUnavailable, match="'no-such-program' is not installed"):
            FarLauncher("far", ("no-such-program", "sh")).check()

    def test_the_far_end_is_told_its_launcher_and_user(self) -> None:
        launcher = FarLauncher("far", ("c",), python="python9", there=("confine", "{uid}"))
        python, *options, code, told = stream._far_command(launcher, 1234)
        assert ("python9", ["-I", "-S", "-c"]) == (python, options)
        assert code.rstrip().endswith("main(sys.argv[1])")
        found = json.loads(told)
        assert (["confine", "{uid}"], 1234) == (found["launcher"], found["uid"])


class TestReading:
    def reader(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Any:
        monkeypatch.setattr(far, "status_of_agent", lambda _sandbox: {"Uid": "1 1 1 1", "A": "x"})
        facts = {
            "uid": 77,
            "inner": {"pid": 1, "net": 2, "user": 3},
            "outer": {"pid": 9, "net": 2, "ipc": 5},
        }
        sandbox: Any = SimpleNamespace(facts=facts, spec=SandboxSpec(limits=Limits(**limits)))
        return FarReader(sandbox)

    def test_ids_and_namespaces_are_the_far_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = self.reader(monkeypatch)
        assert {"Uid": "77 77 77 77", "A": "x"} == made.status()
        assert ["net"] == made.shared(), "one that is not known is none that is shared"

    @pytest.mark.parametrize("memory", [None, 1 << 27])
    def test_all_is_read_by_the_far_agent_and_limits_are_samples(
        self, memory: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def read(_self: Any) -> Any:
            return (
                Protection("seccomp", ENFORCED, "mode 2"),
                Protection("network", DEGRADED, "x", "a fix"),
                Protection("process_trees", ENFORCED, "not this"),
            )

        monkeypatch.setattr(Reader, "read", read)
        monkeypatch.setattr(FarReader, "process_trees", lambda _self: (DEGRADED, "trees"))
        listed = self.reader(monkeypatch, memory_bytes=memory).read()
        found = {each.name: each for each in listed}
        assert len(found) == len(listed)
        assert (ENFORCED, "read by the far agent: mode 2") == (
            found["seccomp"].status, found["seccomp"].why,
        )  # fmt: skip
        assert "a fix" == found["network"].fix
        names = (can.CPU_LIMIT, can.DISK_QUOTA, can.INODE_QUOTA, can.MEMORY_LIMIT, can.PIDS_LIMIT)
        assert {DEGRADED} == {found[each].status for each in names}
        assert (memory is None) == ("none asked for" in found[can.MEMORY_LIMIT].why)
        assert ("process_trees", "trees") == (listed[-1].name, listed[-1].why)
        monkeypatch.setattr(FarReader, "process_trees", lambda _self: None)
        assert "process_trees" not in {each.name for each in self.reader(monkeypatch).read()}

    def test_a_report_says_what_runs_there_and_what_is_not_to_be_had(self) -> None:
        ended: list[int] = []
        sandbox: Any = SimpleNamespace(
            facts={"kernel": "6.1", "python": "3.11"}, protections=lambda: (),
            terminate=lambda: ended.append(1),
        )  # fmt: skip
        backend: Any = SimpleNamespace(
            name="far", profile_names=("p",), provision=lambda _spec: sandbox
        )
        report = far.report(backend)
        assert ("Linux 6.1, Python 3.11", [1]) == (report.reason, ended)
        found = {each.name: each for each in report.capabilities}
        assert len(found) == len(report.capabilities)
        for name in (can.PTY, can.CONNECT, can.MEMORY_LIMIT):
            assert found[name].available
        for name in (can.MOUNT, can.NETWORK_HOSTS, can.SUSPEND, can.SNAPSHOT, can.CPU_LIMIT):
            assert not found[name].available
            assert found[name].reason


class TestEnds:
    def sandbox(self, process: Any) -> tuple[Any, wire.Socket]:
        ours, theirs = wire.socketpair()
        made: Any = StreamSandbox.__new__(StreamSandbox)
        made.control, made._send_lock, made._process = ours, threading.Lock(), process
        made.pidfd = os.pidfd_open(process.pid)
        return made, theirs

    @pytest.mark.parametrize("hears", [True, False])
    def test_the_end_of_the_stream_is_that_of_the_far_end_or_the_launcher_is_killed(
        self, hears: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "_PATIENCE_S", 30.0 if hears else 0.0)
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        made, theirs = self.sandbox(process)
        closing = threading.Thread(target=lambda: (theirs.recv(1), process.stdin.close()))  # type: ignore[union-attr]
        if hears:
            closing.start()
        made._end(True)
        assert -1 == made.control.fileno()
        assert (0 if hears else -9) == process.wait(30)
        if hears:
            closing.join()
        else:
            process.stdin.close()
        theirs.close()
        os.close(made.pidfd)

    def test_what_it_has_left_is_waited_for_and_let_go(self) -> None:
        process = subprocess.Popen(["true"])
        made, theirs = self.sandbox(process)
        done: list[Any] = []
        made._line = SimpleNamespace(join=lambda: done.append(process.returncode))
        made.owner = SimpleNamespace(released=done.append)
        made._let_go()
        assert [0, made] == done
        for each in (made.control, theirs):
            each.close()
        os.close(made.pidfd)

    def test_usage_is_asked_for_only_where_somebody_answers(self) -> None:
        made: Any = SimpleNamespace(
            ask=lambda what: ("3 4 5 6", what), _created=0.0, _execs=2, spec=SandboxSpec(),
            owner=SimpleNamespace(degraded=lambda _spec: ("x",)),
        )  # fmt: skip
        for state in (State.PROVISIONED, State.RUNNING):
            found = StreamSandbox._read_stats(made, state)
            assert (3, 4, 2, ("x",)) == (
                found.pids, found.memory_bytes, found.execs, found.degraded,
            )  # fmt: skip
        made.ask = lambda _what: pytest.fail("nobody answers")
        assert StreamSandbox._read_stats(made, State.TERMINATED).pids is None

    @pytest.mark.parametrize("fails", [True, False])
    def test_the_launcher_hears_the_end_of_its_input_and_is_heard_out(self, fails: bool) -> None:
        near, launcher = socket.socketpair()
        control, ours = wire.socketpair()

        def run() -> None:
            if fails:
                raise ValueError("broken")

        def be_launcher() -> None:
            assert b"" == launcher.recv(1)
            launcher.sendall(b"last words")
            launcher.close()

        thread = threading.Thread(target=be_launcher)
        thread.start()
        carrier: Any = SimpleNamespace(run=run)
        if fails:
            with pytest.raises(ValueError, match="broken"):
                stream._carry(carrier, control, near)
        else:
            stream._carry(carrier, control, near)
        thread.join(30)
        assert (-1, -1) == (control.fileno(), near.fileno())
        ours.close()

    def test_a_launcher_that_does_not_end_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launched, "_PATIENCE_S", 0.0)
        process = subprocess.Popen(["sleep", "1000"])
        launched.end(process)
        assert -9 == process.returncode

    def test_namespaces_are_known_by_their_inodes(self) -> None:
        fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        found = launched.inodes_of(fds)
        assert {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES} == found
        for fd in fds:
            os.close(fd)


class TestPlaces:
    @pytest.fixture
    def base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(place, "base", lambda: str(tmp_path))
        return tmp_path

    def test_only_what_nobody_holds_any_more_is_swept_away(self, base: Path) -> None:
        held, fd = place.make_locked()
        left = base / f"{place._PREFIX}left"
        young = base / f"{place._PREFIX}young"
        other = base / "another"
        for each in (left, young, other):
            (each / "deep").mkdir(parents=True)
        for each in (left, other):
            (each / place._LOCK).touch()
        before = len(os.listdir("/proc/self/fd"))
        place.sweep()
        assert not left.exists()
        assert all(each.exists() for each in (young, other, Path(held)))
        assert before == len(os.listdir("/proc/self/fd"))
        os.close(fd)
        place.sweep()
        assert not Path(held).exists()

    def test_one_is_locked_from_its_start_and_open_to_nobody_else(self, base: Path) -> None:
        made = place.Place(1000, host().uid, ())
        assert 0o700 == os.stat(made.path).st_mode & 0o777
        with open(f"{made.path}/{place._LOCK}") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert 0o711 == os.stat(made.words["own"]).st_mode & 0o777
        assert str(host().uid) == made.words["host_id"]
        assert not any(each.startswith("dev") for each in os.listdir(made.words["root"]))
        made.remove()
        assert [] == os.listdir(base)

    def test_one_that_a_sweep_took_is_made_again(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, taken = fcntl.flock, list[str]()

        def flock(fd: int, how: int) -> None:
            if not taken:
                taken.append(os.readlink(f"/proc/self/fd/{fd}"))
                os.unlink(taken[0])
            real(fd, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        before = len(os.listdir("/proc/self/fd"))
        path, fd = place.make_locked()
        assert not taken[0].startswith(f"{path}/")
        os.close(fd)
        assert before == len(os.listdir("/proc/self/fd"))

    @pytest.mark.parametrize("step", ["lock", "files"])
    def test_nothing_is_left_of_one_that_cannot_be_made(
        self, step: str, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_given: Any) -> Any:
            raise OSError(28, "no room")

        if step == "lock":
            monkeypatch.setattr(fcntl, "flock", fail)
        else:
            monkeypatch.setattr(place.Place, "_make", fail)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no room"):
            place.Place(1000, host().uid, ())
        assert [] == os.listdir(base)
        assert before == len(os.listdir("/proc/self/fd"))
