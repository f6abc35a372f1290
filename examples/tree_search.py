"""Search for edits of a repository that pass its tests: mark, try, judge, rewind; and by snapshots.

    python examples/tree_search.py [NODES] [DEPTH]

A node is the repository and a Python that has loaded it, with its tests and a table. Of each depth's nodes
the best one is gone on from. The lines say how much of the time the sandbox took: all but trying and judging.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from ringfence import Sandbox

FILES = {
    "repository/answers.py": "VALUES = {}\n\ndef answer(number):\n    return VALUES.get(number)\n",
    "repository/test_answers.py": """
import unittest, answers
class Answers(unittest.TestCase):
    pass
for number in range(20):
    check = lambda self, number=number: self.assertEqual(answers.answer(number), number * 7 % 10)
    setattr(Answers, f"test_{number}", check)
""",
}
# Loading takes as long as an agent's imports and data do; the tests of one edit take milliseconds.
LOAD = """
import importlib, json, sys, unittest
sys.dont_write_bytecode = True
sys.path.insert(0, "repository")
table = {number: str(number) for number in range(500_000)}
import answers, test_answers
def attempt(number, value):
    with open("repository/answers.py", "a") as file:
        file.write(f"VALUES[{number}] = {value}\\n")
    importlib.reload(answers)
    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(test_answers).run(found)
    return found.testsRun - len(found.failures) - len(found.errors)
"""


@dataclass
class Search:
    """What a search found, and what it took.

    Attributes:
        trying_s: Of `took_s`, the edits and their tests.
    """

    passed: int = 0
    nodes: int = 0
    took_s: float = 0.0
    trying_s: float = 0.0

    def best(self, values: range, number: int, node: Callable[[], Sandbox]) -> int:
        """Try each value in a node of its own; returns the one with which most tests pass."""
        scores = {}
        for value in values:
            sandbox = node()
            began = time.monotonic()
            scores[value] = self.attempt(sandbox, number, value)
            self.trying_s += time.monotonic() - began
            self.nodes += 1
        self.passed = max(scores.values())
        return max(scores, key=lambda value: scores[value])

    def attempt(self, sandbox: Sandbox, number: int, value: int) -> int:
        found = sandbox.run_code(f"attempt({number}, {value})")
        assert found.error is None, found.error
        return int(found.text or 0)


def by_marks(width: int, depth: int) -> Search:
    """Rewind one sandbox to the mark of the best node for each try."""
    search, began = Search(), time.monotonic()
    with prepared() as sandbox:
        sandbox.run_code(LOAD)
        mark = sandbox.mark(processes="required")

        def node() -> Sandbox:
            sandbox.rewind(mark)
            return sandbox

        for number in range(depth):
            value = search.best(range(width), number, node)
            search.attempt(node(), number, value)
            following = sandbox.mark(processes="required")
            mark.close()
            mark = following
        mark.close()
    search.took_s = time.monotonic() - began
    return search


def by_snapshots(width: int, depth: int) -> Search:
    """Restore the files of the best node in a new sandbox for each try, and load them there."""
    search, began = Search(), time.monotonic()
    with prepared() as sandbox:
        saved = sandbox.snapshot()
    branches: list[Sandbox] = []

    def node() -> Sandbox:
        for each in branches:
            each.terminate()
        branches[:] = [Sandbox.restore(saved.id)]
        branches[0].run_code(LOAD)
        return branches[0]

    try:
        for number in range(depth):
            value = search.best(range(width), number, node)
            search.attempt(node(), number, value)
            before, saved = saved, branches[0].snapshot()
            branches.pop().terminate()
            Sandbox.delete_snapshot(before.id)
    finally:
        for each in branches:
            each.terminate()
        Sandbox.delete_snapshot(saved.id)
    search.took_s = time.monotonic() - began
    return search


def prepared() -> Sandbox:
    """Return a sandbox with the repository."""
    sandbox = Sandbox.create()
    sandbox.files.make_dir("repository")
    for path, text in FILES.items():
        sandbox.files.write(path, text)
    return sandbox


def main() -> None:
    """Print both searches."""
    nodes, depth = (int(word) for word in (*sys.argv[1:], *("200", "20")[len(sys.argv) - 1 :]))
    for search in (by_marks, by_snapshots):
        found = search(nodes // depth, depth)
        share = 1 - found.trying_s / found.took_s
        per_node = (found.took_s - found.trying_s) / found.nodes * 1000
        print(
            f"{search.__name__}: {found.passed} tests pass after {found.nodes} nodes in"
            f" {found.took_s:.1f} s; the sandbox took {share:.0%}, {per_node:.1f} ms a node"
        )


if __name__ == "__main__":
    main()
