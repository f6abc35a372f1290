"""Tables for people: columns as wide as they need to be, nothing in them that steers a terminal."""

from __future__ import annotations

import shutil
import sys
import time

from .terminal import Colours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = "  "
_DAY_S = 86_400


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    sys.stdout.write(written(heads, rows))


def written(heads: Sequence[str], rows: Sequence[Sequence[str]], lines: int = 0) -> str:
    """A table as text; on a terminal no line is longer than that, and with `lines` no more than those."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    colours = Colours(1)
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20
    made = [_line(heads, widths)[:most], *(_line(row, widths)[:most] for row in cells)]
    if lines and len(made) > lines:
        made[lines - 1 :] = [f"... and {len(made) - lines + 1} more"]
    made[0] = colours.paint("bold", made[0])
    return "\n".join(made) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()


def plain(text: str) -> str:
    """Replace control characters: text from inside a sandbox must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def ago(moment: float | None) -> str:
    """How long ago: `5s`, `3m`, `2h`, `4d`; empty for never."""
    return "" if moment is None else span(max(0.0, time.time() - moment))


def left(moment: float | None) -> str:
    """How long until then, as `ago` says it; empty for never, `0s` where it is over."""
    return "" if moment is None else span(max(0.0, moment - time.time()))


def span(seconds: float | None) -> str:
    """A duration in its largest unit."""
    if seconds is None:
        return ""
    for unit, size in (("d", _DAY_S), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def pairs(found: dict[str, str] | object) -> str:
    """`a=b,c=d`."""
    items = found.items() if hasattr(found, "items") else ()
    return ",".join(f"{key}={value}" for key, value in items)
