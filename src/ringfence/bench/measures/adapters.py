"""adapters: what importing each one costs beyond its framework, where that is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import statistics
import subprocess
import sys

from ..rows import VALUE, Missing, Row, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings

ADAPTERS = (
    "adk",
    "autogen",
    "harbor",
    "inspect_ai",
    "langchain",
    "mcp.server",
    "openai_agents",
    "pydantic_ai",
    "smolagents",
)
_TIMES = 5
# Collecting garbage means looking at all that the framework made: that is not the adapter's cost.
_SCRIPT = """
import gc, sys, time
{framework}
gc.disable()
before, started = set(sys.modules), time.process_time()
import {module}
print((time.process_time() - started) * 1e3, *sorted(set(sys.modules) - before))
"""


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """Each in a Python of its own that has imported the framework already."""
    for name in ADAPTERS:
        try:
            found = [cost(name) for _ in range(1 if settings.quick else _TIMES)]
        except ImportError as exc:
            yield Missing(f"adapter {name}", str(exc))
            continue
        yield Row(
            "adapters",
            f"import of {name}, CPU beyond its framework",
            "ms",
            statistics.median(ms for ms, _ in found),
            target=Target(VALUE, must=150),
            samples=len(found),
            note=f"{len(found[0][1])} modules",
        )


def cost(name: str) -> tuple[float, list[str]]:
    """Milliseconds of processor time that importing an adapter takes, and the modules that come with it.

    Raises:
        ImportError: Its framework is not installed, or is another version.
    """
    module = f"ringfence.integrations.{name}"
    script = _SCRIPT.format(framework="\n".join(framework_of(module)), module=module)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise ImportError(run.stderr.strip().rpartition("\n")[2])
    ms, *modules = run.stdout.rpartition("\n")[0].rpartition("\n")[2].split()
    return float(ms), modules


def framework_of(module: str) -> list[str]:
    """List the foreign imports of an adapter, as statements."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    place = os.path.dirname(spec.origin)
    paths = [spec.origin]
    if os.path.basename(place) != "integrations":  # a package: of several modules
        paths = [entry.path for entry in os.scandir(place) if entry.name.endswith(".py")]
    found: set[str] = set()
    for path in paths:
        with open(path, encoding="utf-8") as file:
            found.update(_foreign(ast.parse(file.read())))
    return sorted(found)


def _foreign(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            name = node.module or ""
        elif isinstance(node, ast.Import):
            name = node.names[0].name
        else:
            continue
        if name.partition(".")[0] not in sys.stdlib_module_names:
            yield ast.unparse(node)
