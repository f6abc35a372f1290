"""Our executor under ADK's interface; ADK has no suite for executors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.code_executors.code_execution_utils import (
    CodeExecutionInput,
    CodeExecutionResult,
    CodeExecutionUtils,
    File,
)
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from ringfence.errors import ExecError, LifecycleError
from ringfence.integrations.adk import OUTPUT_BYTES, RingfenceCodeExecutor
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import options
from tests.suites.remote import serving

NOBODY: Any = None


@pytest.fixture
def executor() -> Iterator[RingfenceCodeExecutor]:
    made = RingfenceCodeExecutor(timeout_seconds=8, **options())
    yield made
    made.terminate()


def test_files_in_and_out(executor: RingfenceCodeExecutor) -> None:
    code = """
import os, pathlib
text = pathlib.Path("given.csv").read_text()
print(len(text))
(pathlib.Path(os.environ["RINGFENCE_OUTPUTS_DIR"]) / "made.txt").write_text(text.upper())
"""
    given = CodeExecutionInput(code, [File("given.csv", b"a,b", "text/csv")])
    result = executor.execute_code(NOBODY, given)
    again = executor.execute_code(NOBODY, CodeExecutionInput("print('only this')"))

    assert ("3\n", 0) == (result.stdout, result.exit_code)
    assert [("made.txt", b"A,B", "text/plain")] == [
        (each.name, each.content, each.mime_type) for each in result.output_files
    ]
    assert [] == again.output_files


def test_a_failure_and_a_timeout_are_results(executor: RingfenceCodeExecutor) -> None:
    failed = executor.execute_code(NOBODY, CodeExecutionInput("raise ValueError('no')"))
    code = "import subprocess; subprocess.run(['setsid', 'sleep', '4391'])"
    late = executor.execute_code(NOBODY, CodeExecutionInput(code))
    look = f"import subprocess; subprocess.run({left.look(4391)!r}, shell=True)"

    assert (1, True) == (failed.exit_code, "ValueError: no" in failed.stderr)
    assert (124, True) == (late.exit_code, "timed out" in late.stderr)
    assert "none\n" == executor.execute_code(NOBODY, CodeExecutionInput(look)).stdout


def test_too_much_output_is_cut_and_says_so(executor: RingfenceCodeExecutor) -> None:
    def say(count: int) -> CodeExecutionResult:
        return executor.execute_code(NOBODY, CodeExecutionInput(f"print('x' * {count}, end='')"))

    whole, cut = say(OUTPUT_BYTES // 2), say(OUTPUT_BYTES + 1)

    assert (OUTPUT_BYTES // 2, "") == (len(whole.stdout), whole.stderr)
    assert len(cut.stdout) < OUTPUT_BYTES + 99
    assert (True, "") == ("was cut" in cut.stdout, cut.stderr)


def test_only_a_failure_is_shown_as_one(executor: RingfenceCodeExecutor) -> None:
    """The framework takes anything on standard error for a failure, and nothing for a success."""

    def shown(code: str) -> tuple[str, str]:
        result = executor.execute_code(NOBODY, CodeExecutionInput(code))
        part = CodeExecutionUtils.build_code_execution_result_part(result)
        return part.code_execution_result.outcome.name, part.code_execution_result.output

    warned = shown("import sys; print('made', flush=True); print('a warning', file=sys.stderr)")
    silent = shown("import os; os._exit(3)")
    loud = shown("raise ValueError('no')")

    assert ("OUTCOME_OK", True) == (warned[0], "made\n\na warning" in warned[1])
    assert ("OUTCOME_FAILED", "ended with exit code 3") == silent
    assert ("OUTCOME_FAILED", True) == (loud[0], "ValueError: no" in loud[1])


class Scripted(BaseLlm):
    """What it says, step by step."""

    steps: list[str] = []  # noqa: RUF012  pydantic copies defaults

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        part = types.Part.from_text(text=self.steps.pop(0))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def code(text: str) -> str:
    return f"```python\nimport subprocess\n{text}\n```"


def test_an_agents_loop() -> None:
    """A step that takes too long, then one that says what is left of it."""
    executor = RingfenceCodeExecutor(timeout_seconds=4, **options())
    steps = [
        code("subprocess.run(['setsid', 'sleep', '4392'])"),
        code(f"print(subprocess.getoutput({left.look(4392)!r}))"),
        "done",
    ]
    agent = LlmAgent(name="worker", model=Scripted(model="m", steps=steps), code_executor=executor)
    events = asyncio.run(InMemoryRunner(agent=agent).run_debug("work", quiet=True))
    executor.terminate()

    parts = [part for event in events if event.content for part in event.content.parts or ()]
    said = [part.code_execution_result.output for part in parts if part.code_execution_result]
    assert ["timed out" in said[0], said[1].strip()[-4:]] == [True, "none"]


def test_what_is_stopped_leaves_no_process(executor: RingfenceCodeExecutor) -> None:
    """ADK cancels nothing that runs: whoever ends the executor meanwhile ends the code."""
    executor.execute_code(NOBODY, CodeExecutionInput("1"))
    sandbox: Any = executor._sandbox
    given = CodeExecutionInput("open('begun', 'w'); import time; time.sleep(4393)")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(executor.execute_code, NOBODY, given)
        while not sandbox.files.exists("begun"):
            pass
        sandbox.terminate()
        with pytest.raises((ExecError, LifecycleError)):
            running.result()
    assert "1\n" == executor.execute_code(NOBODY, CodeExecutionInput("print(1)")).stdout


def test_what_never_ends_is_ended(executor: RingfenceCodeExecutor) -> None:
    assert (300, 8) == (RingfenceCodeExecutor().timeout_seconds, executor.timeout_seconds)


@pytest.mark.once
def test_fifty_at_once(tmp_path: Path) -> None:
    """ADK waits in threads: fifty of them."""
    mount = at_once.mount(tmp_path)

    def one(number: int) -> str:
        executor = RingfenceCodeExecutor(**options(mounts=[mount]))
        try:
            code = (
                f"import subprocess; print(subprocess.call({at_once.script(number)!r}, shell=True))"
            )
            return str(executor.execute_code(NOBODY, CodeExecutionInput(code)).stdout)
        finally:
            executor.terminate()

    with ThreadPoolExecutor(at_once.CROWD) as threads:
        assert ["0\n"] * at_once.CROWD == list(threads.map(one, range(at_once.CROWD)))


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "5050" in output_of("adk_agent", tmp_path)


@pytest.mark.once
def test_over_a_server() -> None:
    with serving() as server:
        executor = RingfenceCodeExecutor(server=server)
        assert "42\n" == executor.execute_code(NOBODY, CodeExecutionInput("print(6 * 7)")).stdout
        executor.terminate()


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("adk")
