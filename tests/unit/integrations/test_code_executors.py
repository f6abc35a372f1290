"""Adapters that run an agent's code: what they ask of a sandbox, and when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from tests.frameworks import adapter

from ringfence.errors import ExecError, FileError, TimeoutExceeded
from ringfence.model.execs.exec import ExecResult
from ringfence.model.mount import OUTPUTS_DIR

pytestmark = pytest.mark.anyone


class Kept:
    """A content of a framework's, which keeps what it is made of."""

    def __init__(self, *given: Any, **content: Any) -> None:
        self.given = given
        self.__dict__ |= content


class Sandbox:
    """Notes what it is asked for, and gives the answers in order."""

    def __init__(self, *answers: ExecResult) -> None:
        self.answers, self.asked = list(answers), list[Any]()
        self.state, self.ended = "running", 0
        self.refuses: set[str] = set()
        self.outputs: dict[str, bytes] = {}
        self.files: Any = SimpleNamespace(
            write=self._write, list=self._list, read=self._read, remove=self._remove
        )

    def _write(self, path: str, data: Any, **how: Any) -> None:
        if path in self.refuses:
            raise FileError(f"{path}: read-only", path=path)
        self.asked.append(("write", path, data, how))

    def _list(self, path: str) -> list[Any]:
        assert OUTPUTS_DIR == path
        return [
            SimpleNamespace(name=name, path=f"{path}/{name}", kind="file", size_bytes=len(data))
            for name, data in self.outputs.items()
        ]

    def _read(self, path: str, max_bytes: int) -> bytes:
        return self.outputs[path.rpartition("/")[2]]

    def _remove(self, path: str) -> None:
        del self.outputs[path.rpartition("/")[2]]

    def exec(self, argv: Any, **how: Any) -> ExecResult:
        self.asked.append(("exec", argv, how))
        return self.answers.pop(0) if self.answers else ExecResult(exit_code=0)

    def terminate(self) -> None:
        self.ended += 1
        self.state = "terminated"


class AsyncSandbox:
    """The same for an event loop."""

    def __init__(self, inner: Sandbox) -> None:
        self.inner = inner
        self.files = SimpleNamespace(write=self._write)

    async def _write(self, path: str, data: Any, **how: Any) -> None:
        self.inner._write(path, data, **how)

    async def exec(self, argv: Any, **how: Any) -> ExecResult:
        return self.inner.exec(argv, **how)

    async def terminate(self) -> None:
        self.inner.terminate()


# -- AutoGen ---------------------------------------------------------------------------------------


@dataclass
class CodeResult:
    exit_code: int
    output: str


@pytest.fixture(scope="module")
def autogen() -> Iterator[Any]:
    component = type("Component", (), {"__class_getitem__": classmethod(lambda cls, _of: cls)})
    frameworks: dict[str, dict[str, Any]] = {
        "autogen_core": {"Component": component},
        "autogen_core.code_executor": {
            "CodeBlock": Kept, "CodeExecutor": type("CodeExecutor", (), {}), "CodeResult": CodeResult,
        },
    }  # fmt: skip
    with adapter("autogen", frameworks) as found:
        yield found


