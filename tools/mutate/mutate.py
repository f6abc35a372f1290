"""Put faults into the tree that is the current directory, one at a time; count those that tests notice.

Started by tools/mutate.sh in a copy of the tree. The faults are Cosmic Ray's, and removed statements:
docs/decisions/0147.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import glob
import json
import os
import random
import shlex
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import parso
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.operators.operator import Operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkResult

Position = tuple[int, int]
_SOURCE = Path("src/ringfence")
_MOST_OUTPUT = 2000
_LEAST_S, _TIMES = 30.0, 5  # a mutant that takes longer than the tests did is one that hangs


class RemoveStatement(Operator):  # type: ignore[misc]
    """Replace a call that stands alone, or a `raise`, by `pass`: Cosmic Ray has nothing like it."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        if self._is_removable(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        leaf = node.get_first_leaf()
        return parso.python.tree.Keyword("pass", leaf.start_pos, prefix=leaf.prefix)

    @staticmethod
    def _is_removable(node: Any) -> bool:
        if node.parent is None or "simple_stmt" != node.parent.type:
            return False
        if node.type in ("raise_stmt", "del_stmt") or "raise" == getattr(node, "value", ""):
            return True
        if "atom_expr" == node.type and "await" == getattr(node.children[0], "value", ""):
            return True
        last = node.children[-1] if node.type in ("power", "atom_expr") else None
        return last is not None and "(" == last.get_first_leaf().value

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def operators() -> list[str]:
    """The names of all operators that need no arguments."""
    plugins.OPERATOR_PROVIDERS["ringfence"] = {"RemoveStatement": RemoveStatement}
    names = plugins.operator_names()
    return [name for name in names if not plugins.get_operator(name).arguments()]


def sites(module: Path, names: list[str]) -> dict[Position, list[MutationSpec]]:
    """Every place of a module where a fault can be put, and the faults for it."""
    found = defaultdict(list)
    tree = get_ast_from_path(module)
    passive = list(_passive(ast.parse(module.read_bytes())))
    for name in names:
        operator = plugins.get_operator(name)()
        occurrence = -1
        for node in ast_nodes(tree):
            for start, end in operator.mutation_positions(node):
                occurrence += 1
                if not any(first <= start and end <= last for first, last in passive):
                    spec = MutationSpec(str(module), name, occurrence, start, end)
                    found[start].append(spec)
    return found


def _passive(tree: ast.AST) -> Iterator[tuple[Position, Position]]:
    """Annotations and `if TYPE_CHECKING`: nothing of them is executed."""
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts.append(node)
        if isinstance(node, ast.Assign) and "TYPE_CHECKING" in ast.unparse(node.targets[0]):
            parts.append(node)
        for part in parts:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def tests_of(module: Path) -> list[str]:
    """The tests that tests.toml names for a module.

    Raises:
        SystemExit: None are.
    """
    table = tomllib.loads((Path(__file__).parent / "tests.toml").read_text())
    name = str(module.relative_to(_SOURCE))
    for pattern, tests in table.items():
        if fnmatch.fnmatch(name, pattern):
            return [found for test in tests for found in sorted(glob.glob(test))]
    raise SystemExit(f"tools/mutate/tests.toml names no tests for {name}")


def modules(paths: Iterable[str]) -> list[Path]:
    """The modules of these paths, each a file or a folder below src/ringfence or from there."""
    found = []
    for text in paths:
        path = Path(text) if text.startswith("src/") else _SOURCE / text
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in found if "__init__.py" != path.name or path.stat().st_size]


class Runner:
    """Runs the tests of modules, and knows how long those take without a fault."""

    def __init__(self) -> None:
        self._took: dict[str, float] = {}

    def run(self, spec: MutationSpec, tests: list[str]) -> WorkResult:
        command = shlex.join([".venv/bin/python", "-m", "pytest", "-qx", "--tb=line", *tests])
        if command not in self._took:
            began = time.monotonic()
            outcome, output = run_tests(command, 1200)
            if TestOutcome.SURVIVED != outcome:
                raise SystemExit(f"without a fault these fail already: {tests}\n{output}")
            self._took[command] = time.monotonic() - began
        _forget_compiled(Path(spec.module_path))
        limit = _LEAST_S + _TIMES * self._took[command]
        result = mutate_and_test([spec], command, limit)
        _forget_compiled(Path(spec.module_path))
        return result


def _forget_compiled(module: Path) -> None:
    """Two faults of a second and of a size look alike to Python, and the zygote writes bytecode."""
    for path in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="files or folders of src/ringfence"
    )
    parser.add_argument("--most", type=int, default=100, help="faults for each PATH (100)")
    parser.add_argument("--seed", type=int, default=1, help="chooses them (1)")
    parser.add_argument("--report", required=True, help="file for each fault and its outcome")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    names, runner = operators(), Runner()
    rows: list[tuple[str, int, Counter[str]]] = []
    with open(options.report, "a", encoding="utf-8") as report:
        for path in options.paths:
            places = [found for each in modules([path]) for found in sites(each, names).values()]
            chance, counts = random.Random(options.seed), Counter[str]()
            for found in chance.sample(places, min(options.most, len(places))):
                spec = chance.choice(found)
                result = runner.run(spec, tests_of(Path(spec.module_path)))
                outcome = (result.test_outcome or result.worker_outcome).value
                counts[outcome] += 1
                at = f"{spec.module_path}:{spec.start_pos[0]}"
                row = {"path": path, "outcome": outcome, "operator": spec.operator_name, "at": at}
                output = (result.output or "")[-_MOST_OUTPUT:]
                print(json.dumps({**row, "diff": result.diff, "output": output}), file=report)
                report.flush()
                if TestOutcome.SURVIVED == result.test_outcome:
                    print(f"SURVIVED {at}\n{result.diff}", flush=True)
            rows.append((path, len(places), counts))
    for path, there, counts in rows:
        print(
            f"{path}: {counts['killed']} of {counts.total()} noticed, of {there} places: {dict(counts)}"
        )
    raise SystemExit(any(counts["survived"] for _, _, counts in rows))


if __name__ == "__main__":
    main()
