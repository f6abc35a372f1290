"""Contexts whose kernel does what the test says: starts that fail, turns, time limits and ends."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.contexts import context as module
from ringfence.contexts.context import Context, Turn, _Inbox, _write_within, check_options
from ringfence.contexts.execution import Cell, CellError, Result
from ringfence.contexts.opened import Contexts
from ringfence.errors import (
    ExecError,
    ExecNotFound,
    InvalidRequest,
    LifecycleError,
    Unsupported,
)
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
HELLO = "say('hello')\n"
ECHO = "say('out', cell, ask['code'].encode())\nsay('done', cell, b'1 0')\n"
"""The body of a kernel whose cells print their code and end."""
_PRELUDE = """
import json, os, sys
def say(kind, cell='-', payload=b'', name='-'):
    data = b'\\x1e%s %s %d %s\\n' % (kind.encode(), cell.encode(), len(payload), name.encode()) + payload
    while data:
        data = data[os.write(1, data):]
def asks():
    for line in sys.stdin.buffer:
        if line.startswith(b'{"do"'):
            yield json.loads(line)
"""


def serving(body: str) -> str:
    """A kernel that is ready and runs `body` with each request."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{HELLO}for ask in asks():\n    cell = ask.get('cell')\n{lines}"


class Host:
    """A sandbox whose contexts run kernels of the test.

    Attributes:
        processes: All that it has started.
        given: Options of each start.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.script = sandbox, serving(ECHO)
        self.state = "ready"
        self.processes: list[Any] = []
        self.given: list[dict[str, Any]] = []

    def start(self, _argv: list[str], **options: Any) -> Any:
        self.given.append(options)
        argv = [sys.executable, "-IS", "-c", _PRELUDE + self.script]
        process = self.sandbox.start(argv, **options)
        self.processes.append(process)
        return process

    def context(self, script: str, language: str = "bash") -> Context:
        self.script = script
        return Context(self, language)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    backend = Unconfined()
    try:
        with Sandbox.create(backend=backend) as made:
            yield made
    finally:
        backend.close()


@pytest.fixture
def host(sandbox: Sandbox) -> Iterator[Host]:
    made = Host(sandbox)
    yield made
    for process in made.processes:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon."""
    monkeypatch.setattr(module, "GRACE_S", 0.1)


