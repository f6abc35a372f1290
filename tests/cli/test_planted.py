"""Modules that lie in the current directory, as in a repository of somebody else's, are not loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, environment

pytestmark = pytest.mark.anyone

# Names of ours, of what we import early and late, and of what Python looks for by itself.
NAMES = (
    *(
        "ringfence",
        "sitecustomize",
        "usercustomize",
        "json",
        "socket",
        "struct",
        "ctypes",
        "random",
    ),
    *("subprocess", "tempfile", "secrets", "fcntl", "marshal", "urllib", "ssl", "h11", "tarfile"),
    *("cryptography", "uvicorn", "launcher", "linux", "errors", "typing", "dataclasses"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path)!r} + '/loaded-{name}', 'w').close()\n"
        )
    return tmp_path


def _ringfence(hostile: Path, python: list[str], *arguments: str) -> tuple[int, list[str]]:
    """How it ended, and what of it was loaded."""
    run = subprocess.run(
        [sys.executable, *python, *arguments],
        cwd=hostile,
        env=environment(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return run.returncode, sorted(path.name for path in hostile.glob("loaded-*"))


@pytest.mark.parametrize(
    "command", [["run", "--", "true"], pytest.param(["doctor"], marks=pytest.mark.full)]
)
def test_nothing_of_the_current_directory_is_loaded(hostile: Path, command: list[str]) -> None:
    # As the installed command: the first entry of the path is not the current directory.
    script = "import sys; sys.path[:1] = []; from ringfence.cli.main import main; sys.exit(main())"
    assert (0, []) == _ringfence(hostile, ["-P", "-m", "ringfence"], *command)
    assert (0, []) == _ringfence(hostile, ["-c", script], *command)


def test_python_itself_runs_what_is_there(hostile: Path) -> None:
    """The control, and why the reference says `-P`."""
    _code, loaded = _ringfence(hostile, ["-m", "ringfence"], "run", "--", "true")
    assert "loaded-ringfence" in loaded
