"""Parts of adapters that need no framework: where sandboxes come from, outcomes, errors, an interpreter."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.client import AsyncClient, Client
from ringfence.errors import (
    DirectoryNotEmpty,
    ExecError,
    FileError,
    FileExists,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
    ResourceExhausted,
    SandboxNotFound,
    TimeoutExceeded,
)
from ringfence.integrations import interpreter as module
from ringfence.integrations import interpreter_loop, origin, outcome, own_sandboxes
from ringfence.integrations.interpreter import Interpreter
from ringfence.integrations.origin import Origin
from ringfence.integrations.oserrors import as_os_errors
from ringfence.model.execs.exec import KILLED_BY_TERMINATE, ExecResult
from ringfence.sandbox import Sandbox

pytestmark = pytest.mark.anyone


class TestOutcomes:
    def test_how_a_command_ended_is_one_number(self) -> None:
        assert 3 == outcome.exit_code(ExecResult(exit_code=3))
        assert 137 == outcome.exit_code(ExecResult(signal=9))
        assert 124 == outcome.exit_code(ExecResult(signal=9, timed_out=True))
        with pytest.raises(ExecError, match="terminated"):
            outcome.exit_code(ExecResult(signal=9, timed_out=True, killed_by=KILLED_BY_TERMINATE))

    def test_notes_say_what_is_missing(self) -> None:
        assert "" == outcome.notes(ExecResult(exit_code=0))
        both = outcome.notes(ExecResult(signal=9, truncated=True, oom_killed=True)).splitlines()
        assert 2 == len(both)
        assert "cut" in both[0]
        assert "memory" in both[1]
        assert "timed out after 1.5 s" in outcome.notes(
            ExecResult(signal=9, timed_out=True, oom_killed=True, duration_s=1.5)
        )
        argv = outcome.shell_argv("echo $0 x")
        assert ("sh", "-c", "echo $0 x") == (argv[0], argv[1], argv[3])


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "number", "kind"),
        [
            (FileNotFound("x"), errno.ENOENT, FileNotFoundError),
            (NotADirectory("x"), errno.ENOTDIR, NotADirectoryError),
            (IsADirectory("x"), errno.EISDIR, IsADirectoryError),
            (DirectoryNotEmpty("x"), errno.ENOTEMPTY, OSError),
            (FileExists("x"), errno.EEXIST, FileExistsError),
            (PermissionDenied("x"), errno.EACCES, PermissionError),
            (ResourceExhausted("x"), errno.ENOSPC, OSError),
            (FileError("what it was"), errno.EIO, OSError),
        ],
    )
    def test_each_is_pythons_own(self, error: Exception, number: int, kind: type[OSError]) -> None:
        with pytest.raises(kind) as raised, as_os_errors("/its/path"):
            raise error
        assert (number, "/its/path") == (raised.value.errno, raised.value.filename)
        said = "what it was" if number == errno.EIO else os.strerror(number)
        assert said == raised.value.strerror
        assert raised.value.__cause__ is error

    def test_others_stay_what_they_are(self) -> None:
        with pytest.raises(ExecError), as_os_errors("/x"):
            raise ExecError("no file's")


class Made:
    """A sandbox, as an adapter sees it."""

    def __init__(self, id: str) -> None:
        self.id, self.state, self.ended = id, "running", 0

    def terminate(self) -> None:
        self.state = "terminated"
        self.ended += 1


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(own_sandboxes, "_sandboxes", found)
    return found


class TestOwnSandboxes:
    def test_one_is_found_until_it_has_ended(self, kept: dict[str, Any]) -> None:
        one: Any = Made("a")
        other: Any = Made("b")
        assert own_sandboxes.keep(one) is one
        assert own_sandboxes.find("a") is one
        one.terminate()
        with pytest.raises(SandboxNotFound, match="'a'") as refusal:
            own_sandboxes.find("a")
        assert "create a new one" in str(refusal.value.hint)
        assert {} == kept, "nothing is kept of it"
        own_sandboxes.keep(one)
        own_sandboxes.keep(other)
        assert {"b": other} == kept, "nor of others that have ended"

    def test_all_end_with_the_process(self, kept: dict[str, Any]) -> None:
        made: list[Any] = [Made(name) for name in "ab"]
        for each in made:
            own_sandboxes.keep(each)
        own_sandboxes._end_all()
        assert ([1, 1], {}) == ([each.ended for each in made], kept)


class TestOrigins:
    @pytest.mark.parametrize("more", [{"options": {"network": "none"}}, {"server": "http://x"}])
    def test_a_function_of_the_callers_excludes_all_else(self, more: dict[str, Any]) -> None:
        made: Any = Made("a")
        assert Origin(make=lambda: made).sandbox() is made
        with pytest.raises(InvalidRequest, match="excludes") as refusal:
            Origin(make=lambda: made, **more)
        assert "make" == refusal.value.field

    def test_options_and_server_are_those_of_each_sandbox(
        self, monkeypatch: pytest.MonkeyPatch, kept: dict[str, Any]
    ) -> None:
        asked: list[Any] = []

        def create(**how: Any) -> Any:
            asked.append(how)
            return Made(f"s{len(asked)}")

        async def acreate(**how: Any) -> Any:
            return create(**how)

        monkeypatch.setattr(Sandbox, "create", create)

        class Async:
            """An `AsyncSandbox` over one of ours."""

            create = staticmethod(acreate)

            def __init__(self, sandbox: Any) -> None:
                self.sandbox = sandbox

        monkeypatch.setattr(origin, "AsyncSandbox", Async)
        here, there = Origin({"tier": "strong"}), Origin({"tier": "strong"}, "http://x")
        for each, server in ((here, None), (there, "http://x")):
            each.sandbox()
            assert {"tier": "strong", "server": server} == asked[-1]
            each.lasting()
            asyncio.run(each.async_sandbox())
            asyncio.run(each.async_lasting())
            assert {"tier": "strong", "server": server} == asked[-1]
        assert 8 == len(asked)
        assert {"s2", "s4"} == {*kept}, "a server keeps its own"
        assert here.find("s2").id == "s2"
        found: Any = asyncio.run(here.async_find("s4"))
        assert "s4" == found.sandbox.id

    @pytest.mark.parametrize("how", ["async_sandbox", "async_lasting"])
    def test_one_whose_caller_was_cancelled_ends_once_it_is_made(
        self, how: str, monkeypatch: pytest.MonkeyPatch, kept: dict[str, Any]
    ) -> None:
        begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
        made: Any = Made("a")

        def make() -> Any:
            begun.set()
            assert may_end.wait(60)
            return made

        def end(sandbox: Any) -> None:
            sandbox.state = "terminated"
            ended.set()

        async def scene() -> None:
            task = asyncio.ensure_future(getattr(Origin(make=make), how)())
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not ended.is_set()
            may_end.set()
            assert await asyncio.to_thread(ended.wait, 60)

        monkeypatch.setattr(Sandbox, "terminate", end)
        asyncio.run(scene())
        assert "terminated" == made.state

    @pytest.mark.parametrize("state", ["running", "terminated", "none"])
    def test_a_servers_is_found_with_a_connection_that_it_closes(
        self, state: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[str] = []
        found: Any = SimpleNamespace(
            id="s", _view=SimpleNamespace(state=state), owns_transport=False
        )

        def get(_client: Any, name: str) -> Any:
            assert "s" == name
            if state == "none":
                raise SandboxNotFound("no such")
            return found

        async def aget(client: Any, name: str) -> Any:
            return get(client, name)

        async def aclose(_client: Any) -> None:
            closed.append("async")

        monkeypatch.setattr(Client, "__init__", lambda _self, server: None)
        monkeypatch.setattr(AsyncClient, "__init__", lambda _self, server: None)
        monkeypatch.setattr(Client, "get", get)
        monkeypatch.setattr(AsyncClient, "get", aget)
        monkeypatch.setattr(Client, "close", lambda _client: closed.append("sync"))
        monkeypatch.setattr(AsyncClient, "close", aclose)
        there = Origin(server="http://x")
        finders: list[Any] = [lambda: there.find("s"), lambda: asyncio.run(there.async_find("s"))]
        for find in finders:
            found.owns_transport = False
            if state == "running":
                assert find() is found
                assert found.owns_transport
            else:
                with pytest.raises(SandboxNotFound):
                    find()
                assert not found.owns_transport
        assert closed == ([] if state == "running" else ["sync", "async"])


_SMALL = 4096


class Program:
    """An interpreter that answers in pieces."""

    def __init__(self, answers: list[Any]) -> None:
        self.running, self.killed, self.answers = True, 0, answers
        self.asked: list[str] = []
        self.pieces: list[bytes] = []
        self.stdin = SimpleNamespace(write=self._write)
        self.stdout = SimpleNamespace(read=self._read)

    def _write(self, data: bytes) -> None:
        request = json.loads(data)
        self.asked.append(request["code"])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        texts = (each if isinstance(each, bytes) else json.dumps(each).encode() for each in answer)
        data = b"".join(texts).replace(b"MARK", request["mark"].encode())
        size = 3 if len(data) < _SMALL else 1 << 16
        self.pieces += [data[i : i + size] for i in range(0, len(data), size)]

    def _read(self, left: float | None) -> bytes:
        if left is not None and not self.pieces:
            raise TimeoutError
        return self.pieces.pop(0) if self.pieces else b""

    def kill(self) -> None:
        self.killed += 1
        self.running = False

    def wait(self) -> None:
        pass


class TestInterpreter:
    def made(self, *programs: list[Any]) -> tuple[Interpreter, list[Program]]:
        waiting, started = list(programs), list[Program]()

        def start(argv: list[str], **how: Any) -> Program:
            assert ("python9", True) == (argv[0], how["stream_stdin"])
            assert how["max_output_bytes"] >= module._ANSWER_BYTES + module._KEPT_BYTES
            started.append(Program(waiting.pop(0)))
            return started[-1]

        files = SimpleNamespace(write=lambda *_: None)
        sandbox: Any = SimpleNamespace(files=files, start=start)
        return Interpreter(sandbox, python="python9"), started

    def test_an_answer_is_what_follows_the_mark_however_it_comes(self) -> None:
        one, started = self.made(
            [[b"out\n\nMARK", {"result": "1"}, b"\n"], [b'\nMARK{"error": "E", "value": "v"}\n']]
        )
        first, second = one.run("a"), one.run("b")
        assert ("out\n", "1", "") == (first.output, first.result, first.error)
        assert ("", None, "E", "v") == (second.output, second.result, second.error, second.value)
        assert (1, ["a", "b"]) == (len(started), started[0].asked), "one, which keeps its variables"

    def test_the_middle_of_long_output_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        longest, drop = list[int](), module._drop_middle

        def note(output: bytearray) -> int:
            longest.append(len(output))
            return drop(output)

        monkeypatch.setattr(module, "_drop_middle", note)
        piece = b"x" * module._KEPT_BYTES
        one, _started = self.made(
            [[b"begin", piece, piece, piece, b"end\n", b"MARK", {"result": None}, b"\n"]]
        )
        found = one.run("a").output
        assert found.startswith("begin")
        assert found.endswith("end")
        count = 3 * module._KEPT_BYTES + len(b"beginend\n") - module._KEPT_BYTES
        assert f"\n[{count} bytes of output are left out here]\n" in found
        assert max(longest) <= 2 * module._KEPT_BYTES + (1 << 16), "nor is it held meanwhile"

    @pytest.mark.parametrize(
        "answer", [b"MARKno\n", b"MARK[1]\n", b'MARK{"result": 1}\n', b'MARK{"error": {"a": 1}}\n']
    )
    def test_what_code_writes_in_the_place_of_an_answer_is_none(self, answer: bytes) -> None:
        one, started = self.made([[answer]], [[b"MARK", {"result": "2"}, b"\n"]])
        with pytest.raises(ExecError, match="makes no sense"):
            one.run("a")
        assert 1 == started[0].killed
        assert "2" == one.run("b").result, "the next one is fresh"
        assert 2 == len(started)

    def test_an_answer_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_ANSWER_BYTES", 100)
        one, started = self.made([[b"MARK", b"x" * 200]])
        with pytest.raises(ExecError, match="longer than 100 bytes"):
            one.run("a")
        assert 1 == started[0].killed

    def test_code_that_takes_too_long_or_ends_its_interpreter_is_told(self) -> None:
        one, started = self.made([[b"so far"]], [[b"last words"]])
        with pytest.raises(TimeoutExceeded, match=r"5\.0 s"):
            one.run("a", timeout_s=5.0)
        with pytest.raises(ExecError, match="its output: last words"):
            one.run("a")
        assert [1, 1] == [each.killed for each in started]

    def test_each_fresh_one_begins_with_what_it_is_given(self) -> None:
        good = [b"MARK", {"result": "1"}, b"\n"]
        one, started = self.made(
            [good, good, good], [good, good], [[b"MARK", {"error": "E"}, b"\n"]]
        )
        one.prelude["a"] = "first"
        one.run("x")
        one.run("y")
        started[0].running = False
        one.run("z")
        assert [["first", "x", "y"], ["first", "z"]] == [each.asked for each in started]
        one.end()
        one.end()
        assert 1 == started[1].killed
        with pytest.raises(ExecError, match="failed at its start"):
            one.run("w")
        assert (1, ["first"]) == (started[2].killed, started[2].asked)


class TestLoop:
    def test_a_last_expression_is_the_result_and_variables_stay(self) -> None:
        names: dict[str, Any] = {}
        assert {"result": None} == interpreter_loop.run("x = 1", names)
        assert {"result": "2"} == interpreter_loop.run("y = 1\nx + y", names)
        assert {"result": None} == interpreter_loop.run("None", names)
        assert {"result": None} == interpreter_loop.run("", names)

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("1/0", "ZeroDivisionError"),
            ("x =", "SyntaxError"),
            ("raise SystemExit(3)", "SystemExit"),
        ],
    )
    def test_what_code_raises_does_not_end_the_interpreter(self, code: str, error: str) -> None:
        found = interpreter_loop.run(code, {})
        assert error == found["error"]
        assert error in found["traceback"]

    def test_a_result_is_cut_in_its_middle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interpreter_loop, "RESULT_CHARS", 10)
        assert {"result": "'12345678'"} == interpreter_loop.run("'12345678'", {})
        cut = interpreter_loop.run("'123456789'", {})["result"]
        assert "'1234\n[1 characters are left out here]\n6789'" == cut
