"""`ringfence bench [--json] [--peers] [--quick] [--full] [MEASURE...]`."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import report
from .measures import (
    adapters,
    backends,
    create,
    egress,
    files,
    floods,
    images,
    parked,
    run,
    server,
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
    "live": parked.measure_count,
    "egress": egress.measure,
    "adapters": adapters.measure,
    "server": server.measure,
    "floods": floods.measure,
    "backends": backends.measure,
}
# Two need the extras `server` and `client`, the other gVisor and a Docker engine.
_ONLY_IF_ASKED = ("server", "floods", "backends")
_EXAMPLES = """measures:
  create      made, first exec, gone; beside bubblewrap
  exec        /bin/true in a live sandbox; beside a bare subprocess
  run         `ringfence run -- true`, the whole process; beside `python3 -c pass`
  throughput  create and terminate, eight callers
  parked      memory of a waiting sandbox (needs root to see it)
  files       one file of 1 GiB in and out, beside cp; 10,000 small ones, beside tar | tar
  images      an image of 500 MiB unpacked; beside tar x
  live        how many at once: 1,000, with --full 5,000
  server      with --server: what the daemon adds, holds and streams, and how soon it is back
  floods      with --floods: p99 of other clients, and the daemon's memory, while each door is attacked
  adapters    importing each, beyond its framework where that is installed
  backends    with --backends: gVisor beside runsc, Docker beside docker exec, a microVM beside a boot
  egress      a network policy's price, and what goes through it; beside the host's own network

examples:
  ringfence bench --quick              everything, in seconds
  ringfence bench --peers create exec  beside every sandbox installed here
  ringfence bench --json > bench.json
"""


def main(argv: Sequence[str]) -> int:
    """Measure, print, leave nothing behind. 0: measured, whatever came out."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    for name in arguments.measures:
        if name not in MEASURES:
            parser.error(f"no measure {name!r}; there are {', '.join(MEASURES)}")
    settings = Settings(peers=arguments.peers, quick=arguments.quick, full=arguments.full)
    asked = [*arguments.measures]
    asked += [name for name in _ONLY_IF_ASKED if getattr(arguments, name)]
    wanted = asked or [name for name in MEASURES if name not in _ONLY_IF_ASKED]
    names = [name for name in MEASURES if name in wanted]
    rows, missing = measure(names, settings, None if arguments.json else _Screen())
    if arguments.json:
        json.dump(report.to_json(rows, missing, settings), sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 0


def measure(
    names: Sequence[str], settings: Settings, screen: _Screen | None = None
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


class _Screen:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringfence bench",
        description="What a sandbox costs here, in turns with the peers installed here.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--peers", action="store_true", help="beside every peer found; none is installed"
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs: seconds, not minutes")
    parser.add_argument("--full", action="store_true", help="5,000 live sandboxes instead of 1,000")
    parser.add_argument("--server", action="store_true", help="measure `ringfence serve` instead")
    parser.add_argument("--floods", action="store_true", help="attack `ringfence serve` instead")
    parser.add_argument("--backends", action="store_true", help="measure other backends instead")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help="default: all")
    return parser
