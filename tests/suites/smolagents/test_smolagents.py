"""What smolagents asks of every remote executor, from its source distribution, and what it leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest
from smolagents import ChatMessage, CodeAgent, FinalAnswerTool, Model, Tool
from smolagents.utils import AgentError

from ringfence.integrations.smolagents import RingfenceExecutor
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import options
from tests.suites.remote import serving
from tests.suites.sources import module_of

markers: Any = ModuleType("markers")
markers.require_run_all = lambda tests: tests
Common: Any = module_of(
    "smolagents",
    "tests/test_remote_executors.py",
    tests__utils=ModuleType("utils"),
    tests__utils__markers=markers,
).CommonDockerExecutorIntegration


class TestSuite(Common):
    @pytest.fixture
    def custom_executor(self) -> Iterator[RingfenceExecutor]:
        # numpy and pillow are this environment's own, shown inside.
        made = RingfenceExecutor(["pillow", "numpy"], **options(python_env=True))
        yield made
        made.delete()


@pytest.fixture
def executor() -> Iterator[RingfenceExecutor]:
    made = RingfenceExecutor(timeout_s=8, **options())
    yield made
    made.cleanup()


def test_it_is_the_whole_suite(request: pytest.FixtureRequest) -> None:
    assert 10 == sum(getattr(item, "cls", None) is TestSuite for item in request.session.items)


def test_a_timeout_leaves_no_process(executor: RingfenceExecutor) -> None:
    executor("import subprocess; a = 1")
    with pytest.raises(AgentError, match="longer than 8 s"):
        executor("subprocess.run(['setsid', 'sleep', '4361'])")

    assert "none\n" == executor.sandbox.exec(["sh", "-c", left.look(4361)]).stdout_text
    with pytest.raises(AgentError, match="NameError"):
        executor("print(a)")


def test_output_and_value(executor: RingfenceExecutor) -> None:
    answer = executor("import os; print('out'); os.write(2, b'err\\n'); 6 * 7")
    assert ("42", "out\nerr\n") == (answer.output, answer.logs)


def test_too_much_output_is_cut_and_says_so(executor: RingfenceExecutor) -> None:
    whole = executor("for _ in range(9): print('x' * 100_000)").logs
    cut = executor("for _ in range(99): print('x' * 100_000)").logs

    assert (9 * 100_001, False) == (len(whole), "left out" in whole)
    assert (True, True) == (len(cut) < (1 << 20) + 99, "bytes of output are left out" in cut)


def test_a_long_value_is_cut_and_a_long_final_answer_is_whole(executor: RingfenceExecutor) -> None:
    executor._timeout_s = 60.0  # 9 MB, on a machine that does more
    executor.send_tools({"final_answer": FinalAnswerTool()})
    whole, cut = executor("'x' * 900_000").output, executor("'x' * 9_000_000").output
    answer = executor("final_answer('x' * 9_000_000)")

    assert (900_002, False) == (len(whole), "left out" in whole)
    assert (True, True) == (len(cut) < 2 << 20, "characters are left out" in cut)
    assert (True, 9_000_000) == (answer.is_final_answer, len(answer.output))


def test_what_only_a_final_answer_tries_is_not_installed_and_what_a_tool_needs_is(
    executor: RingfenceExecutor,
) -> None:
    """A sandbox has no network unless one is given, and need have neither package."""
    asked: list[str] = []
    executor.sandbox = cast(Any, Asked(executor.sandbox, asked))
    executor.send_tools({"final_answer": FinalAnswerTool()})
    executor.send_tools({"final_answer": FinalAnswerTool()})
    assert [] == asked

    executor.send_tools({"shape": Shape()})
    assert ["numpy"] == asked


class Scripted(Model):
    """What it says, step by step."""

    def __init__(self, *steps: str) -> None:
        super().__init__()
        self.steps = list(steps)

    def generate(self, _messages: Any, **_options: Any) -> ChatMessage:
        return ChatMessage(role="assistant", content=f"<code>\n{self.steps.pop(0)}\n</code>")


def test_an_agents_loop_goes_on_after_a_timeout_and_a_death() -> None:
    """A fresh interpreter has the agent's tools and what it was given; nothing of the step before runs."""
    executor = RingfenceExecutor(timeout_s=4, **options())
    model = Scripted(
        "import subprocess; subprocess.run(['setsid', 'sleep', '4362'])",
        "import os; os._exit(3)",
        f"import subprocess; final_answer(given + subprocess.getoutput({left.look(4362)!r}))",
    )
    with CodeAgent([], model, executor=executor, additional_authorized_imports=["*"]) as agent:
        answer = agent.run("work", additional_args={"given": "given and "})
        errors = [str(step.error) for step in agent.memory.steps if getattr(step, "error", None)]

    assert "given and none" == answer
    assert ["longer than 4 s", "ended under"] == [
        word
        for word, error in zip(("longer than 4 s", "ended under"), errors, strict=True)
        if word in error
    ]


