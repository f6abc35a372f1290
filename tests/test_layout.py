"""The package as it is shipped: no dependency, its data inside, nothing of this machine in it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.testing.conformance import BackendConformance
from tests.halves import ForAnybody, ForEachUser
from tests.passes import marks_of

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "ringfence"
DATA = {".json", ".bpf"}
# What an adapter may import: the framework that its extra installs.
FRAMEWORKS = {
    "adk": {"google", "pydantic"},
    "autogen": {"autogen_core", "pydantic"},
    "deepagents_paths": {"deepagents"},
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


@functools.cache
def _imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement of a file, also of its functions."""
    nodes = _statements(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk statements alone: they are a tenth of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)


def _imported(path: Path) -> set[str]:
    """Every module that a file imports by its full name, anywhere in it."""
    names: set[str] = set()
    for node in _imports(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and 0 == node.level and node.module:
            names.add(node.module)
    return names


def test_the_core_needs_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [] == project["dependencies"]


def test_the_core_imports_only_the_standard_library() -> None:
    others = {path: _foreign(path) for path in PACKAGE.rglob("*.py")}

    assert {} == {str(path.relative_to(PACKAGE)): names for path, names in others.items() if names}


def _foreign(path: Path) -> set[str]:
    """Packages that a file imports and may not."""
    # _typeshed exists for type checkers only: importing it for real would fail every other test.
    allowed = sys.stdlib_module_names | {"ringfence", "_typeshed"}
    if PACKAGE / "testing" in path.parents:
        allowed |= {"pytest"}  # the extra of that name: for backend authors
    if PACKAGE / "egress" / "tls" / "ca.py" == path:
        allowed |= {"cryptography"}  # the extra `egress`
    if {PACKAGE / "api", PACKAGE / "daemon", PACKAGE / "e2b"} & {*path.parents}:
        allowed |= SERVER
    if PACKAGE / "client" in path.parents:
        allowed |= {"anyio", "httpx2"}  # the extra `client`
    if PACKAGE / "backends" / "docker" in path.parents:
        allowed |= {"docker"}  # the extra of that name
    if PACKAGE / "images" in path.parents:
        allowed |= {"httpx2", "zstandard"}  # the extra `images`
    if PACKAGE / "snapshots" / "shared.py" == path:
        allowed |= {"fsspec"}  # the extra `ray`
    if {PACKAGE / "ray", PACKAGE / "cluster"} & {*path.parents}:
        allowed |= {"ray"}  # the extra of that name
    if PACKAGE / "cluster" in path.parents:
        allowed |= SERVER | {"anyio", "httpx2", "cryptography"}
    if PACKAGE / "integrations" in path.parents:
        allowed |= FRAMEWORKS.get(
            path.relative_to(PACKAGE / "integrations").parts[0].removesuffix(".py"), set()
        )

    return {name.split(".")[0] for name in _imported(path)} - allowed


def test_files_import_one_another_in_no_large_cycle() -> None:
    """Imports for type checkers count: they too tell which files have to be read together."""
    cycles = _cycles(_import_graph())

    assert {frozenset({"ringfence.spool.reader", "ringfence.spool.track"})} <= cycles
    assert [] == [sorted(names) for names in cycles if len(names) > 3]


def _import_graph() -> dict[str, set[str]]:
    """Each module of the package, and the modules that it imports anywhere in its file."""
    paths = {_name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        parents = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        found = graph[name] = set()
        for node in _imports(path):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = parents[: len(parents) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                for alias in node.names:
                    module = f"{base}.{alias.name}"
                    found.add(module if module in paths else base)
        found &= paths.keys() - {name}
    return graph


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules in which each one leads to each other one."""
    reached = {name: _reached_from(name, graph) for name in graph}
    return {frozenset(b for b in reached[a] if a in reached[b]) for a in graph}


def _reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [*graph[name]]
    while ahead:
        if (module := ahead.pop()) not in found:
            found.add(module)
            ahead += graph[module]
    return found


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


def _shared() -> list[tuple[str, str]]:
    """Each file or definition of the tests that is marked `anyone`: its name and its source."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_text()
        if "anyone" in marks_of(path):
            found.append((name, source))
            continue
        if "pytest.mark.anyone" not in source:
            continue
        for node in ast.parse(source).body:
            decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
            if "pytest.mark.anyone" in decorators:
                found.append((f"{name}::{getattr(node, 'name', '')}", ast.unparse(node)))
    return found


def test_what_runs_once_asks_for_no_user() -> None:
    """Else the pass that runs it could be the wrong one."""
    shared = _shared()

    assert 100 < len(shared)
    assert [] == [
        name for name, text in shared if re.search(r"mark\.root|gete[u]id|am_[r]oot", text)
    ]


def test_each_gear_has_its_files() -> None:
    files = {path: marks_of(path) for path in (ROOT / "tests").rglob("test_*.py")}

    assert [] == [path for path, marks in files.items() if marks >= {"root", "rootless"}]
    assert 20 < sum("full" in marks for marks in files.values()) < len(files) / 2


_IMPORT = re.compile(r"\bfrom (ringfence[\w.]*) import (\w+(?:, \w+)*)")


def test_programs_in_strings_import_what_is_there() -> None:
    """No checker of types reads a program that a test or a process starts from text."""
    named = {
        (module, name)
        for top in ("src", "tests", "tools")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".sh"}
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8"))
        for name in names.split(", ")
        if not module.startswith("ringfence.integrations")  # those need their frameworks
    }

    assert [] == sorted(
        f"{module}: {name}" for module, name in named if not _is_there(module, name)
    )


def _is_there(module: str, name: str) -> bool:
    path = ROOT / "src" / Path(*module.split("."))
    if (path / f"{name}.py").is_file() or (path / name).is_dir():
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.is_file() and bool(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")))


def test_both_halves_are_the_whole_conformance_suite() -> None:
    assert set(BackendConformance.__bases__) == {*ForEachUser.__bases__, *ForAnybody.__bases__}
    assert not set(ForEachUser.__bases__) & set(ForAnybody.__bases__)


def test_a_short_module_says_why_it_is_separate() -> None:
    short = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < 40
    ]

    assert [] == [
        str(path.relative_to(PACKAGE))
        for path in short
        if "Kept separate: " not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
