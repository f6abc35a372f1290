"""How much a sandbox may use."""

from __future__ import annotations

from .base import checks
from .base.checks import parse_duration, parse_size
from .base.model import Model
from .base.record import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_YEAR_S = 366 * 86_400

# Least and greatest value of any real use. A backend may accept less; its error says so.
_SECONDS: dict[str, tuple[float, float]] = {
    "wall_time_s": (0.001, _YEAR_S),
    "idle_timeout_s": (0.001, _YEAR_S),
    "cpus": (0.001, 8192),
}
_COUNTS: dict[str, tuple[int, int]] = {
    "memory_bytes": (MIB, 64 * TIB),
    "pids": (1, 4_194_304),  # include/linux/threads.h PID_MAX_LIMIT
    "disk_bytes": (64 * KIB, 64 * TIB),
    "inodes": (16, 2**32),
    "open_files": (8, 1_048_576),  # fs/file.c sysctl_nr_open
    "output_bytes": (0, TIB),
    "io_bytes_per_s": (1, TIB),
    "network_bytes": (0, 1024 * TIB),
}


@dataclass(frozen=True, eq=False, repr=False)
class Limits(Model):
    """Upper bounds, all optional; None leaves the bound to the backend's default.

    Attributes:
        wall_time_s: The timeout of an exec that names none of its own. Exact, not rounded.
        cpus: 1.0 is one core's time.
        idle_timeout_s: How long a sandbox may do nothing before it is suspended or ended.
        output_bytes: What is kept of each of stdout and stderr; the rest is counted.
    """

    wall_time_s: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    idle_timeout_s: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None
    io_bytes_per_s: int | None = None
    network_bytes: int | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            wall_time_s: float | str | None = None,
            cpus: float | None = None,
            memory_bytes: int | str | None = None,
            idle_timeout_s: float | str | None = None,
            pids: int | None = None,
            disk_bytes: int | str | None = None,
            inodes: int | None = None,
            open_files: int | None = None,
            output_bytes: int | str | None = None,
            io_bytes_per_s: int | str | None = None,
            network_bytes: int | str | None = None,
        ) -> None:
            """Sizes may be texts such as "256m", times such as "5s"; numbers are kept."""

    def __post_init__(self) -> None:
        for text in (name for name in self.__match_args__ if isinstance(getattr(self, name), str)):
            if text.endswith(("_s", "bytes")):
                read = parse_duration if text in _SECONDS else parse_size
                object.__setattr__(self, text, read(getattr(self, text), text))
        for name, (low, high) in _SECONDS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.number(value, name, low, high))
        for name, (least, most) in _COUNTS.items():
            value = getattr(self, name)
            if value is not None:
                checks.integer(value, name, least, most, hint=_in_units(name, value, least))

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the limits that are set."""
        given = [(name, getattr(self, name)) for name in self.__match_args__]
        return {name: value for name, value in given if value is not None}


def _in_units(name: str, value: object, least: int) -> str:
    """Suggest MiB for a byte count that is too small to be meant as bytes."""
    if not name.endswith("bytes") or not isinstance(value, int) or not 0 < value < least:
        return ""
    return f"did you mean {value}m?"


def bounds(name: str) -> tuple[float, float]:
    """Return the least and the greatest value of the limit."""
    return _SECONDS.get(name) or _COUNTS[name]
