"""Every claimed version of Python runs sandboxes, not only the one that runs the tests."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.anyone]

_ROOT = Path(__file__).resolve().parents[1]

_PROGRAM = Path(__file__).parent / "on_each_python.py"


def interpreter(version: str) -> str | None:
    """Where this version is installed: on PATH, or by pyenv."""
    installed = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *installed):
        # pyenv puts names on PATH that it then refuses to run.
        if (
            path
            and 0 == subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode
        ):
            return path
    return None


def claimed() -> list[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    names = [line.rpartition(" :: ")[2] for line in project["classifiers"]]
    return [name for name in names if name.startswith("3.")]


@pytest.mark.parametrize("version", claimed())
def test_sandboxes_run_on(version: str, tmp_path: Path) -> None:
    """Creates, loops, threads, rules, snapshots and hibernation work on each claimed version."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed (tools/newest_python.sh brings Debian's)")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(_ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", str(tmp_path)),
    }

    done = subprocess.run(
        [python, "-W", "error", str(_PROGRAM)],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )

    assert ("", 0) == (done.stderr, done.returncode)
    assert f"{version}\n" == done.stdout
