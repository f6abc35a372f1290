"""Request counters and latencies, for Prometheus."""

from __future__ import annotations

import os
import resource
from collections import Counter

from ..sessions.counts.metrics import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Requests:
    """By route, method and status; how long they took."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._total_s: dict[str, float] = {}

    def add(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the pattern, never the path, which bounds the number of series."""
        self._counts[route, method, status] += 1
        self._total_s[route] = self._total_s.get(route, 0.0) + seconds
        at = next((i for i, most in enumerate(_BUCKETS_S) if seconds <= most), len(_BUCKETS_S))
        self._buckets.setdefault(route, [0] * (len(_BUCKETS_S) + 1))[at] += 1

    def render(self, in_flight: int) -> str:
        """In the text format, version 0.0.4."""
        lines = [
            "# HELP ringfence_http_requests_total Requests answered.",
            "# TYPE ringfence_http_requests_total counter",
        ]
        for (route, method, status), count in sorted(self._counts.items()):
            labels = f'route="{escape(route)}",method="{escape(method)}",status="{status}"'
            lines.append(f"ringfence_http_requests_total{{{labels}}} {count}")
        lines += [
            "# HELP ringfence_http_request_seconds Until the response had been sent.",
            "# TYPE ringfence_http_request_seconds histogram",
        ]
        for route, buckets in sorted(self._buckets.items()):
            lines += self._histogram(route, buckets)
        lines += [
            "# HELP ringfence_http_requests_in_flight Requests being served.",
            "# TYPE ringfence_http_requests_in_flight gauge",
            f"ringfence_http_requests_in_flight {in_flight}",
        ]
        return "\n".join(lines) + "\n"

    def _histogram(self, route: str, buckets: list[int]) -> Iterator[str]:
        label, so_far = f'route="{escape(route)}"', 0
        for most, count in zip((*_BUCKETS_S, "+Inf"), buckets, strict=True):
            so_far += count
            yield f'ringfence_http_request_seconds_bucket{{{label},le="{most}"}} {so_far}'
        yield f"ringfence_http_request_seconds_sum{{{label}}} {self._total_s[route]!r}"
        yield f"ringfence_http_request_seconds_count{{{label}}} {so_far}"


def of_process() -> str:
    """Format the process metrics under the standard names.

    Source: prometheus.io/docs/instrumenting/writing_clientlibs, "Process metrics".
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    with open("/proc/stat", encoding="ascii") as file:
        booted = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    ticks = os.sysconf("SC_CLK_TCK")
    values = (
        ("cpu_seconds_total", "counter", (int(fields[11]) + int(fields[12])) / ticks),
        ("resident_memory_bytes", "gauge", int(fields[21]) * os.sysconf("SC_PAGESIZE")),
        ("virtual_memory_bytes", "gauge", int(fields[20])),
        ("start_time_seconds", "gauge", booted + int(fields[19]) / ticks),
        ("open_fds", "gauge", len(os.listdir("/proc/self/fd"))),
        ("max_fds", "gauge", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ("threads", "gauge", int(fields[17])),
    )
    lines = [
        line
        for name, kind, value in values
        for line in (f"# TYPE process_{name} {kind}", f"process_{name} {value!r}")
    ]
    return "\n".join(lines) + "\n"
