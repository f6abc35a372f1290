"""The measures of `ringfence bench`, and the table that they fill."""

from __future__ import annotations

import os
import sys

from . import report
from .measures import (
    adapters,
    backends,
    cluster,
    create,
    egress,
    files,
    floods,
    forks,
    images,
    landlock,
    parked,
    ray_programs,
    run,
    server,
    snapshots,
    throughput,
)
from .measures import exec as exec_
from .rows import Missing, Row
from .settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Measure = Callable[[Settings], Iterator[Row | Missing]]

# In this order: what fills the machine comes last.
MEASURES: dict[str, Measure] = {
    "create": create.measure,
    "exec": exec_.measure,
    "run": run.measure,
    "throughput": throughput.measure,
    "parked": parked.measure_memory,
    "files": files.measure,
    "images": images.measure,
    "snapshots": snapshots.measure,
    "forks": forks.measure,
    "live": parked.measure_count,
    "egress": egress.measure,
    "adapters": adapters.measure,
    "placement": ray_programs.measure_placement,
    "ray": ray_programs.measure_ray,
    "server": server.measure,
    "cluster": cluster.measure,
    "floods": floods.measure,
    "backends": backends.measure,
    "landlock": landlock.measure,
}
# Three need the extras `server` and `client`, one of them Ray; the others are about backends.
ONLY_IF_ASKED = ("server", "cluster", "floods", "backends", "landlock")


def measure(
    names: Sequence[str], settings: Settings, screen: Screen | None = None
) -> tuple[list[Row], list[Missing]]:
    """Run the measures; each row is shown as soon as it is there."""
    rows: list[Row] = []
    missing: dict[tuple[str, str], Missing] = {}
    for name in names:
        if screen:
            screen.working_on(name)
        for found in MEASURES[name](settings):
            if isinstance(found, Missing):
                missing[found.peer, found.why] = found
                continue
            rows.append(found)
            if screen:
                screen.row(found)
    if screen:
        screen.end(list(missing.values()))
    return rows, list(missing.values())


class Screen:
    """Standard output; colours and a passing word of progress only on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._colour = self._terminal and "NO_COLOR" not in os.environ
        self._write(report.heading(colour=self._colour))

    def working_on(self, name: str) -> None:
        if self._terminal:
            sys.stdout.write(f"\r\x1b[Kmeasuring {name} ...")
            sys.stdout.flush()

    def row(self, row: Row) -> None:
        self._write(report.line(row, colour=self._colour))

    def end(self, missing: list[Missing]) -> None:
        self._write("")
        if missing:
            self._write(report.missing_lines(missing, colour=self._colour))

    def _write(self, text: str) -> None:
        sys.stdout.write(("\r\x1b[K" if self._terminal else "") + text + "\n")
        sys.stdout.flush()