class TestAutogen:
    @pytest.fixture
    def made(self, autogen: Any) -> Any:
        made = autogen.RingfenceCodeExecutor(timeout_s=7.0, tier="light")
        made.sandboxes = []

        async def make() -> AsyncSandbox:
            made.sandboxes.append(Sandbox())
            return AsyncSandbox(made.sandboxes[-1])

        made._origin = SimpleNamespace(
            async_sandbox=make, options={"tier": "light"}, server="http://x"
        )
        return made

    def run(self, made: Any, *blocks: tuple[str, str], answers: tuple[ExecResult, ...] = ()) -> Any:
        async def go() -> Any:
            await made.start()
            made.sandboxes[-1].answers = list(answers)
            linked: list[Any] = []
            token = SimpleNamespace(link_future=linked.append)
            given = [Kept(language=language, code=code) for language, code in blocks]
            done = await made.execute_code_blocks(given, token)
            assert all(isinstance(each, asyncio.Future) for each in linked)
            made.linked = len(linked)
            return done

        return asyncio.run(go())

    def test_blocks_run_one_after_the_other_until_one_fails(self, made: Any) -> None:
        answers = (
            ExecResult(exit_code=0, stdout=b"one\n"), ExecResult(exit_code=3, stderr=b"two\n"),
        )  # fmt: skip
        blocks = (("Python", "# filename: a/b.py\n1"), ("sh", "2"), ("bash", "3"))
        done = self.run(made, *blocks, answers=answers)
        assert (3, "one\ntwo\n", "a/b.py", 2) == (
            done.exit_code, done.output, done.code_file, made.linked,
        )  # fmt: skip
        (sandbox,) = made.sandboxes
        first, ran, second, _ = sandbox.asked
        assert ("write", "a/b.py", {"parents": True}) == (first[0], first[1], first[3])
        assert (["python3", "a/b.py"], 7.0) == (ran[1], ran[2]["timeout_s"])
        assert second[1].endswith(".sh")

    def test_what_cannot_be_run_is_refused(self, made: Any) -> None:
        with pytest.raises(ValueError, match="no language 'r'"):
            self.run(made, ("r", "1"))
        done = self.run(made, ("sh", "true"), ("sh", "# filename: ../x\n1"), ("sh", "true"))
        assert (1, "Filename is not in the workspace") == (done.exit_code, done.output)
        assert done.code_file is not None
        late = ExecResult(signal=9, timed_out=True, duration_s=7.0)
        done = self.run(made, ("sh", "sleep 60"), answers=(late,))
        assert (124, True) == (done.exit_code, done.output.startswith("Timeout: timed out after"))

    def test_where_the_directory_is_read_only_a_block_without_a_name_is_elsewhere(
        self, made: Any, autogen: Any
    ) -> None:
        name = autogen._file_name("1", "py")
        asyncio.run(made.start())
        made.sandboxes[0].refuses = {name, "x.py"}
        done = self.run(made, ("py", "1"))
        assert f"/tmp/{name}" == done.code_file
        with pytest.raises(FileError):
            self.run(made, ("py", "# filename: x.py\n1"))

    def test_one_sandbox_serves_until_it_is_ended_once(self, made: Any, autogen: Any) -> None:
        self.run(made, ("sh", "1"))
        self.run(made, ("sh", "2"))
        assert 1 == len(made.sandboxes)
        asyncio.run(made.restart())
        asyncio.run(made.stop())
        asyncio.run(made.stop())
        assert [1, 1] == [each.ended for each in made.sandboxes]
        saved = made._to_config()
        again = autogen.RingfenceCodeExecutor._from_config(saved)
        assert (7.0, "http://x", {"tier": "light"}) == (
            again._timeout_s, again._origin.server, dict(again._origin.options),
        )  # fmt: skip


# -- ADK -------------------------------------------------------------------------------------------


class BaseCodeExecutor(pydantic.BaseModel):
    timeout_seconds: int | None = None
    stateful: bool = False


@pytest.fixture(scope="module")
def adk() -> Iterator[Any]:
    place = "google.adk.code_executors"
    frameworks: dict[str, dict[str, Any]] = {
        "google": {}, "google.adk": {}, place: {},
        f"{place}.base_code_executor": {"BaseCodeExecutor": BaseCodeExecutor},
        f"{place}.code_execution_utils": {"CodeExecutionResult": Kept, "File": Kept},
    }  # fmt: skip
    with adapter("adk", frameworks) as found:
        yield found


