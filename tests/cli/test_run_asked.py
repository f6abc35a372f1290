"""What is asked of `ringfence run`, and what it prints: requests, tables, the object of `--json`, terminals."""

from __future__ import annotations

import json
import os
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.cli import request, result, run, tables, tty
from ringfence.cli.signals import Bell
from ringfence.errors import InvalidRequest
from ringfence.model.execs.exec import ExecStatus
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

    def test_it_is_written_whole_also_where_that_takes_its_time_or_nobody_reads(self) -> None:
        kept = os.dup(1)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        os.dup2(writing, 1)
        found: list[bytes] = []

        def drain() -> None:
            while piece := os.read(reading, 1 << 14):
                found.append(piece)

        thread = threading.Thread(target=drain)
        try:
            os.close(writing)
            full = {"stdout": "x" * (1 << 20)}
            threading.Timer(0.02, thread.start).start()
            result._print(full)
            os.dup2(kept, 1)
            thread.join(30)
            assert full == json.loads(b"".join(found))
            other, closed = os.pipe()
            os.close(other)
            os.dup2(closed, 1)
            os.close(closed)
            result._print(full)
            os.dup2(full_disk := os.open("/dev/full", os.O_WRONLY), 1)
            os.close(full_disk)
            result.print_error(InvalidRequest("x"))
            with pytest.raises(OSError, match="No space left"):
                result._print(full)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(reading)

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
    def test_a_script_without_a_place_leaves_the_directory_to_be_refused_by_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.py").touch()
        [mount] = request.mounts({"workdir": "/w"}, ["python3", "x.py"])
        assert ("/w/x.py", f"{tmp_path}/x.py") == (mount.target, mount.source)
        assert () == request.mounts({"workdir": "relative"}, ["python3", "x.py"])
        with pytest.raises(InvalidRequest) as refused:
            request.make_spec({"workdir": "relative"}, ["python3", "x.py"])
        assert "workdir" == refused.value.field

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


def test_a_terminal_that_tells_no_size_has_the_usual_one() -> None:
    master, slave = os.openpty()
    try:
        assert (24, 80) == tty.size_of(slave)
        termios.tcsetwinsize(slave, (7, 9))
        assert (7, 9) == tty.size_of(-1, slave)
    finally:
        os.close(master)
        os.close(slave)
