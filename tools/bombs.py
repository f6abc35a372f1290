"""Let every bomb of tests/bombs.py go off in a backend, N times each, and print what became of it.

    tools/bombs.py BACKEND [-n TIMES] [-j JOBS] [-t SECONDS] [NAME...]

From the bomb's start to the end of its sandbox, a neighbour of the same backend is asked for an answer. For
each bomb: how many sandboxes lived, how its end was told, and how long the neighbour took meanwhile. With
`-j`, bombs of different kinds go off at once. The rounds go through all kinds, so that SIGTERM prints what is
done so far. Exit status 1 where a sandbox did not live, or a bomb never began: its timeout, `-t`, was too
short for this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.bombs import BOMBS, NEVER_BEGAN, limits_of, set_off, timeout_of

from ringfence import Sandbox
from ringfence.errors import RingfenceError, Unsupported


class Neighbour(threading.Thread):
    """Somebody in another sandbox, who wants an answer fifty times a second."""

    def __init__(self, backend: str) -> None:
        super().__init__(daemon=True)
        self.sandbox = Sandbox.create(backend=backend)
        self.during: Counter[str] = Counter()
        self.answers_s: defaultdict[str, list[float]] = defaultdict(list)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            names = [name for name, count in self.during.copy().items() if count]
            before = time.perf_counter()
            self.sandbox.exec(["true"])
            for name in ["all", *names]:
                self.answers_s[name].append(time.perf_counter() - before)

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        self.during[name] += 1
        try:
            yield
        finally:
            self.during[name] -= 1

    def told(self, name: str) -> str:
        answers = sorted(self.answers_s[name]) or [0.0]
        p50, p99 = (answers[int(len(answers) * part)] * 1000 for part in (0.5, 0.99))
        return f"neighbour p50 {p50:4.0f} p99 {p99:4.0f} ms of {len(answers)}"


class Range:
    """Lets bombs go off, and counts how they ended."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend, self.timeout_s = backend, timeout_s
        self.neighbour = Neighbour(backend)
        self.told: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.is_stopped = False

    def once(self, name: str) -> None:
        if self.is_stopped:
            return
        try:
            sandbox = Sandbox.create(backend=self.backend, limits=limits_of(self.backend))
            with self.neighbour.beside(name), sandbox:
                how = set_off(sandbox, name, self.timeout_s)
        except Unsupported as exc:
            raise SystemExit(str(exc)) from exc  # a limit that is not had here, whatever the bomb
        except (RingfenceError, AssertionError, OSError) as exc:
            how = f"DIED: {exc!r}"[:600]
            print(f"{name}: {how}", flush=True)
        self.told[name][how] += 1

    def table(self) -> bool:
        """Print a row for each kind; return whether every bomb began and every sandbox lived."""
        died = unbegun = 0
        for name, told in self.told.items():
            dead = sum(count for how, count in told.items() if how.startswith("DIED"))
            words = "; ".join(f"{how} ({count})" for how, count in told.most_common(4))
            lived = f"lived {told.total() - dead}/{told.total()}"
            print(f"{name:22} {lived:14} {self.neighbour.told(name)}  {words}")
            died += dead
            unbegun += sum(count for how, count in told.items() if NEVER_BEGAN in how)
        load = os.getloadavg()[0]
        print(
            f"all: {died} died; {unbegun} {NEVER_BEGAN}; {self.neighbour.told('all')}; load {load:.0f}",
            flush=True,
        )
        return not died and not unbegun


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("-j", type=int, default=1)
    parser.add_argument("-t", type=float, metavar="SECONDS", help="timeout of a bomb")
    parser.add_argument("names", nargs="*")
    options = parser.parse_intermixed_args()
    bombs = Range(options.backend, options.t or timeout_of(options.backend))
    signal.signal(signal.SIGTERM, lambda *_: setattr(bombs, "is_stopped", True))
    bombs.neighbour.start()
    with ThreadPoolExecutor(options.j) as pool:
        names = options.names or BOMBS
        try:
            list(pool.map(bombs.once, [name for _ in range(options.n) for name in names]))
        finally:
            bombs.is_stopped = True
    is_well = bombs.table()
    bombs.neighbour.ended.set()
    bombs.neighbour.join()
    bombs.neighbour.sandbox.terminate()
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
