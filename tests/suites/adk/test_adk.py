"""Our executor under ADK's interface; ADK has no suite for executors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.code_executors.code_execution_utils import CodeExecutionInput, File

from ringfence.integrations.adk import RingfenceCodeExecutor
from tests.suites.places import options
from tests.suites.remote import serving

NOBODY: Any = None


@pytest.fixture
def executor() -> Iterator[RingfenceCodeExecutor]:
    made = RingfenceCodeExecutor(timeout_seconds=2, **options())
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
    look = "import subprocess; subprocess.run(['pgrep', '-f', 'sleep 439[1]'])"

    assert (1, True) == (failed.exit_code, "ValueError: no" in failed.stderr)
    assert (124, True) == (late.exit_code, "timed out" in late.stderr)
    assert "" == executor.execute_code(NOBODY, CodeExecutionInput(look)).stdout


def test_over_a_server() -> None:
    with serving() as server:
        executor = RingfenceCodeExecutor(server=server)
        assert "42\n" == executor.execute_code(NOBODY, CodeExecutionInput("print(6 * 7)")).stdout
        executor.terminate()
