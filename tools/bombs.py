"""Let every bomb of tests/bombs.py go off in a backend, N times each, and print what became of it.

    tools/bombs.py BACKEND [-n TIMES] [NAME...]

A neighbour of the same backend is asked for an answer all the while. For each bomb: how many sandboxes
lived, how its end was told, and how long the neighbour took. Exit status 1 where a sandbox did not live.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.bombs import BOMBS, limits_of, set_off

from ringfence import Sandbox
from ringfence.errors import RingfenceError


class Neighbour(threading.Thread):
    """Somebody in another sandbox, who wants an answer fifty times a second."""

    def __init__(self, backend: str) -> None:
        super().__init__(daemon=True)
        self.sandbox = Sandbox.create(backend=backend)
        self.answers_s: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            before = time.perf_counter()
            self.sandbox.exec(["true"])
            self.answers_s.append(time.perf_counter() - before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("names", nargs="*")
    given = parser.parse_intermixed_args()
    neighbour = Neighbour(given.backend)
    neighbour.start()
    has_died = False
    for name in given.names or BOMBS:
        neighbour.answers_s = []
        lived, told = 0, Counter[str]()
        for _ in range(given.n):
            try:
                with Sandbox.create(
                    backend=given.backend, limits=limits_of(given.backend)
                ) as sandbox:
                    told[set_off(sandbox, name)] += 1
                lived += 1
            except (RingfenceError, AssertionError) as exc:
                told[f"DIED: {exc!r}"[:120]] += 1
        answers = sorted(neighbour.answers_s) or [0.0]
        p50, p99 = (answers[int(len(answers) * part)] * 1000 for part in (0.5, 0.99))
        words = "; ".join(f"{how} ({count})" for how, count in told.most_common(4))
        print(
            f"{name:22} lived {lived}/{given.n}  neighbour p50 {p50:4.0f} p99 {p99:4.0f} ms  {words}",
            flush=True,
        )
        has_died |= lived < given.n
    neighbour.ended.set()
    neighbour.join()
    neighbour.sandbox.terminate()
    return int(has_died)


if __name__ == "__main__":
    sys.exit(main())
