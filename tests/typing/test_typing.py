"""mypy and pyright read the library as its users' checkers do."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ringfence
from ringfence import Client, Sandbox, SandboxSpec
from ringfence.model.parts import ExecParts, SandboxParts, StartParts
from tests.docs.blocks import blocks_of

pytestmark = [pytest.mark.anyone, pytest.mark.full]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = (
    "adk-and",
    "inspect",
    "langchain",
    "openai-agents",
    "pydantic-ai",
    "ray",
    "smolagents",
)
"""Pages whose code needs the framework."""

Found = list[tuple[str, int, str]]
"""File, line and text of each error."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, and the code of every page as a module with the page's line numbers."""
    desk = tmp_path_factory.mktemp("typing")
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, desk)
    for page in PAGES:
        blocks = [
            each
            for each in blocks_of(page.read_text())
            if "python" == each.language
            and "a provider's library" not in each.not_run
            and "the package installed" not in each.not_run
        ]
        if not blocks or page.stem.startswith(FRAMEWORKS):
            continue
        lines: list[str] = []
        for block in blocks:
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
        (desk / f"page_{page.stem.replace('-', '_')}.py").write_text("\n".join(lines) + "\n")
    return desk


def _mypy(desk: Path) -> Found:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    # Pages leave out what a reader would not miss; the programs have it all.
    command += [f"--allow-untyped-{each}" for each in ("defs", "calls", "decorators")]
    command += ["--allow-redefinition", "--no-error-summary", "--output=json", "."]
    env = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    run = subprocess.run(command, cwd=desk, env=env, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return [(each["file"], each["line"], each["message"]) for each in lines]


def _pyright(desk: Path) -> Found:
    config = {
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
        "strict": [str(each.name) for each in PROGRAMS.glob("*.py")],
        "reportMissingModuleSource": False,
    }
    (desk / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=desk, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in json.loads(run.stdout)["generalDiagnostics"]
        if "error" == each["severity"]
    ]


@pytest.mark.parametrize("check", [_mypy, _pyright])
def test_programs_and_pages_are_clean_and_mistakes_are_errors(
    check: Callable[[Path], Found], desk: Path
) -> None:
    if check is _pyright and shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    text = (PROGRAMS / "mistakes.py").read_text().splitlines()
    marked = {number for number, line in enumerate(text, 1) if line.endswith("# error")}

    found = check(desk)

    # A page on writing a package of one's own imports it, one on browsers Playwright.
    clean = [
        f"{file}:{line}: {text}"
        for file, line, text in found
        if "mistakes.py" != file and not re.search("my_package|playwright", text)
    ]
    assert not clean, "\n".join(clean)
    assert marked == {line for file, line, _ in found if "mistakes.py" == file}


def test_every_public_name_is_typed() -> None:
    """The block that checkers read names what `__getattr__` finds, and where it is."""
    tree = ast.parse((ROOT / "src/ringfence/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.dump(node)
                and not node.orelse and isinstance(node.test, ast.Name)]  # fmt: skip
    named = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }

    assert ringfence._public() == set(named)
    for name, module in named.items():
        there = importlib.import_module(f"ringfence.{module}")
        assert getattr(ringfence, name) is getattr(there, name), name


def test_the_parts_are_the_parameters() -> None:
    import inspect

    fields = set(SandboxSpec.__match_args__)
    create = set(inspect.signature(Sandbox.create).parameters)
    execs = set(inspect.signature(Sandbox.exec).parameters)

    assert fields == set(SandboxParts.__annotations__)
    assert fields | {"spec", "backend", "server"} == create
    assert fields <= set(inspect.signature(Client.create).parameters)
    assert set(ExecParts.__annotations__) == execs - {"self", "argv", "more"}
    start = set(inspect.signature(Sandbox.start).parameters)
    assert set(StartParts.__annotations__) == start - {"self", "argv", "more"}
