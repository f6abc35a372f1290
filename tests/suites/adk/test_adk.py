"""Our executor under ADK's interface; ADK has no suite for executors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.adk.code_executors.code_execution_utils import (
    CodeExecutionInput,
    CodeExecutionResult,
    CodeExecutionUtils,
    File,
)

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
