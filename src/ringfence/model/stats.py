"""Current resource usage of a sandbox."""

from __future__ import annotations

from .base import jsonform
from .base.model import Model
from .base.record import dataclass
from .state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class SandboxStats(Model):
    """Counters of one sandbox; a value that cannot be read is None, never zero.

    Attributes:
        forks_refused: How many times the processes limit said no; in gVisor, whose kernel does not count
            that, in how many execs the limit was seen to be reached (every 50 ms).
        execs: How many were started so far.
        degraded: Limits and protections, by name, that hold less than asked.
    """

    state: State
    cpu_ns: int | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    pids: int | None = None
    forks_refused: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    uptime_s: float | None = None
    execs: int = 0
    degraded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON object of all fields."""
        return {**jsonform.dump(self), "state": str(self.state)}
