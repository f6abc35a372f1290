"""What tools/test.sh does with tests that failed: a real pytest, over toy tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

HERE = Path(__file__).parent.parent / "tools"
SCRIPT = f"""
. {HERE}/env.sh; . {HERE}/again.sh
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
run() {{ "$python" -m pytest -ra "$@" >> out 2>&1; }}
run --cache-clear --junitxml=report.xml toy.py
cp out log
count=$("$python" {HERE}/counts.py report.xml | cut -d' ' -f3)
fails_again "$count" log run toy.py && echo failed || echo passed
"""
SOUND = "def test_sound(): pass\n"
ONCE = """
import pathlib
def test_once():
    seen = pathlib.Path("seen")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
LEAKS = """
import pathlib, pytest
@pytest.fixture(scope="session", autouse=True)
def nothing_leaks():
    yield
    if not pathlib.Path("seen_leak").exists():
        pathlib.Path("seen_leak").touch()
        pytest.fail("the test run left behind: something")
"""
ALWAYS = "def test_always_{}(): assert False\n"


def say(directory: Path, tests: str) -> list[str]:
    (directory / "toy.py").write_text(tests)
    script = f"python={sys.executable}; {SCRIPT}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    return done.stdout.splitlines()


@pytest.mark.full
def test_what_passes_alone_passes_and_is_named(tmp_path: Path) -> None:
    said = say(tmp_path, SOUND + ONCE)

    assert "passed" == said[-1]
    assert any(line.startswith("FLAKY FAILED toy.py::test_once") for line in said), said


@pytest.mark.full
@pytest.mark.parametrize(
    ("tests", "times"),
    [
        (SOUND + ALWAYS.format(1), 2),
        (SOUND + ONCE + ALWAYS.format(1), 2),
        ("".join(map(ALWAYS.format, range(6))), 1),
        (LEAKS + SOUND, 1),
        ("import nothing_of_that_name\n", 2),
    ],
)
def test_what_fails_again_or_is_too_much_fails(tmp_path: Path, tests: str, times: int) -> None:
    said = say(tmp_path, tests)

    assert "failed" == said[-1]
    assert not any("FLAKY" in line for line in said), said
    assert times == (tmp_path / "out").read_text().count(" test session starts ")


@pytest.mark.full
def test_pytest_loads_what_was_rewritten_before_it_ran(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text("def test_toy():\n    assert []\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    traces = []

    for name in ("before", "after"):
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--debug={name}", "test_toy.py"]
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "E       assert []" in ended.stdout  # the values are shown all the same
        traces.append((tmp_path / name).read_text())
        subprocess.run([sys.executable, HERE / "rewrite_tests.py", tmp_path], check=True)

    assert ["found cached rewritten pyc" in trace for trace in traces] == [False, True]
