"""Requests counted, for Prometheus."""

from __future__ import annotations

from collections import Counter

from ..sessions.metrics import escape

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Requests:
    """By route, method and status; how long they took."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._buckets = [0] * (len(_BUCKETS_S) + 1)
        self._total_s = 0.0

    def add(self, route: str, method: str, status: int, seconds: float) -> None:
        """One more. `route` is the pattern, never the path: there are only so many."""
        self._counts[route, method, status] += 1
        self._total_s += seconds
        at = next((i for i, most in enumerate(_BUCKETS_S) if seconds <= most), len(_BUCKETS_S))
        self._buckets[at] += 1

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
        so_far = 0
        for most, count in zip((*_BUCKETS_S, "+Inf"), self._buckets, strict=True):
            so_far += count
            lines.append(f'ringfence_http_request_seconds_bucket{{le="{most}"}} {so_far}')
        lines += [
            f"ringfence_http_request_seconds_sum {self._total_s!r}",
            f"ringfence_http_request_seconds_count {so_far}",
            "# HELP ringfence_http_requests_in_flight Requests being served.",
            "# TYPE ringfence_http_requests_in_flight gauge",
            f"ringfence_http_requests_in_flight {in_flight}",
        ]
        return "\n".join(lines) + "\n"