class TestAdk:
    def test_code_runs_with_its_files_and_a_sandbox_that_has_ended_is_replaced(
        self, adk: Any
    ) -> None:
        executor = adk.RingfenceCodeExecutor(stateful=True, tier="light", server="http://x")
        assert ({"tier": "light"}, "http://x", True, 300) == (
            dict(executor._origin.options), executor._origin.server, executor.stateful,
            executor.timeout_seconds,
        )  # fmt: skip
        made: list[Sandbox] = []

        def make() -> Sandbox:
            made.append(Sandbox(ExecResult(exit_code=3, stdout=b"out", stderr=b"err")))
            made[-1].outputs = {"a.txt": b"a"}
            return made[-1]

        executor._origin = SimpleNamespace(lasting=make)
        given = Kept(
            input_files=[Kept(name="in/x", content="text", mime_type="text/plain")], code="print()"
        )
        done = executor.execute_code(None, given)
        out, err, files, code = done.given
        assert ("out", "err", ["a.txt"], 3) == (out, err, [each.name for each in files], code)
        first, second, ran = made[0].asked
        assert ("in/x", b"text", {"parents": True}) == first[1:]
        assert "print()" == second[2]
        assert (["python3", second[1]], 300) == (ran[1], ran[2]["timeout_s"])
        assert {} == made[0].outputs
        executor.timeout_seconds = 7
        executor.execute_code(None, Kept(input_files=[], code=""))
        assert (1, 7) == (len(made), made[0].asked[-1][2]["timeout_s"])
        made[0].state = "terminated"
        executor.execute_code(None, Kept(input_files=[], code=""))
        assert 2 == len(made)
        executor.terminate()
        executor.terminate()
        assert [0, 1] == [each.ended for each in made]

    def test_two_runs_do_not_share_the_outputs_directory(self, adk: Any) -> None:
        executor, running = adk.RingfenceCodeExecutor(), list[int]()
        begun, go_on = threading.Event(), threading.Event()

        class Slow(Sandbox):
            def exec(self, argv: Any, **how: Any) -> ExecResult:
                running.append(1)
                begun.set()
                assert go_on.wait(10)
                running.pop()
                return ExecResult(exit_code=0)

        executor._origin = SimpleNamespace(lasting=Slow)
        given = Kept(input_files=[], code="")
        threads = [
            threading.Thread(target=executor.execute_code, args=(None, given)) for _ in range(2)
        ]
        for each in threads:
            each.start()
        assert begun.wait(10)
        assert not executor._lock.acquire(blocking=False)
        assert [1] == running
        go_on.set()
        for each in threads:
            each.join(10)
        assert [] == running


# -- smolagents ------------------------------------------------------------------------------------


class AgentError(Exception):
    def __init__(self, said: str, logger: Any) -> None:
        super().__init__(said)


class RemotePythonExecutor:
    FINAL_ANSWER_EXCEPTION = "FinalAnswer"

    def __init__(self, additional_imports: list[str], logger: Any, allow_pickle: bool) -> None:
        self.additional_imports, self.logger = additional_imports, logger
        self.allow_pickle = allow_pickle

    def _deserialize_final_answer(self, value: str, allow_pickle: bool) -> Any:
        return value, allow_pickle

    def _patch_final_answer_with_exception(self, tool: Any) -> None:
        tool.patched = True


class Tool:
    def __init__(self, *requirements: str) -> None:
        self.requirements, self.patched = requirements, False

    def to_dict(self) -> dict[str, Any]:
        return {"requirements": self.requirements}


class FinalAnswerTool(Tool):
    pass


@pytest.fixture(scope="module")
def smolagents() -> Iterator[Any]:
    serializer = SimpleNamespace(
        dumps=lambda values, allow_pickle: f"{values} {allow_pickle}",
        get_deserializer_code=lambda allow_pickle: f"pickle = {allow_pickle}",
    )
    frameworks: dict[str, dict[str, Any]] = {
        "smolagents": {},
        "smolagents.default_tools": {"FinalAnswerTool": FinalAnswerTool},
        "smolagents.local_python_executor": {"CodeOutput": Kept},
        "smolagents.monitoring": {
            "AgentLogger": lambda level: SimpleNamespace(log=lambda text: None),
            "LogLevel": SimpleNamespace(INFO=1),
        },
        "smolagents.remote_executors": {"RemotePythonExecutor": RemotePythonExecutor},
        "smolagents.serialization": {"SafeSerializer": serializer},
        "smolagents.tools": {
            "get_tools_definition_code": lambda _tools: "import PIL\nimport numpy\nimport os\n",
        },
        "smolagents.utils": {"AgentError": AgentError},
    }  # fmt: skip
    with adapter("smolagents", frameworks) as found:
        yield found