def until(is_so: Callable[[], object]) -> None:
    """Wait for what comes without an event."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


class TestStarts:
    def test_options_reach_the_interpreter_and_little_of_its_output_is_kept(
        self, host: Host, tmp_path: Path
    ) -> None:
        context = Context(host, "bash", cwd=str(tmp_path), env={"X": "7"})
        (given,) = host.given
        assert (str(tmp_path), {"X": "7"}, True) == (
            given["cwd"],
            given["env"],
            given["stream_stdin"],
        )
        assert given["max_output_bytes"] <= 1 << 20
        assert host.processes[0].id == context.id
        assert context.running

    @pytest.mark.parametrize(
        "script",
        [
            "import time\ntime.sleep(600)",
            "say('out')\nfor ask in asks(): pass\nimport time\ntime.sleep(600)",
        ],
        ids=["reads nothing", "reads"],
    )
    def test_one_that_is_not_ready_in_time_is_killed(
        self, host: Host, script: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("START_S", "GRACE_S"):
            monkeypatch.setattr(module, name, 0.2)
        monkeypatch.setattr(Context._send, "__defaults__", (0.2,))
        with pytest.raises(ExecError):
            host.context(script)
        (process,) = host.processes
        assert process.wait(PATIENCE_S).signal is not None

    def test_one_that_ends_at_once_says_how(self, host: Host) -> None:
        with pytest.raises(ExecError, match=r"exited with code 3: what was wrong"):
            host.context(
                "sys.stdin.buffer.readline()\nprint('what was wrong', file=sys.stderr)\nsys.exit(3)"
            )

    def test_one_whose_output_is_no_frame_is_killed(self, host: Host) -> None:
        with pytest.raises(ExecError, match="damaged"):
            host.context("os.write(1, bytes(200))\nfor ask in asks(): pass")
        assert host.processes[0].wait(PATIENCE_S).signal is not None

    def test_an_interruption_of_its_start_ends_it(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(_language: str) -> bytes:
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "kernel_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            host.context(serving(ECHO))
        assert host.processes[0].wait(PATIENCE_S).signal is not None

    @pytest.mark.parametrize(
        ("word", "meant"),
        [
            ("js", "node"),
            ("JavaScript", "node"),
            ("nodejs", "node"),
            ("sh", "bash"),
            ("shell", "bash"),
            ("Rscript", "r"),
            ("jshell", "java"),
            ("py", "python"),
            ("python3", "python"),
        ],
    )
    def test_other_words_for_a_language_name_it(self, host: Host, word: str, meant: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            Context(host, word)
        assert f"use {meant}" in str(refused.value.hint)
        assert [] == host.given


class TestTurns:
    def test_each_cell_has_its_own_output(self, host: Host) -> None:
        with host.context(serving(ECHO)) as context:
            assert ["a", "b"] == [context.run(code).stdout for code in "ab"]
            assert context.run("c").execution_count == 1
        assert host.processes[0].future.done(), "leaving it waits for its end"
        assert not context.running
        assert host.processes[0].wait(PATIENCE_S).signal is not None

    def test_callbacks_have_what_is_theirs(self, host: Host) -> None:
        script = serving(
            "say('out', cell, b'o')\nsay('err', cell, b'e')\n"
            "say('part', cell, b'v', 'text/plain')\nsay('main', cell)\n"
            "say('part', cell, b'E', 'name')\nsay('error', cell)\nsay('done', cell, b'1 0')"
        )
        context = host.context(script)
        heard: dict[str, list[Any]] = {"out": [], "err": [], "result": [], "error": []}
        context.run(
            "x",
            on_stdout=heard["out"].append,
            on_stderr=heard["err"].append,
            on_result=heard["result"].append,
            on_error=heard["error"].append,
        )
        assert ["o", "e"] == ["".join(heard["out"]), "".join(heard["err"])]
        assert ["v"] == [each.text for each in heard["result"]]
        assert ["E"] == [each.name for each in heard["error"]]
        only: list[str] = []
        context.run("x", on_stderr=only.append)
        assert ["e"] == only

    def test_input_is_answered_by_the_callback_or_the_lines_or_not_at_all(self, host: Host) -> None:
        script = serving(
            "if ask['do'] == 'run':\n"
            "    mine = cell\n"
            "    say('out', cell, str(ask['input']).encode())\n"
            "    say('input', cell, b'? ')\n"
            "else:\n"
            "    say('out', mine, str(ask['text']).encode())\n"
            "    say('done', mine, b'1 0')"
        )
        context = host.context(script)
        prompts: list[str] = []

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            return "called"

        assert "Truecalled" == context.run("x", stdin="line", on_input=answer).stdout
        assert ["? "] == prompts
        assert "Trueline" == context.run("x", stdin="line\nmore").stdout
        assert "TrueNone" == context.run("x", stdin="").stdout
        assert "FalseNone" == context.run("x").stdout, "whatever a program inside asks"

    def test_a_cell_waits_for_the_one_before(self, host: Host) -> None:
        script = serving(
            "say('out', cell, b'begun')\nif ask['do'] != 'run':\n    say('done', cell, b'1 0')"
        )
        context = host.context(script)
        begun: list[threading.Event] = [threading.Event(), threading.Event()]
        with ThreadPoolExecutor() as pool:
            first = pool.submit(context.run, "a", on_stdout=lambda _text: begun[0].set())
            assert begun[0].wait(PATIENCE_S)
            assert not context.hold(), "one runs"
            second = pool.submit(context.run, "b", on_stdout=lambda _text: begun[1].set())
            assert not begun[1].wait(0.05)
            context.interrupt()
            assert first.result(PATIENCE_S).error is None
            assert begun[1].wait(PATIENCE_S)
            context.interrupt()
            second.result(PATIENCE_S)
        context.interrupt()  # none runs
        assert context.hold()
        assert not context.hold()
        context.let_go()
        assert context.hold()
        context.let_go()

    @pytest.mark.parametrize("verb", ["variables", "restart", "go_on_as"])
    def test_what_else_is_asked_of_the_kernel_waits_for_the_cell_too(
        self, host: Host, verb: str
    ) -> None:
        script = serving(
            "say('hello')\nsay('part', cell or '-', b'[]', 'application/json')\n"
            "if cell:\n    say('main', cell)\n    say('done', cell, b'1 0')"
        )
        context, begun = host.context(script, "python"), threading.Event()
        send, start = context._send, host.start

        def sending(data: bytes, most_s: float = PATIENCE_S) -> None:
            begun.set()
            send(data, most_s)

        def starting(*argv: Any, **options: Any) -> Any:
            begun.set()
            return start(*argv, **options)

        def copy(feed: Callable[[bytes], None]) -> Any:
            return starting([], stream_stdin=True, on_stdout=feed)

        context._send, host.start = sending, starting  # type: ignore[method-assign]
        given = [copy] if verb == "go_on_as" else []
        assert context.hold()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(getattr(context, verb), *given)
            is_early = begun.wait(0.05)
            context.let_go()
            asked.result(PATIENCE_S)
        assert (False, True) == (is_early, begun.is_set())

    def test_a_suspended_sandbox_begins_no_cell(self, host: Host) -> None:
        context = host.context(serving(ECHO))
        host.state = "suspended"
        with pytest.raises(LifecycleError):
            context.run("a")
        host.state = "ready"
        assert "b" == context.run("b").stdout

    def test_what_is_wrong_is_refused_before_it_runs(self, host: Host) -> None:
        context = host.context(serving(ECHO))
        for options in ({"timeout_s": 0}, {"on_input": 1}, {"on_stdout": "x"}):
            with pytest.raises(InvalidRequest):
                context.run("a", **options)
        with pytest.raises(InvalidRequest):
            context.run(b"a")  # type: ignore[arg-type]
        assert "a" == context.run("a").stdout
        check_options({"timeout_s": 1, "on_input": print})
        with pytest.raises(InvalidRequest):
            check_options({"timeout": 1})


class TestAbandoned:
    SCRIPT = serving(
        "if ask['do'] == 'run':\n    say('out', cell, b'runs')\n"
        "else:\n    say('err', cell, ask['do'].encode())\n    say('done', cell, b'1 0')"
    )

    def test_one_that_has_not_begun_never_runs(self, host: Host) -> None:
        context, turn = host.context(self.SCRIPT), Turn()
        context.abandon(turn)
        execution = context.follow(turn, "x")
        assert ("", None) == (execution.stdout, turn.cell)

    def test_one_that_runs_is_interrupted_and_a_finished_one_is_left_alone(
        self, host: Host
    ) -> None:
        context, turn = host.context(self.SCRIPT), Turn()
        execution = context.follow(turn, "x", on_stdout=lambda _text: context.abandon(turn))
        assert "interrupt" == execution.stderr
        sent: list[bytes] = []
        context._send = lambda data, most_s=1.0: sent.append(data)  # type: ignore[method-assign]
        context.abandon(turn)
        assert [] == sent

    def test_one_that_is_abandoned_while_it_is_sent_is_interrupted(self, host: Host) -> None:
        context, turn = host.context(self.SCRIPT), Turn()
        send = context._send

        def sending(data: bytes, most_s: float = PATIENCE_S) -> None:
            send(data, most_s)
            turn.is_abandoned = True

        context._send = sending  # type: ignore[method-assign]
        assert "interrupt" == context.follow(turn, "x").stderr


class TestTimeLimits:
    def test_one_that_reacts_keeps_the_context(self, host: Host) -> None:
        script = serving(
            "if ask['do'] == 'interrupt':\n"
            "    say('part', cell, b'the line', 'traceback')\n"
            "    say('error', cell)\n    say('done', cell, b'1 0')\n"
            "elif ask['code'] == 'quick':\n    say('done', cell, b'2 0')"
        )
        context = host.context(script)
        execution = context.run("x", timeout_s=0.05)
        error = execution.error
        assert error is not None
        assert (True, "CellTimeout", "the line") == (
            execution.timed_out,
            error.name,
            error.traceback,
        )
        assert "variables are kept" in error.value
        assert context.running
        after = context.run("quick", timeout_s=PATIENCE_S)
        assert (None, False) == (after.error, after.timed_out)

    @pytest.mark.usefixtures("quick")
    def test_one_that_does_not_react_is_killed(self, host: Host) -> None:
        context = host.context(serving("say('out', cell, b'x')"))
        execution = context.run("x", timeout_s=0.05)
        error = execution.error
        assert error is not None
        assert (True, "CellTimeout") == (execution.timed_out, error.name)
        assert "variables are lost" in error.value
        assert host.processes[0].wait(PATIENCE_S).signal is not None
        assert not context.running
        for _ in range(2):
            with pytest.raises(LifecycleError, match="it was closed"):
                context.run("x")

    def test_one_whose_kernel_ends_by_the_interrupt_says_so(self, host: Host) -> None:
        script = serving("if ask['do'] == 'interrupt': os._exit(4)")
        context = host.context(script)
        error = context.run("x", timeout_s=0.05).error
        assert error is not None
        assert "variables are lost" in error.value
        until(lambda: not context.running)

    @pytest.mark.usefixtures("quick")
    def test_a_callback_that_fails_stops_the_cell_and_the_next_one_runs(self, host: Host) -> None:
        script = serving(
            "if ask['do'] == 'interrupt':\n    say('err', cell, b'stopped')\n"
            "    say('done', cell, b'1 0')\n"
            "elif ask['code'] == 'next':\n    say('done', cell, b'1 0')\n"
            "else:\n    say('out', cell, b'x')"
        )
        context = host.context(script)

        def fails(_text: str) -> None:
            raise KeyError("mine")

        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                context.run("x", on_stdout=fails)
        assert context._inbox.cell is None
        assert context.run("next").error is None
        assert context.running

    def test_answers_that_nothing_reads_wait_no_longer_than_the_cell_may(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "GRACE_S", 0.1)
        script = f"{HELLO}cell = next(asks())['cell']\nsay('input', cell, b'? ')\nimport time\ntime.sleep(600)"
        context = host.context(script)
        began = time.monotonic()
        execution = context.run("x", timeout_s=0.3, on_input=lambda _prompt: "y" * (4 << 20))
        assert execution.timed_out
        assert time.monotonic() - began < module._SEND_S, "which is for cells without a timeout"
        monkeypatch.setattr(module, "_SEND_S", 0.2)
        context = host.context(script)
        with pytest.raises(ExecError, match="does not read"):
            context.run("x", on_input=lambda _prompt: "y" * (4 << 20))
        assert not context.running

    def test_what_comes_with_the_end_is_told_and_an_end_at_the_limit_is_in_time(self) -> None:
        class Late(Cell):
            """Ends just after the first look at it."""

            def wait(self, *arguments: Any, **options: Any) -> Any:
                news = super().wait(*arguments, **options)
                self.take("out", "-", b"late")
                self.take("done", "-", b"1 0")
                return news

        cell, heard = Late("ab"), list[str]()
        Context._follow(object.__new__(Context), cell, 0.01, (heard.append, None, None), None)
        assert (["late"], False) == (heard, cell.execution.timed_out)


class TestEnds:
    @pytest.mark.parametrize(
        ("end", "reason"),
        [
            ("os._exit(7)", "exited with code 7"),
            ("os.kill(os.getpid(), 9)", "was killed"),
            ("os.write(2, b'z' * 600 + b'last words'); os._exit(1)", "zzlast words"),
            ("os.write(1, bytes(200))", "damaged"),
        ],
    )
    def test_the_cell_that_runs_ends_with_its_kernel_and_says_how(
        self, host: Host, end: str, reason: str
    ) -> None:
        context = host.context(serving(f"say('out', cell, b'before')\n{end}"))
        execution = context.run("x")
        error = execution.error
        assert error is not None
        assert ("ContextEnded", "before") == (error.name, execution.stdout)
        assert reason in error.value
        assert len(error.value) < 700
        assert not context.running
        with pytest.raises(LifecycleError, match=reason):
            context.run("y")
        context.close()
        assert host.processes[0].future.done()
        context.close()

    def test_one_that_ends_while_a_cell_is_made_fails_that_cell(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = host.context(serving(ECHO))

        def token_hex(_size: int) -> str:
            context._inbox.end("gone meanwhile")
            return "ab"

        monkeypatch.setattr(secrets, "token_hex", token_hex)
        cell = context._open()
        assert cell.is_done
        assert cell.execution.error == CellError("ContextEnded", "gone meanwhile")

    def test_a_restart_ends_the_cell_and_all_of_the_old_interpreter(self, host: Host) -> None:
        context = host.context(
            serving(
                "say('out', cell, ask['code'].encode())\nif ask['code'] != 'hang': say('done', cell)"
            )
        )
        before, begun = context.id, threading.Event()
        with ThreadPoolExecutor() as pool:
            running = pool.submit(context.run, "hang", on_stdout=lambda _text: begun.set())
            assert begun.wait(PATIENCE_S)
            context.restart()
            error = running.result(PATIENCE_S).error
        assert error is not None
        assert "ContextEnded" == error.name
        assert host.processes[0].wait(PATIENCE_S).signal is not None
        assert (True, host.processes[1].id) == (context.running, context.id)
        assert before != context.id
        assert "new" == context.run("new").stdout
        context.restart()
        assert "newer" == context.run("newer").stdout
        assert 3 == len(host.processes)

    def test_a_restart_has_the_options_of_the_first_start(self, host: Host, tmp_path: Path) -> None:
        context = Context(host, "bash", cwd=str(tmp_path), env={"X": "7"})
        context.restart()
        first, second = host.given
        assert (first["cwd"], first["env"]) == (second["cwd"], second["env"])

    @pytest.mark.parametrize("is_killed", [True, False])
    def test_a_failed_process_is_told_to_whoever_runs_a_cell(self, is_killed: bool) -> None:
        from concurrent.futures import Future
        from types import SimpleNamespace

        told: list[str] = []
        future: Future[Any] = Future()
        module._at_end(SimpleNamespace(future=future), told.append)
        assert [] == told
        if is_killed:
            ended = SimpleNamespace(exit_code=None, oom_killed=True, stderr=b"")
            future.set_result(ended)
            assert ["its process ran out of memory"] == told
        else:
            future.set_exception(ExecError("no such program"))
            assert ["its process failed: no such program"] == told


class TestVariables:
    def script(self, body: str) -> str:
        return serving(f"if ask['do'] == 'variables':\n    {body}\n    say('done', cell, b'1 0')")

    def answer(self, data: str) -> str:
        return f"say('part', cell, {data}, 'application/json'); say('main', cell)"

    def test_they_are_read_for_python_and_node_alone(self, host: Host) -> None:
        script = self.script(self.answer("""b'[{"name": "x", "type": "int", "value": 7}, 3]'"""))
        for language in ("python", "node"):
            context = host.context(script, language)
            assert [{"name": "x", "type": "int", "value": "7"}] == context.variables()
            assert context._inbox.cell is None
        for language in ("bash", "r", "java", "jupyter:ir"):
            context = host.context(script, language)
            with pytest.raises(Unsupported):
                context.variables()

    @pytest.mark.parametrize(("more", "is_refused"), [(0, False), (1, True)])
    def test_their_list_is_bounded(self, host: Host, more: int, is_refused: bool) -> None:
        size = module.MOST_VARIABLES_BYTES - 2 + more
        context = host.context(self.script(self.answer(f"b'[' + b' ' * {size} + b']'")), "python")
        if is_refused:
            with pytest.raises(ExecError, match="over"):
                context.variables()
        else:
            assert [] == context.variables()

    @pytest.mark.parametrize(
        "body",
        [
            "pass",
            "say('part', cell, b'repr failed', 'value'); say('error', cell)",
            "say('part', cell, b'repr failed', 'value'); say('error', cell); say('main', cell)",
        ],
    )
    def test_one_that_cannot_list_them_says_so_and_goes_on(self, host: Host, body: str) -> None:
        context = host.context(
            self.script(body) + "    else:\n        say('done', cell, b'1 0')\n", "python"
        )
        for _ in range(2):
            with pytest.raises(ExecError, match="repr failed" if "repr" in body else "no answer"):
                context.variables()
        assert context.run("x").error is None

    @pytest.mark.usefixtures("quick")
    def test_they_are_waited_for_no_longer_than_asked(self, host: Host) -> None:
        context = host.context(serving("pass"), "python")
        with pytest.raises(ExecError, match="longer than"):
            context.variables(timeout_s=0.05)


class TestCopies:
    COPY = serving(
        "if ask['do'] == 'copied':\n    say('hello')\nelse:\n    "
        + ECHO.replace("\n", "\n    ").strip()
    )

    def start(self, host: Host, script: str) -> Callable[[Callable[[bytes], None]], Any]:
        def started(feed: Callable[[bytes], None]) -> Any:
            host.script = script.replace(HELLO, "", 1)  # a copy is ready, and says so when asked
            return host.start([], stream_stdin=True, on_stdout=feed)

        return started

    def test_a_copy_is_a_context_of_its_own(self, host: Host, sandbox: Sandbox) -> None:
        context = Context(host, "bash", env={"X": "7"})
        assert context.hold()
        copy = context.copied(host, self.start(host, self.COPY))
        assert host.processes[1].id == copy.id
        assert host.processes[0].id == context.id
        assert "bash" == copy.language
        with context._sending:
            assert "a" == copy.run("a").stdout, "while the original is held"
        context.let_go()
        copy.close()
        assert "b" == context.run("b").stdout
        host.script = serving(ECHO)
        copy.restart()
        assert {"X": "7"} == host.given[-1]["env"]
        assert sandbox is host.sandbox

    @pytest.mark.parametrize("body", ["pass", "os._exit(3)"])
    def test_a_copy_that_does_not_answer_is_killed(
        self, host: Host, body: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = host.context(serving(ECHO))
        if body == "pass":
            monkeypatch.setattr(module, "START_S", 0.2)
        with pytest.raises(ExecError):
            context.copied(host, self.start(host, serving(body)))
        until(host.processes[1].future.done)
        assert "a" == context.run("a").stdout

    def test_a_copy_that_does_not_read_is_killed(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = host.context(serving(ECHO))

        def fail(_context: Context, _data: bytes, _most_s: float = 0) -> None:
            raise ExecError("it does not read")

        with monkeypatch.context() as patch:
            patch.setattr(Context, "_send", fail)
            with pytest.raises(ExecError, match="does not read"):
                context.copied(host, self.start(host, self.COPY))
        assert host.processes[1].future.done()
        assert "a" == context.run("a").stdout

    def test_a_context_goes_on_as_an_earlier_copy(self, host: Host) -> None:
        context = host.context(serving(ECHO))
        context.go_on_as(self.start(host, self.COPY))
        assert host.processes[1].id == context.id
        assert "a" == context.run("a").stdout
        host.processes[0].kill()
        host.processes[0].wait(PATIENCE_S)
        assert context.running, "the end of the one before is not its own"
        host.processes[1].kill()
        until(lambda: not context.running)


class TestRequests:
    def test_they_go_out_one_by_one_and_give_up_in_time(self, host: Host) -> None:
        context = host.context(f"{HELLO}next(asks())\nimport time\ntime.sleep(600)")
        context._send(b'\n{"do": 1}\n')
        for _ in range(2):
            with pytest.raises(ExecError, match="does not read"):
                context._send(bytes(4 << 20), 0.05)
            assert not context._sending.locked()
        with context._sending, pytest.raises(ExecError, match="does not read"):
            context._send(b"\n", 0.01)

    def test_waiting_for_a_reader_keeps_no_descriptor(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)

        class Stdin:
            def write_some(self, data: memoryview) -> int:
                try:
                    return os.write(write, data)
                except BlockingIOError:
                    return 0

            def duplicate(self) -> int:
                return os.dup(write)

        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ExecError):
            _write_within(Stdin(), bytes(1 << 20), time.monotonic() + 0.01)
        assert before == len(os.listdir("/proc/self/fd"))
        held, got = len(os.read(read, 1 << 20)), 0
        assert held
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(
                _write_within, Stdin(), bytes(1 << 20), time.monotonic() + PATIENCE_S
            )
            while got < 1 << 20:
                got += len(os.read(read, 1 << 20))
            writing.result(PATIENCE_S)
        assert before == len(os.listdir("/proc/self/fd"))
        os.close(read)
        os.close(write)

    def test_frames_of_an_ended_kernel_are_none(self) -> None:
        inbox, cell = _Inbox(), Cell("ab")
        inbox.cell = cell
        inbox.end("gone")
        assert cell.is_done
        inbox.cell = other = Cell("cd")
        inbox.feed(b"\x1eout cd 1 -\nx")
        assert "" == other.execution.stdout
        assert inbox.ready.is_set()


class TestOpened:
    def contexts(self, host: Host, find: Callable[[str], Context] | None = None) -> Contexts:
        def begin(language: str, **options: Any) -> Context:
            self.begun.append((language, options))
            return Context(host, "bash" if ":" in language else language, **options)

        self.begun: list[tuple[str, dict[str, Any]]] = []
        return Contexts(begin, find)

    def test_those_that_ended_are_forgotten_and_a_default_begins_again(self, host: Host) -> None:
        contexts = self.contexts(host)
        default = contexts.default("bash")
        assert default is contexts.default("bash")
        other = contexts.default("r")
        assert other is not default
        one = contexts.open("bash", cwd="/", env={"A": "b"})
        assert ("bash", {"cwd": "/", "env": {"A": "b"}}) == self.begun[-1]
        assert [(default, True), (other, True), (one, False)] == contexts.running()
        one.close()
        default.close()
        assert [(other, True)] == contexts.running()
        again = contexts.default("bash")
        assert again is not default
        two = contexts.open("bash")
        assert [two] == contexts._open, "one that has ended is kept no longer"
        assert two is contexts.open(id=two.id)
        with pytest.raises(ExecNotFound):
            contexts.open(id="none")

    def test_a_kernel_is_named_in_place_of_a_language(self, host: Host) -> None:
        contexts = self.contexts(host)
        contexts.open(kernel="ir")
        assert "jupyter:ir" == self.begun[-1][0]

    def test_one_that_another_began_is_found_once(self, host: Host) -> None:
        theirs, asked = Context(host, "bash"), []

        def find(id: str) -> Context:
            asked.append(id)
            if id != theirs.id:
                raise ExecNotFound(id)
            return theirs

        contexts = self.contexts(host, find)
        for _ in range(2):
            assert theirs is contexts.open(id=theirs.id)
        assert [theirs.id] == asked
        for _ in range(2):
            with pytest.raises(ExecNotFound):
                contexts.open(id="none")
        assert [(theirs, False)] == contexts.running()

    @pytest.mark.parametrize("is_default", [True, False])
    def test_one_that_is_added_is_the_default_if_it_is_said(
        self, host: Host, is_default: bool
    ) -> None:
        contexts, context = self.contexts(host), Context(host, "bash")
        contexts.add(context, is_default=is_default)
        assert [(context, is_default)] == contexts.running(), "once"
        assert context is contexts.open(id=context.id)
        assert is_default == (context is contexts.default("bash"))


def test_the_forms_of_results_and_executions_are_read_back() -> None:
    data = {
        "text/plain": "ä".encode(),
        "image/png": b"\x89\xff",
        "image/jpeg": b"\xff\xd8",
        "application/pdf": b"%\xfe",
        "image/svg+xml": b"<svg/>",
    }
    for is_main in (True, False):
        result = Result(data, is_main=is_main)
        assert result == Result.from_json(result.to_json())
    assert "\ufffd" == Result({"text/html": b"\xff"}).html
    for name, mime in (
        ("text", "text/plain"),
        ("html", "text/html"),
        ("markdown", "text/markdown"),
        ("latex", "text/latex"),
        ("svg", "image/svg+xml"),
        ("javascript", "application/javascript"),
    ):
        assert "x" == getattr(Result({mime: b"x"}), name)
        assert None is getattr(Result({"a/b": b"x"}), name)
    assert (b"p", b"j") == (Result({"image/png": b"p"}).png, Result({"image/jpeg": b"j"}).jpeg)
    assert {"a": 1} == Result({"application/json": b'{"a": 1}'}).json
    for wrong in (b"{", b"[" * 100_000):
        with pytest.raises(InvalidRequest):
            _ = Result({"application/json": wrong}).json
