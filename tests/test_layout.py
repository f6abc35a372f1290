"""The package as it is shipped: no dependency, its data inside, nothing of this machine in it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ringfence.testing.conformance import BackendConformance
from tests.halves import ForAnybody, ForEachUser
from tests.once import ASKS_WHO, FOR_BOTH_AS_OTHERS, FOR_BOTH_AS_ROOT

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "ringfence"
DATA = {".json", ".bpf"}
# What an adapter may import: the framework that its extra installs.
FRAMEWORKS = {
    "adk": {"google", "pydantic"},
    "autogen": {"autogen_core", "pydantic"},
    "harbor": {"harbor"},
    "inspect_ai": {"inspect_ai", "pydantic"},
    "langchain": {"deepagents"},
    "mcp": {"anyio", "mcp", "mcp_types", "pydantic", "uvicorn"},
    "openai_agents": {"agents"},
    "pydantic_ai": {"anyio", "pydantic_ai"},
    "smolagents": {"smolagents"},
}
SERVER = {
    "fastapi",
    "h11",
    "httptools",
    "pydantic",
    "pydantic_core",
    "starlette",
    "uvicorn",
    "uvloop",
    "websockets",
}
"""What the extra `server` brings."""


def _imported(path: Path) -> set[str]:
    """Every module that a file imports by its full name, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and 0 == node.level and node.module:
            names.add(node.module)
    return names


def test_the_core_needs_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [] == project["dependencies"]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_core_imports_only_the_standard_library(path: Path) -> None:
    # _typeshed exists for type checkers only: importing it for real would fail every other test.
    allowed = sys.stdlib_module_names | {"ringfence", "_typeshed"}
    if PACKAGE / "testing" in path.parents:
        allowed |= {"pytest"}  # the extra of that name: for backend authors
    if PACKAGE / "egress" / "ca.py" == path:
        allowed |= {"cryptography"}  # the extra `egress`
    if {PACKAGE / "api", PACKAGE / "daemon"} & {*path.parents}:
        allowed |= SERVER
    if PACKAGE / "client" in path.parents:
        allowed |= {"anyio", "httpx2"}  # the extra `client`
    if PACKAGE / "backends" / "docker" in path.parents:
        allowed |= {"docker"}  # the extra of that name
    if PACKAGE / "images" in path.parents:
        allowed |= {"httpx2", "zstandard"}  # the extra `images`
    if PACKAGE / "integrations" in path.parents:
        allowed |= FRAMEWORKS.get(
            path.relative_to(PACKAGE / "integrations").parts[0].removesuffix(".py"), set()
        )

    assert set() == {name.split(".")[0] for name in _imported(path)} - allowed


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    wanted = {
        str(path.relative_to(ROOT / "src"))
        for path in PACKAGE.rglob("*")
        if path.suffix in DATA | {".py"} or "py.typed" == path.name
    }

    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())

    assert set() == wanted - held


@pytest.mark.parametrize("place", FOR_BOTH_AS_ROOT + FOR_BOTH_AS_OTHERS)
def test_what_runs_once_is_there_and_asks_for_no_user(place: str) -> None:
    """Else it would be left out of the one pass, and skipped or unknown in the other."""
    listed = ROOT / "tests" / place.partition("::")[0]
    files = sorted(listed.rglob("test_*.py")) if listed.is_dir() else [listed]

    assert files
    for file in files:
        assert not ASKS_WHO.search(_what_is_listed(file, place.partition("::")[2]))


def test_nothing_is_left_to_both_passes() -> None:
    """Else neither would run it."""
    for one in FOR_BOTH_AS_ROOT:
        assert not [two for two in FOR_BOTH_AS_OTHERS if one.startswith(two) or two.startswith(one)]


def test_both_halves_are_the_whole_conformance_suite() -> None:
    assert set(BackendConformance.__bases__) == {*ForEachUser.__bases__, *ForAnybody.__bases__}
    assert not set(ForEachUser.__bases__) & set(ForAnybody.__bases__)


def _what_is_listed(file: Path, name: str) -> str:
    """The source of a file, or of what in it `name` begins with, and of the marks of the whole file."""
    source = file.read_text()
    if not name:
        return source
    wanted, found, marks = name.partition("[")[0], [], []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            if any(alias.name.startswith(wanted) for alias in node.names):
                module = f"{node.module}".replace(".", "/")
                found.append(_what_is_listed(ROOT / f"{module}.py", wanted))
        elif getattr(node, "name", "").startswith(wanted):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and "pytestmark" == ast.unparse(node.targets[0]):
            marks.append(ast.unparse(node))
    assert found, f"{file.name} has no {wanted}"
    return "\n".join(found + marks)