class TestSmolagents:
    def made(self, module: Any, sandbox: Sandbox, *imports: str, **how: Any) -> Any:
        return module.RingfenceExecutor(imports, make=lambda: sandbox, **how)

    def answering(self, made: Any, *answers: Any) -> list[Any]:
        asked: list[Any] = []
        left = list(answers)

        def run(code: str, timeout_s: float | None) -> Any:
            asked.append((code, timeout_s))
            answer = left.pop(0) if left else Kept(output="", error="", result=None)
            if isinstance(answer, Exception):
                raise answer
            return answer

        made._interpreter = SimpleNamespace(run=run, prelude={})
        return asked

    def test_a_step_is_a_result_a_final_answer_or_an_error_for_the_model(
        self, smolagents: Any
    ) -> None:
        made = self.made(smolagents, Sandbox(), timeout_s=3.0)
        asked = self.answering(
            made,
            Kept(output="said", error="", result="42"),
            Kept(output="said", error="FinalAnswer", value="packed"),
            Kept(output="said", error="ValueError", traceback="Traceback"),
            TimeoutExceeded("it took too long"), ExecError("it died"),
        )  # fmt: skip
        step = made.run_code_raise_errors("x")
        assert ("42", "said", False) == (step.output, step.logs, step.is_final_answer)
        step = made.run_code_raise_errors("x")
        assert (("packed", False), "said", True) == (step.output, step.logs, step.is_final_answer)
        for said in (
            "said\nExecuting code yielded an error:\nTraceback",
            "too long. Variables are lost",
            "it died",
        ):
            with pytest.raises(AgentError, match=said):
                made.run_code_raise_errors("x")
        assert [("x", 3.0)] * 5 == asked

    def test_only_what_is_missing_is_installed_and_a_failure_leaves_no_sandbox(
        self, smolagents: Any
    ) -> None:
        sandbox = Sandbox(ExecResult(exit_code=0, stdout=b"pandas>=2\n"))
        made = self.made(smolagents, sandbox, "numpy", "pandas>=2")
        look, pip = sandbox.asked
        assert ["numpy", "pandas>=2"] == look[1][3:] == made.installed_packages
        assert ["pandas>=2"] == pip[1][pip[1].index("--break-system-packages") + 1 :]
        made.cleanup()
        assert 1 == sandbox.ended
        none = Sandbox()
        self.made(smolagents, none)
        self.made(smolagents, none, "numpy")
        assert 1 == len(none.asked), "all of it is there"
        failing = Sandbox(
            ExecResult(exit_code=0, stdout=b"x\n"), ExecResult(exit_code=1, stderr=b"no network")
        )
        with pytest.raises(AgentError, match="no network"):
            self.made(smolagents, failing, "x")
        assert 1 == failing.ended

    def test_tools_come_with_what_they_import_and_are_there_again_in_a_fresh_interpreter(
        self, smolagents: Any
    ) -> None:
        sandbox = Sandbox()
        made = self.made(smolagents, sandbox, "known")
        asked = self.answering(made)
        sandbox.answers = [ExecResult(exit_code=0, stdout=b"")]
        final = FinalAnswerTool("PIL", "numpy", "smolagents")
        made.send_tools({"final_answer": final, "other": Tool("PIL", "known", "requests")})
        assert final.patched
        assert ["pillow", "requests"] == sandbox.asked[-1][1][3:]
        assert ["known", "pillow", "requests"] == made.installed_packages
        [(code, _)] = asked
        assert code.count("except ImportError:") == 2
        assert code.endswith("import os\n")
        assert {code: code} == made._interpreter.prelude
        made.send_variables({})
        assert 1 == len(asked)
        made.send_variables({"a": 1})
        assert "pickle = False" in asked[-1][0]
        assert asked[-1][0] == made._interpreter.prelude["variables"]
