"""Parts of `ringfence run`: streams that are passed on, signals, and how it ends."""

from __future__ import annotations

import _signal as signal
import errno
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.cli import signals, supervise, tty
from ringfence.cli.relay import Flow, Flows
from ringfence.cli.signals import Bell
from ringfence.cli.supervise import OWN_FAILURE, READER_GONE, TIMED_OUT, Supervisor
from ringfence.errors import SandboxLost
from ringfence.model.execs.exec import ExecRequest, ExecStatus

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    os.close(made.wake)
    os.close(made._ring)


def narrow() -> tuple[int, int]:
    """Two ends of a socket that takes a part of what is written to it at most."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near.setblocking(False)
    return far.detach(), near.detach()


class TestFlows:
    def copy(self, source: int, target: Any) -> Flow:
        ended = threading.Event()
        was_done: list[bool] = []

        def end(flow: Flow) -> None:
            was_done.append(flow.done)
            ended.set()

        flow = Flow(source, target, end)
        flow.start()
        assert ended.wait(PATIENCE_S)
        assert [True] == was_done, "whoever is woken looks"
        return flow

    @pytest.mark.parametrize("kind", ["pipe", "socket", "file", "appended", "function"])
    def test_all_is_passed_on_and_counted(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spliced, splice = list[int](), os.splice

        def note(source: int, target: int, count: int) -> int:
            spliced.append(target)
            return splice(source, target, count)

        monkeypatch.setattr(os, "splice", note)
        data = os.urandom(3 << 20)
        source = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
        os.write(source, data)
        os.lseek(source, 0, os.SEEK_SET)
        found: list[bytes] = []
        if kind == "function":
            flow = self.copy(source, found.append)
        elif kind in ("pipe", "socket"):
            read, write = os.pipe() if kind == "pipe" else narrow()

            def drain() -> None:
                while piece := os.read(read, 1 << 16):
                    found.append(piece)

            thread = threading.Thread(target=drain)
            thread.start()
            flow = self.copy(source, write)
            os.close(write)
            thread.join(PATIENCE_S)
            os.close(read)
        else:
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if kind == "appended" else 0)
            target = os.open(tmp_path / "target", flags)
            os.write(target, b"before")
            flow = self.copy(source, target)
            os.close(target)
            assert b"before" == (tmp_path / "target").read_bytes()[:6]
            found.append((tmp_path / "target").read_bytes()[6:])
        os.close(source)
        assert data == b"".join(found)
        assert (len(data), None, False) == (flow.moved, flow.error, flow.reader_gone)
        assert (kind == "pipe") == bool(spliced), "a file's offset is others' too"

    def test_a_full_pipe_that_does_not_block_is_waited_for(self) -> None:
        source, feed = os.pipe()
        read, write = os.pipe()
        os.set_blocking(write, False)
        data = os.urandom(1 << 20)

        def write_all() -> None:
            os.write(feed, data)
            os.close(feed)

        threading.Thread(target=write_all).start()
        found: list[bytes] = []

        def drain() -> None:
            while piece := os.read(read, 1 << 14):
                found.append(piece)

        thread = threading.Thread(target=drain)
        thread.start()
        self.copy(source, write)
        os.close(write)
        thread.join(PATIENCE_S)
        for fd in (source, read):
            os.close(fd)
        assert data == b"".join(found)

    def test_a_reader_that_is_gone_is_told_from_a_full_disk(self) -> None:
        for is_gone in (True, False):
            source, feed = os.pipe()
            os.write(feed, b"x")
            if is_gone:
                read, write = os.pipe()
                os.close(read)
            else:
                write = os.open("/dev/full", os.O_WRONLY)
            flow = self.copy(source, write)
            assert is_gone == flow.reader_gone
            assert flow.error is not None
            assert (errno.EPIPE if is_gone else errno.ENOSPC) == flow.error.errno
            for fd in (source, feed, write):
                os.close(fd)

    def test_all_are_over_when_each_is_and_the_bell_has_rung(self, bell: Bell) -> None:
        flows = Flows(bell)
        one, end_of_one = os.pipe()
        two, end_of_two = os.pipe()
        null = os.open("/dev/null", os.O_WRONLY)
        flows.output(one, null)
        flows.output(two, null)
        os.write(end_of_one, b"abc")
        os.close(end_of_one)
        while not flows.outputs[0].done:
            os.sched_yield()
        assert not flows.over
        os.close(end_of_two)
        while not flows.over:
            os.sched_yield()
        assert (3, None) == (flows.moved, flows.failed)
        until_rung = b""
        while len(until_rung) < 2:
            until_rung += bell.read()
        for fd in (one, two, null):
            os.close(fd)

    def test_the_programs_input_is_closed_at_our_end(self, bell: Bell) -> None:
        source, feed = os.pipe()
        read, write = os.pipe()
        closed = threading.Event()

        def close() -> None:
            os.close(write)
            closed.set()

        Flows(bell).input(source, write, close)
        os.write(feed, b"in")
        os.close(feed)
        assert closed.wait(PATIENCE_S)
        assert (b"in", b"") == (os.read(read, 9), os.read(read, 9))
        os.close(source)
        os.close(read)


class TestSignals:
    def test_what_the_caller_ignores_stays_ignored_and_the_rest_rings(self) -> None:
        script = (
            "import os, signal\n"
            "from ringfence.cli.signals import Bell\n"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
            "bell = Bell(); bell.hear_signals()\n"
            "for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):\n"
            "    os.kill(os.getpid(), each)\n"
            "print(list(bell.read()), list(bell.read()))\n"
            "bell.ring(); print(list(bell.read()))\n"
            "bell.hear_the_terminal(resized=True)\n"
            "os.kill(os.getpid(), signal.SIGWINCH); os.kill(os.getpid(), signal.SIGTSTP)\n"
            "print(sorted(bell.read()), signal.getsignal(signal.SIGTTIN) is signal.SIG_IGN)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        expected = f"[{signal.SIGUSR1}, {signal.SIGTERM}] []\n[0]\n"
        expected += f"[{signal.SIGTSTP}, {signal.SIGWINCH}] True\n"
        assert expected == done.stdout

    def test_asked_twice_before_it_listens_it_goes(self) -> None:
        script = (
            "import os, signal, sys\n"
            "from ringfence.cli.signals import Bell\n"
            "bell = Bell(); bell.hear_signals()\n"
            "if sys.argv[1] == 'listens': bell.hear_the_terminal(resized=False)\n"
            "for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.exit(5)\n"
        )
        for word, code in (("waits", 130), ("listens", 5)):
            done = subprocess.run([sys.executable, "-c", script, word], check=False)
            assert code == done.returncode


class Run:
    """A command that runs."""

    stdout = stderr = stdin = None

    def __init__(self, status: ExecStatus | None = None) -> None:
        self.done, self._end = os.pipe()
        self.sent: list[tuple[int, bool]] = []
        self.killed = 0
        self._status = status

    def end(self) -> None:
        os.write(self._end, b"x")

    def status(self) -> ExecStatus:
        assert self._status is not None
        return self._status

    def signal(self, number: int, *, group: bool) -> None:
        self.sent.append((number, group))

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        os.close(self.done)
        os.close(self._end)


class TestSupervisor:
    def supervisor(self, bell: Bell, run: Run, **changes: Any) -> Any:
        sandbox: Any = SimpleNamespace(stats=lambda: SimpleNamespace(forks_refused=False))
        made: Any = Supervisor(sandbox, ExecRequest(argv=("x",), **changes), bell)
        made._run = run
        return made

    def status(self, **changes: Any) -> ExecStatus:
        facts: dict[str, Any] = {"exit_code": 3, "signal": None, "timed_out": False}
        return ExecStatus(**{**facts, "duration_s": 1.0, **changes})

    @pytest.mark.parametrize(
        ("changes", "code", "itself"),
        [
            ({}, 3, True),
            ({"exit_code": 0}, 0, True),
            ({"exit_code": None, "signal": 9}, 137, False),
            ({"exit_code": None, "signal": 9, "timed_out": True}, TIMED_OUT, False),
        ],
    )
    def test_its_exit_code_is_a_shells(
        self, bell: Bell, changes: dict[str, Any], code: int, itself: bool
    ) -> None:
        run = Run(self.status(**changes))
        supervisor = self.supervisor(bell, run)
        assert OWN_FAILURE == supervisor.exit_code, "nothing is known yet"
        run.end()
        supervisor.wait()
        assert (code, itself) == (supervisor.exit_code, supervisor.ended_itself)
        run.close()

    @pytest.mark.parametrize("step", ["start", "wait", "terminate", "drain", None])
    def test_the_terminal_is_put_back_whatever_fails(
        self, bell: Bell, monkeypatch: pytest.MonkeyPatch, step: str | None
    ) -> None:
        run, done = Run(), []
        supervisor = self.supervisor(bell, run)
        supervisor.status = self.status()
        supervisor._terminal = SimpleNamespace(restore=lambda: done.append("restore"))

        def does(name: str) -> Callable[..., None]:
            def does_it(*_: object) -> None:
                done.append(name)
                if name == step:
                    raise SandboxLost("it is gone")

            return does_it

        for name in ("start", "wait", "drain"):
            monkeypatch.setattr(supervisor, name, does(name))
        supervisor.sandbox.terminate = does("terminate")
        steps = ["start", "wait", "terminate", "drain"]
        if step is None:
            assert 3 == supervisor.run_through()
        else:
            with pytest.raises(SandboxLost):
                supervisor.run_through()
            del steps[steps.index(step) + 1 :]
        assert [*steps, "restore"] == done
        run.close()

    def test_its_time_is_over_a_moment_after_the_timeout(self, bell: Bell) -> None:
        run = Run()
        supervisor = self.supervisor(bell, run, timeout_s=0.001)
        supervisor.wait()
        assert (True, None, TIMED_OUT) == (
            supervisor.timed_out,
            supervisor.status,
            supervisor.exit_code,
        )
        assert supervisor.elapsed_s >= 0.101
        run.close()

    def test_a_timeout_may_be_longer_than_the_kernel_waits_at_once(
        self, bell: Bell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run(self.status())
        supervisor = self.supervisor(bell, run, timeout_s=366 * 86_400)
        run.end()
        supervisor.wait()
        assert 3 == supervisor.exit_code
        monkeypatch.setattr(supervise, "_LONGEST_S", 0.001)
        monkeypatch.setattr(supervise, "_GRACE_S", 0.02)
        late = self.supervisor(bell, waits := Run(), timeout_s=0.001)
        late.wait()
        assert (True, True) == (late.timed_out, late.elapsed_s >= 0.021)
        run.close()
        waits.close()

    def test_a_second_signal_of_a_kind_kills_but_for_harmless_ones(self, bell: Bell) -> None:
        run = Run()
        supervisor = self.supervisor(bell, run)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
            supervisor._pass_on(run, number)
        assert [
            (signal.SIGINT, True),
            (18, True),
            (signal.SIGTERM, False),
            (18, False),
            (signal.SIGUSR1, False),
            (signal.SIGUSR1, False),
        ] == run.sent
        assert 0 == run.killed
        supervisor._pass_on(run, signal.SIGTERM)
        assert 1 == run.killed
        run.close()

    @pytest.mark.parametrize("number", sorted(signals.PASSED_ON))
    def test_signals_that_a_terminal_sends_go_to_the_job(self, bell: Bell, number: int) -> None:
        run = Run()
        self.supervisor(bell, run)._pass_on(run, number)
        is_job = number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        goes_on = number not in (signal.SIGUSR1, signal.SIGUSR2)
        assert [(number, is_job), *([(18, is_job)] if goes_on else [])] == run.sent
        run.close()

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errno.EPIPE, READER_GONE),
            (errno.ECONNRESET, READER_GONE),
            (errno.EIO, READER_GONE),
            (errno.ENOSPC, OWN_FAILURE),
        ],
    )
    def test_output_that_cannot_be_written_is_its_end(
        self, bell: Bell, error: int, code: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run = Run()
        supervisor = self.supervisor(bell, run)
        failed = Flow(0, 2, lambda _flow: None)
        failed.error, failed.done = OSError(error, os.strerror(error)), True
        supervisor.flows.outputs.append(failed)
        bell.ring()
        supervisor.wait()
        assert code == supervisor._conclude()
        assert (error == errno.ENOSPC) == ("standard error: " in capfd.readouterr().err)
        assert not supervisor.ended_itself
        run.close()

    def test_what_a_reader_leaves_unread_after_a_timeout_is_dropped(self, bell: Bell) -> None:
        run = Run()
        supervisor = self.supervisor(bell, run)
        supervisor.timed_out = True
        supervisor.flows.outputs.append(Flow(0, 1, lambda _flow: None))
        supervisor.drain()
        supervisor.timed_out = False
        os.write(bell._ring, bytes([signal.SIGTERM]))
        supervisor.drain()
        assert not supervisor.flows.over
        run.close()

    def test_the_rest_is_waited_for_while_it_moves_and_until_a_signal_asks_for_an_end(
        self, bell: Bell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits: list[Any] = []
        news: Any = [[(0, 1)], [(0, 1)]]

        class Poll:
            def register(self, *_: Any) -> None:
                pass

            def poll(self, most_ms: float | None) -> Any:
                waits.append(most_ms)
                return news.pop(0)

        select = SimpleNamespace(poll=Poll, POLLIN=1)
        monkeypatch.setattr(supervise, "select", select)
        run = Run()
        supervisor = self.supervisor(bell, run)
        heard = [bytes([signal.SIGUSR1, 0]), bytes([signal.SIGTERM])]
        supervisor.bell = SimpleNamespace(wake=0, read=lambda: heard.pop(0))
        moved = [0, 0]

        class Moving:
            over, failed = False, None
            moved = property(lambda _self: moved.pop(0))

        supervisor.flows = Moving()
        supervisor.drain()
        assert ([None, None], []) == (waits, heard)
        supervisor.timed_out = True
        waits[:], moved[:], news[:] = [], [0, 5, 5, 5], [[], []]
        supervisor.drain()
        assert ([100.0, 100.0], []) == (waits, moved)
        run.close()

    @pytest.mark.parametrize(
        ("changes", "forks_refused", "said"),
        [
            ({}, False, ""),
            ({}, True, "no more processes could be started"),
            ({"exit_code": None, "signal": 9, "oom_killed": True}, False, "its memory limit"),
            ({"exit_code": None, "signal": 9, "timed_out": True}, False, "timed out after 1.5 s"),
            ({"exit_code": None, "signal": 9}, False, ""),
        ],
    )
    def test_it_says_what_the_command_cannot(
        self,
        bell: Bell,
        changes: dict[str, Any],
        forks_refused: bool,
        said: str,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        run = Run(self.status(**changes))
        supervisor = self.supervisor(bell, run, timeout_s=1.5)
        supervisor.sandbox.stats = lambda: SimpleNamespace(forks_refused=forks_refused)
        run.end()
        supervisor.wait()
        supervisor._conclude()
        told = capfd.readouterr().err
        assert (said in told, bool(said)) == (True, bool(told))
        run.close()

    def test_the_end_of_input_is_typed_on_a_terminal_and_closes_a_pipe(self, bell: Bell) -> None:
        for pty, left in ((None, b""), ((24, 80), tty.END_OF_INPUT)):
            run: Any = Run()
            read, write = os.pipe()
            run.stdin, run.close_stdin = write, functools.partial(os.close, write)
            self.supervisor(bell, run, pty=pty)._end_input()
            os.set_blocking(read, False)
            assert left == os.read(read, 9)
            os.close(read)
            if left:
                os.close(write)
            run.close()
        none: Any = Run()
        closed: list[bool] = []
        none.close_stdin = lambda: closed.append(True)
        self.supervisor(bell, none, pty=(24, 80))._end_input()
        assert [True] == closed, "where there is no terminal after all"
        none.close()

    def test_a_signal_of_the_terminal_stops_the_sandbox_with_us_and_a_size_is_its_own(
        self, bell: Bell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run: Any = Run()
        supervisor = self.supervisor(bell, run)
        told: list[Any] = []
        run.resize = lambda *size: told.append(size)
        supervisor.sandbox.suspend = lambda: told.append("suspend")
        supervisor.sandbox.resume = lambda: told.append("resume")
        supervisor._terminal = SimpleNamespace(
            restore=lambda: told.append("ours"), enter=lambda: told.append("its")
        )
        monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
        monkeypatch.setattr(tty, "size_of", lambda *fds: (7, *fds))
        os.write(
            bell._ring, bytes([signal.SIGTSTP, signal.SIGWINCH, signal.SIGUSR1, signal.SIGCHLD])
        )
        supervisor._listen(run)
        stopped = (os.getpid(), signal.SIGSTOP)
        assert ["suspend", "ours", stopped, "its", "resume", (7, 1, 0, 2)] == told
        assert [(signal.SIGUSR1, False)] == run.sent
        run.close()
