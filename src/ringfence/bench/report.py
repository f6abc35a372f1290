"""A benchmark as text, row by row while it runs, or as one JSON object."""

from __future__ import annotations

import os
import platform

from .rows import LOWER, OK, RATIO, Missing, Row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .settings import Settings

_COLUMNS = ("measure", "ours", "peer", "ratio", "must", "aim", "verdict")
_WIDTHS = (52, 16, 30, 8, 12, 12, 10)
_GREEN, _RED, _DIM, _OFF = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


def to_json(rows: Iterable[Row], missing: Iterable[Missing], settings: Settings) -> dict[str, Any]:
    """Build a JSON object: host, settings, rows and missing peers."""
    return {
        "host": host(),
        "quick": settings.quick,
        "full": settings.full,
        "rows": [row.to_json() for row in rows],
        "missing": [one.to_json() for one in missing],
    }


def host() -> dict[str, Any]:
    """Collect the facts about the host on which the numbers depend; load makes all of them worse."""
    from .. import __version__

    return {
        "ringfence": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "root": os.geteuid() == 0,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def heading(*, colour: bool) -> str:
    """The machine, and the names of the columns."""
    here = host()
    who = "root" if here["root"] else "an ordinary user"
    about = (
        f"ringfence {here['ringfence']}, Python {here['python']}, Linux {here['kernel']}, "
        f"{here['cpus']} CPUs, as {who}, load {here['load_1m']}"
    )
    return f"{_dim(about, colour)}\n\n{_line(_COLUMNS)}"


def line(row: Row, *, colour: bool) -> str:
    """Format a row, with its note on a line of its own."""
    cells = (
        row.what,
        quantity(row.ours, row.unit),
        f"{row.peer} {quantity(row.theirs, row.unit)}" if row.peer else "",
        f"{row.ratio:.2f}x" if row.ratio is not None else "",
        goal(row, row.target.must),
        goal(row, row.target.aim),
        _verdict(row),
    )
    text = _line(cells)
    if colour and row.verdict:
        text = (_GREEN if row.verdict == OK else _RED) + text + _OFF
    return f"{text}\n{_dim('    ' + row.note, colour)}" if row.note else text


def missing_lines(missing: Iterable[Missing], *, colour: bool) -> str:
    """Every peer that is not in the table, and why."""
    return "\n".join(_dim(f"not measured: {one.peer}: {one.why}", colour) for one in missing)


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit; a question mark where there is none."""
    if value is None:
        return "?"
    if unit == "sandboxes":
        return f"{value:.0f}"
    if unit == "x":
        return f"{value:.2f}x"
    digits = 2 if value < 100 and unit in ("ms", "MiB") else 0
    space = "" if unit == "/s" else " "
    return f"{value:.{digits}f}{space}{unit}"


def goal(row: Row, value: float | None) -> str:
    """A target, in the terms that it is judged by."""
    if value is None:
        return ""
    sign = "<=" if row.target.better == LOWER else ">="
    if row.target.by == RATIO:
        return f"{sign} {value:g}x"
    return f"{sign} {quantity(value, row.unit) if row.unit != 'MiB' else f'{value:g} MiB'}"


def _verdict(row: Row) -> str:
    return f"{row.verdict}, aim" if row.verdict == OK and row.aim_reached else row.verdict


def _line(cells: Iterable[str]) -> str:
    return "  ".join(f"{c:<{w}}" for c, w in zip(cells, _WIDTHS, strict=True)).rstrip()


def _dim(text: str, colour: bool) -> str:
    return f"{_DIM}{text}{_OFF}" if colour else text
