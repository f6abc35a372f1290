"""`ringfence serve` that may start only so many threads, as under a small RLIMIT_NPROC or pids.max.

    python -m tests.daemon.no_thread FILE serve --state-dir ...

FILE has the number; without it there is no limit.
"""

from __future__ import annotations

import _thread
import sys
import threading
from typing import Any


def install(most: int) -> None:
    real, left = _thread.start_new_thread, iter(range(most))

    def start(*args: Any) -> int:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        return real(*args)

    # Both before anything of Ringfence is imported: its modules keep the name.
    _thread.start_new_thread = start
    threading._start_new_thread = start  # type: ignore[attr-defined]


if __name__ == "__main__":
    try:
        with open(sys.argv.pop(1), encoding="utf-8") as file:
            install(int(file.read()))
    except FileNotFoundError:
        pass
    from ringfence.cli.main import main

    sys.exit(main())
