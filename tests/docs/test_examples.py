"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.docs.conftest import Reader

pytestmark = pytest.mark.anyone


def _run(argv: list[str], reader: Reader) -> str:
    desk, env = reader
    run = subprocess.run(
        argv, cwd=desk, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert 0 == run.returncode, run.stderr
    return run.stdout


@pytest.fixture(autouse=True)
def needs(require: Callable[[str], None]) -> None:
    require("user namespaces")


def test_hello_sees_what_it_may(reader: Reader) -> None:
    lines = _run(["ringfence", "run", "--", "python3", "examples/hello.py"], reader).splitlines()
    seen = {line[:16].strip(): line[16:] for line in lines}

    assert seen["I am"].startswith("sandbox (uid 1000)")
    assert "CapEff 0000000000000000" in seen["the kernel says"]
    assert seen["processes here"].startswith("1, ")
    assert seen["in /root"] in ("no: Permission denied", "0 entries")
    assert seen["network"].startswith("no: ")
    assert "78498" == seen["primes below 1M"]


def test_hello_outside_sees_more(reader: Reader) -> None:
    """The control: the same script without a sandbox."""
    lines = _run([sys.executable, "examples/hello.py"], reader).splitlines()

    (processes,) = [line for line in lines if line.startswith("processes here")]
    assert str(os.getpid()) in processes.removeprefix("processes here").strip().split(", ")


def test_three_lines(reader: Reader) -> None:
    assert "500000500000\n" == _run([sys.executable, "examples/three_lines.py"], reader)


def test_build_in_mount(reader: Reader) -> None:
    assert "built by Python" in _run(["sh", "examples/build_in_mount.sh"], reader)


def test_protected_repository(reader: Reader) -> None:
    told = _run([sys.executable, "examples/protected_repository.py"], reader)

    assert "main.c: int main() { return 0; }\nAGENTS.md: Be brief.\n" in told


@pytest.mark.full
def test_tree_search(reader: Reader) -> None:
    """A short one; both ways find the same."""
    lines = _run([sys.executable, "examples/tree_search.py", "4", "2"], reader).splitlines()

    assert ["by_marks: 1", "by_snapshots: 1"] == [line.partition(" tests")[0] for line in lines]
    assert all("after 4 nodes" in line and "the sandbox took" in line for line in lines)
