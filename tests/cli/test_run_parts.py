"""Parts of `ringfence run`: streams that are passed on, signals, how it ends, and what is asked for."""

from __future__ import annotations

import _signal as signal
import errno
import functools
import json
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

from ringfence.cli import request, result, run, signals, tables, tty
from ringfence.cli.relay import Flow, Flows
from ringfence.cli.signals import Bell
from ringfence.cli.supervise import OWN_FAILURE, READER_GONE, TIMED_OUT, Supervisor
from ringfence.errors import InvalidRequest, SandboxLost
from ringfence.model.execs.exec import ExecRequest, ExecStatus
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount
from ringfence.model.spec import SandboxSpec
from tests.waiting import readable

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
        flow = Flow(source, target, lambda _flow: ended.set())
        flow.start()
        assert ended.wait(PATIENCE_S)
        assert flow.done
        return flow

    @pytest.mark.parametrize("kind", ["pipe", "socket", "file", "appended", "function"])
    def test_all_is_passed_on_and_counted(self, kind: str, tmp_path: Path) -> None:
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
        ("error", "code"), [(errno.EPIPE, READER_GONE), (errno.ENOSPC, OWN_FAILURE)]
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


class TestJson:
    def test_the_object_has_all_that_came_and_the_shells_words_for_what_did_not_start(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        done: list[str] = []

        def start(out: Any, err: Any) -> None:
            out(b"out")
            err(b"err ")

        status = ExecStatus(exit_code=127, signal=None, timed_out=False, duration_s=1.0)
        supervisor: Any = SimpleNamespace(
            start=start, wait=lambda: done.append("wait"), drain=lambda: done.append("drain"),
            feed_note=lambda write: write(b"not found"), status=status, exit_code=127,
        )  # fmt: skip
        sandbox: Any = SimpleNamespace(
            spec=SandboxSpec(), protections=list, terminate=lambda: done.append("terminate")
        )
        assert 127 == result.run_for_json(supervisor, sandbox, None)
        assert ["wait", "terminate", "drain"] == done, "nothing adds to what is drained"
        told = json.loads(capfd.readouterr().out)
        assert ("out", "err not found", 127) == (told["stdout"], told["stderr"], told["exit_code"])
        supervisor.status, supervisor.elapsed_s = None, 2.5
        result.run_for_json(supervisor, sandbox, 4)
        told = json.loads(capfd.readouterr().out)
        assert (9, True, 2.5) == (told["signal"], told["timed_out"], told["duration_s"])
        assert told["truncated"], "the bound of the sandbox is that of each stream"

    @pytest.mark.parametrize("other", ["pip", "template"])
    def test_an_image_has_no_packages_added(self, other: str, bell: Bell) -> None:
        for given in ({"image": "x"}, {"pull": "never"}):
            with pytest.raises(InvalidRequest) as refused:
                run._run({**given, other: ["pandas"]}, ["true"], bell)
            assert f"--{other}" == refused.value.field


class TestProvision:
    """Where namespaces are refused, `--anywhere` takes what is weaker, by steps and never unsaid."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        from ringfence.backends import registry
        from ringfence.errors import IsolationError

        asked: list[Any] = []

        def provision(spec: SandboxSpec, name: str | None = None) -> Any:
            asked.append((name, tuple(spec.allow_degraded)))
            if name in self.refusing:
                raise IsolationError("no namespaces here")
            return f"by {name}"

        monkeypatch.setattr(registry, "provision", provision)
        return asked

    refusing: tuple[str | None, ...] = ()

    def mask(self, monkeypatch: pytest.MonkeyPatch, masks: list[str]) -> None:
        from ringfence.backends.local.host import mountinfo

        monkeypatch.setattr(mountinfo, "masks_of_proc", lambda: masks)

    def test_what_can_be_had_is_taken_and_without_the_option_nothing_weaker(
        self, asked: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        spec = SandboxSpec(allow_degraded=("cpu_limit",))
        monkeypatch.setattr(TestProvision, "refusing", ())
        found: Any = run._provision(spec, {"anywhere": True})
        assert "by None" == found
        found = run._provision(spec, {"anywhere": True, "backend": "gvisor"})
        assert "by gvisor" == found
        monkeypatch.setattr(TestProvision, "refusing", (None, "gvisor"))
        self.mask(monkeypatch, ["/proc/kcore"])
        for given in ({}, {"backend": "gvisor"}, {"anywhere": True, "backend": "gvisor"}):
            with pytest.raises(Exception, match="no namespaces"):
                run._provision(spec, given)
        assert {("cpu_limit",)} == {degraded for _, degraded in asked}
        assert "" == capfd.readouterr().err

    @pytest.mark.parametrize(
        ("masks", "native", "found"),
        [
            (["/proc/kcore"], True, "native"),
            (["/proc/kcore"], False, "landlock"),
            ([], True, "landlock"),
        ],
    )
    def test_first_the_proc_of_the_container_then_no_namespaces(
        self,
        asked: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        masks: list[str],
        native: bool,
        found: str,
    ) -> None:
        monkeypatch.setattr(TestProvision, "refusing", (None,) if native else (None, "native"))
        self.mask(monkeypatch, masks)
        spec = SandboxSpec(allow_degraded=("cpu_limit",))
        provisioned: Any = run._provision(spec, {"anywhere": True})
        assert f"by {found}" == provisioned
        allowed = {"native": ("cpu_limit", "namespaces"), "landlock": ("cpu_limit",)}
        assert (found, allowed[found]) == asked[-1], "less is allowed for that one attempt alone"
        told = capfd.readouterr().err
        assert ("/proc of this container" if found == "native" else "without namespaces") in told
        assert "no namespaces here" in told


class TestWarnings:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({}, ""),
            ({"memory": "1g"}, "warning: --memory: degraded on this host"),
            ({"memory": "1g", "cpus": "1"}, "--memory and --cpus: degraded, missing on"),
            ({"memory": "1g", "allow-degraded": ["memory_limit"]}, ""),
            (
                {"memory": "1g", "cpus": "1", "allow-degraded": ["memory_limit"]},
                "warning: --cpus: missing",
            ),
            ({"memory": "1g", "allow-degraded": ["*"]}, ""),
            ({"pids": "5"}, ""),
        ],
    )
    def test_a_limit_that_was_asked_for_and_holds_less_is_named_unless_that_is_allowed(
        self, given: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        from ringfence.model.capabilities import Protection

        found = [
            Protection("memory_limit", "degraded", "x"),
            Protection("cpu_limit", "missing", "x"),
            Protection("pids_limit", "enforced"),
            Protection("disk_quota", "missing", "x"),
        ]
        sandbox: Any = SimpleNamespace(protections=lambda: found)
        run._warn_of_weak_limits(given, sandbox)
        told = capfd.readouterr().err
        assert (said in told, bool(said)) == (True, bool(told))


class TestRequests:
    def test_what_is_asked_for_is_the_spec(self) -> None:
        given: dict[str, Any] = {"user": "root", "memory": "64m", "pids": "7", "cpus": "0.5"}
        given |= {"env": ["A=1", "B=x=y"], "deny": ["/srv"], "allow-degraded": ["io_limit"]}
        spec = request.make_spec(given, ["true"])
        assert ("root", {"A": "1", "B": "x=y"}, ("/srv",)) == (spec.user, dict(spec.env), spec.deny)
        assert (64 << 20, 7, 0.5) == (
            spec.limits.memory_bytes,
            spec.limits.pids,
            spec.limits.cpus,
        )
        assert ("io_limit",) == tuple(spec.allow_degraded)

    @pytest.mark.parametrize(
        ("given", "access"), [(True, READ_ONLY), ("ro", READ_ONLY), ("rw", READ_WRITE)]
    )
    def test_here_is_read_only_unless_it_says_otherwise(self, given: Any, access: str) -> None:
        spec = request.make_spec({"here": given}, ["true"])
        assert [(os.getcwd(), "/work", access)] == [
            (e.source, e.target, e.access) for e in spec.mounts
        ]
        assert "/work" == spec.workdir
        assert "/tmp" == request.make_spec({"here": given, "workdir": "/tmp"}, ["x"]).workdir

    @pytest.mark.parametrize(
        ("pairs", "why"), [(["A"], "is not K=V"), (["A=1", "A=2"], "given twice")]
    )
    def test_a_variable_has_one_value(self, pairs: list[str], why: str) -> None:
        with pytest.raises(InvalidRequest, match=why):
            request.environment(pairs)
        assert {"A": "1"} == request.environment(["A=1", "A=1"])

    @pytest.mark.parametrize("text", ["", "x", "1.5", "1_0", "٣", "--1", "9" * 21])
    def test_what_is_no_number_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest):
            request.whole_number(text, "limits.pids")
        assert 9 == request.whole_number(" +9 ", "limits.pids")

    @pytest.mark.parametrize("text", ["", "x", "1_0"])
    def test_what_is_no_decimal_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest):
            request._decimal(text, "limits.cpus")

    @pytest.mark.parametrize("text", [":/work", "~/x:/work"])
    def test_a_mount_that_a_shell_has_spoilt_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest):
            request._mount(text)

    @pytest.mark.parametrize(
        ("mounts", "protect", "unprotect", "field"),
        [
            ((Mount("/data", "/srv", "ro"),), (".git",), (), "protect"),
            ((Mount("/data", "/srv", "rw"),), ("/other/x",), (), "protect"),
            ((Mount("/data", "/srv", "rw"),), ("/data2/x",), (), "protect"),
            ((), (), (".git",), "unprotect"),
            ((Mount("/data", "/srv", "ro"),), (), (".git",), "unprotect"),
        ],
    )
    def test_what_would_not_be_protected_is_refused(
        self, mounts: Any, protect: Any, unprotect: Any, field: str
    ) -> None:
        spec = SandboxSpec(mounts=mounts, protect=protect, unprotect=unprotect)
        with pytest.raises(InvalidRequest) as refused:
            request.check_protected(spec)
        assert field == refused.value.field
        writable = (Mount("/data", "/srv", "rw"),)
        request.check_protected(SandboxSpec(mounts=writable, protect=("/data/x", ".git")))

    def test_there_must_be_a_command(self) -> None:
        with pytest.raises(InvalidRequest, match="no command"):
            request.make_request({}, [])
        assert 90.0 == request.make_request({"timeout": "90s"}, ["x"]).timeout_s

    def test_json_and_a_terminal_exclude_each_other(self) -> None:
        with pytest.raises(InvalidRequest):
            run.wants_terminal({"json": True, "tty": True})
        assert (False, True) == (
            run.wants_terminal({"json": True}),
            run.wants_terminal({"tty": True}),
        )
        assert run._asks_for_json(["--json", "--", "x"])
        assert not run._asks_for_json(["--", "x", "--json"])

    def test_only_the_null_device_is_the_sandboxes_own(self, tmp_path: Path) -> None:
        for path, is_null in (("/dev/null", True), ("/dev/zero", False), (str(tmp_path), False)):
            fd = os.open(path, os.O_RDONLY)
            assert is_null == run._is_null(fd)
            os.close(fd)


class TestTables:
    def test_nothing_in_a_table_steers_a_terminal(self) -> None:
        shown = tables.written(("A", "B"), [("x\x1b[31m\n", "y\x9b\u202e")])
        assert "\x1b" not in shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert 2 == len(shown.splitlines())
        assert "x?[31m?" in shown
        assert "y??" in shown

    def test_of_a_long_table_the_rest_is_counted(self) -> None:
        rows = [(str(i),) for i in range(5)]
        assert ["A", "0", "... and 4 more"] == tables.written(("A",), rows, 3).splitlines()
        assert 6 == len(tables.written(("A",), rows, 6).splitlines())

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, ""),
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (3599, "60m"),
            (3600, "1h"),
            (86400, "1d"),
        ],
    )
    def test_spans_are_in_their_largest_unit(self, seconds: float | None, text: str) -> None:
        assert text == tables.span(seconds)


def test_a_terminal_is_put_back_as_it_was_and_unread_keys_go() -> None:
    import pty
    import termios

    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    raw = tty.RawTerminal(slave)
    raw.enter()
    inside: list[Any] = termios.tcgetattr(slave)
    assert not inside[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
    assert not inside[1] & termios.OPOST
    os.write(master, b"planted\n")
    os.set_blocking(slave, False)
    assert readable([slave], PATIENCE_S)
    raw.restore()
    raw.restore()
    assert before == termios.tcgetattr(slave)
    with pytest.raises(BlockingIOError):
        os.read(slave, 100)
    os.close(slave)
    os.close(master)
    raw.restore()
