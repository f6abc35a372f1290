"""How many execs there were, how they ended, and what they wrote, for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.execs.exec_view import ExecView

_HELP = {
    "ringfence_execs_running": ("gauge", "Execs that run."),
    "ringfence_execs_started_total": ("counter", "Execs that were started."),
    "ringfence_execs_total": ("counter", "Execs that are over, by how."),
    "ringfence_output_bytes_total": ("counter", "Output of execs that are over."),
    "ringfence_output_dropped_bytes_total": ("counter", "Of that, not kept."),
}


class Counts:
    """Thread-safe; since this process started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = self._bytes = self._dropped = 0
        self._ends: Counter[str] = Counter()

    def began(self) -> None:
        with self._lock:
            self._started += 1

    def ended(self, view: ExecView) -> None:
        with self._lock:
            self._ends[str(view.state)] += 1
            self._bytes += view.stdout_bytes + view.stderr_bytes
            self._dropped += view.stdout_dropped_bytes + view.stderr_dropped_bytes

    def render(self, running: int) -> str:
        """The Prometheus text format. Source: prometheus.io, exposition formats."""
        with self._lock:
            ends = "".join(
                f'ringfence_execs_total{{state="{state}"}} {count}\n'
                for state, count in sorted(self._ends.items())
            )
            values = (
                f"ringfence_execs_running {running}\n",
                f"ringfence_execs_started_total {self._started}\n",
                ends,
                f"ringfence_output_bytes_total {self._bytes}\n",
                f"ringfence_output_dropped_bytes_total {self._dropped}\n",
            )
        pairs = zip(_HELP.items(), values, strict=True)
        return "".join(
            f"# HELP {name} {told}\n# TYPE {name} {kind}\n{value}"
            for (name, (kind, told)), value in pairs
        )
