"""A manager's counts in Prometheus' text format."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.manager_stats import ManagerStats, Percentiles

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = {
    "created": ("sandboxes_created", "Sandboxes handed to clients."),
    "terminated": ("sessions_terminated", "Sessions that ended, for whatever reason."),
    "timeout_destroys": ("sessions_expired", "Sessions ended by a timeout or their time to live."),
    "lost": ("sandboxes_lost", "Sandboxes that went away by themselves."),
    "refused": ("acquires_refused", "Acquires refused for want of room."),
    "pool_hits": ("pool_hits", "Acquires served by a warm sandbox."),
    "pool_misses": ("pool_misses", "Acquires that no warm sandbox fitted."),
}
_GAUGES = {
    "uptime_s": ("uptime_seconds", "Since the manager started."),
    "active_sandboxes": ("sandboxes", "Clients' sandboxes that exist."),
    "pool_size": ("pool_warm", "Warm sandboxes that could be claimed."),
    "waiting": ("acquires_waiting", "Acquires that wait for room."),
    "max_sandboxes": ("sandboxes_max", "Sandboxes that may exist at once, warm ones included."),
}
_STATES = ("active", "detached", "suspended")


def render(stats: ManagerStats) -> str:
    """The whole page. A value that is not known yet is left out, never zero.

    Source: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
    """
    lines: list[str] = []
    for field, (name, text) in _COUNTERS.items():
        _family(lines, f"{name}_total", "counter", text, [("", getattr(stats, field))])
    for field, (name, text) in _GAUGES.items():
        _family(lines, name, "gauge", text, [("", getattr(stats, field))])
    states = [(f'{{state="{each}"}}', getattr(stats, f"{each}_sessions")) for each in _STATES]
    _family(lines, "sessions", "gauge", "Sessions that have not ended, by state.", states)
    for name, found in (("creation", stats.creation), ("pool_claim", stats.pool_claim)):
        _family(
            lines, f"{name}_seconds", "summary", f"Of the last 1000 ({name}).", _quantiles(found)
        )
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """A label's value: only these three characters mean anything there."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _quantiles(found: Percentiles) -> list[tuple[str, float | None]]:
    parts = (("0.5", found.p50_ms), ("0.95", found.p95_ms), ("0.99", found.p99_ms))
    return [
        (f'{{quantile="{part}"}}', None if value is None else value / 1000) for part, value in parts
    ]


def _family(
    lines: list[str], name: str, kind: str, text: str, samples: list[tuple[str, float | None]]
) -> None:
    lines += [f"# HELP ringfence_{name} {text}", f"# TYPE ringfence_{name} {kind}"]
    lines += [
        f"ringfence_{name}{labels} {value!r}" for labels, value in samples if value is not None
    ]