def test_an_agent_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    """Ended from another thread while a step runs."""
    executor = RingfenceExecutor(**options())
    model = Scripted(
        "import subprocess; open('/tmp/begun', 'w'); subprocess.run(['sleep', '4363'])"
    )
    with CodeAgent([], model, executor=executor, additional_authorized_imports=["*"]) as agent:
        agent.max_steps = 1
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(agent.run, "work")
            while not executor.sandbox.files.exists("/tmp/begun"):
                pass
            executor.cleanup()
            running.exception()  # what the agent makes of it is its own affair
    assert "terminated" == executor.sandbox.state


class Shape(Tool):
    name, description, output_type = "shape", "The shape of an array.", "string"
    inputs: ClassVar[Any] = {}

    def forward(self) -> str:
        import numpy  # type: ignore[import-not-found,unused-ignore]

        return str(numpy.zeros(3).shape)


class Asked:
    """A sandbox whose Python lacks every package, and whose pip says what it was asked for."""

    def __init__(self, sandbox: Any, asked: list[str]) -> None:
        self._sandbox, self._asked = sandbox, asked

    def exec(self, argv: list[str], **options: Any) -> Any:
        if "pip" in argv:
            self._asked += argv[argv.index("--break-system-packages") + 1 :]
            argv = ["true"]
        elif "-c" in argv:
            argv = ["printf", "%s\\n", *argv[3:]]
        return self._sandbox.exec(argv, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


_FORGED = """
import os, sys
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
os.write(1, frame.f_locals["request"]["mark"].encode() + {!r})
while {!r}:
    os.write(1, b"x" * 65536)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("answer", "goes_on", "why"),
    [
        (b"", True, "longer than 16777216 bytes"),
        (b"[]\n", False, "makes no sense"),
        (b'{"value": 1}\n', False, "makes no sense"),
    ],
)
def test_an_answer_that_code_forged(answer: bytes, goes_on: bool, why: str) -> None:
    """It can write in the interpreter's place, but neither fill our memory nor break the agent."""
    executor = RingfenceExecutor(**options())
    with pytest.raises(AgentError, match=why):
        executor(_FORGED.format(answer, goes_on))
    assert "1" == executor("1").output
    executor.cleanup()


def test_code_that_ends_the_interpreter(executor: RingfenceExecutor) -> None:
    with pytest.raises(AgentError, match="ended under the code"):
        executor("import os; os._exit(3)")
    assert "1" == executor("1").output


@pytest.mark.once  # pip says it, over and over, inside
def test_a_package_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(AgentError, match="pip install failed"):
        RingfenceExecutor(["no-such-package-anywhere"], **options())


@pytest.mark.once
def test_over_a_server(tmp_path: Path) -> None:
    with serving() as server:
        executor = RingfenceExecutor(server=server)
        executor("a = 40")
        assert "42" == executor("a + 2").output
        executor.cleanup()


@pytest.mark.once
def test_fifty_at_once(tmp_path: Path) -> None:
    """smolagents waits in threads: fifty of them."""
    mount = at_once.mount(tmp_path)

    def one(number: int) -> str:
        executor = RingfenceExecutor(**options(mounts=[mount]))
        try:
            script = at_once.script(number)
            return str(
                executor(f"import subprocess; subprocess.call({script!r}, shell=True)").output
            )
        finally:
            executor.cleanup()

    with ThreadPoolExecutor(at_once.CROWD) as threads:
        assert ["0"] * at_once.CROWD == list(threads.map(one, range(at_once.CROWD)))


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "120" in output_of("smolagents_agent", tmp_path)


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("smolagents")
