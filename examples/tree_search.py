"""Search a tree of states: mark, try, judge, and go on from the best marks. Beside it, the same by snapshots.

    python examples/tree_search.py [NODES] [DEPTH]

Each node is a context with the tests of a small program, and one edit more than its parent. The last
lines say how much of the time the sandbox took, which is all but the trying and the judging.
"""

from __future__ import annotations

import sys
import time

from ringfence import Sandbox

BEGIN = """
import random
target = [random.Random(5).randrange(10) for _ in range(20)]
answer = []
def test():
    return sum(a == b for a, b in zip(answer, target))
"""
WIDTH = 10


def edit(sandbox: Sandbox, choice: int) -> int:
    """Try an edit, and run the tests: as many as pass."""
    return int(sandbox.run_code(f"answer.append({choice}); test()").text or 0)


def by_marks(nodes: int, depth: int) -> tuple[int, float, float]:
    """Rewind one sandbox to the mark of the best node, and try each edit from there."""
    began, working = time.monotonic(), 0.0
    best = made = 0
    with Sandbox.create() as sandbox:
        sandbox.run_code(BEGIN)
        mark = sandbox.mark(processes="required")
        for level in range(1, depth + 1):
            kept = mark
            for choice in range(WIDTH):
                if made == nodes:
                    break
                sandbox.rewind(mark)
                started = time.monotonic()
                score = edit(sandbox, choice)
                working += time.monotonic() - started
                made += 1
                if score >= level:
                    best, kept = score, sandbox.mark(processes="required")
                    break
            if kept is mark:
                break
            mark.close()
            mark = kept
        mark.close()
    return best, time.monotonic() - began, working


def by_snapshots(nodes: int, depth: int) -> tuple[int, float, float]:
    """Restore the files of the best node in a new sandbox, and run all of its edits again."""
    began, working = time.monotonic(), 0.0
    best = made = 0
    with Sandbox.create() as sandbox:
        saved = sandbox.snapshot()
    path: list[int] = []
    try:
        for level in range(1, depth + 1):
            for choice in range(WIDTH):
                if made == nodes:
                    break
                with Sandbox.restore(saved.id) as branch:
                    branch.run_code(BEGIN)
                    for earlier in path:
                        edit(branch, earlier)
                    started = time.monotonic()
                    score = edit(branch, choice)
                    working += time.monotonic() - started
                made += 1
                if score >= level:
                    best, path = score, [*path, choice]
                    break
    finally:
        Sandbox.delete_snapshot(saved.id)
    return best, time.monotonic() - began, working


def main() -> None:
    """Print both searches."""
    nodes, depth = (int(word) for word in (*sys.argv[1:], *("200", "20")[len(sys.argv) - 1 :]))
    for search in (by_marks, by_snapshots):
        best, took, working = search(nodes, depth)
        share = 1 - working / took
        print(f"{search.__name__}: {best} tests pass, {took:.2f} s, {share:.0%} of it the sandbox")


if __name__ == "__main__":
    main()
