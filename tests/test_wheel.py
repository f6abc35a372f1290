"""The wheel works in a fresh environment of each claimed Python; `make extras` tries the extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_pythons import claimed, interpreter

pytestmark = [pytest.mark.full, pytest.mark.anyone]

ROOT = Path(__file__).parents[1]
SYSTEM = "/usr/bin/python3"


@pytest.fixture(scope="module", name="wheel")
def fixture_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def _system() -> str | None:
    new_enough = [SYSTEM, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not os.path.exists(SYSTEM) or subprocess.run(new_enough, check=False).returncode:
        return None
    return SYSTEM


def _install(python: str, wheel: Path, place: Path) -> list[str]:
    """Unpack the wheel into a new environment, as pip does, and return its `ringfence` command."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(place)], check=True)
    own = str(place / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([own, "-I", "-c", ask], check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site.stdout.strip())
    entry = "import sys; from importlib.metadata import entry_points as e; "
    entry += "(c,) = e(group='console_scripts', name='ringfence'); sys.exit(c.load()())"
    return [own, "-I", "-W", "error", "-c", entry]


@pytest.mark.parametrize("version", ["system", *claimed()])
def test_the_wheel_runs_a_sandbox(
    version: str, wheel: Path, tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("user namespaces")
    python = _system() if "system" == version else interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed, or too old")
    command = _install(python, wheel, tmp_path / "env")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        env["XDG_RUNTIME_DIR"] = runtime

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ("", 0) == (done.stderr, done.returncode)
        return done.stdout

    report = json.loads(run("doctor", "--json"))
    native = next(each for each in report["backends"] if "native" == each["backend"])
    assert native["available"], native["reason"]
    assert "inside\n" == run("run", "--", "echo", "inside")
