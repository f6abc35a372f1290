"""Result of a probe."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ESCAPED = "escaped"
HELD = "held"
INCONCLUSIVE = "inconclusive"
NOT_APPLICABLE = "not_applicable"
STATUSES = (NOT_APPLICABLE, HELD, INCONCLUSIVE, ESCAPED)
"""From best to worst."""

CRITICAL, HIGH, MEDIUM, LOW = "critical", "high", "medium", "low"
SEVERITIES = (CRITICAL, HIGH, MEDIUM, LOW)
AREAS = (
    "identity",
    "files",
    "devices_proc",
    "syscalls",
    "ipc",
    "network",
    "resources",
    "leaks",
    "lifecycle",
)


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        id: `area.name`.
        description: The forbidden effect, in one sentence.
        control: Where the same probe succeeds, which shows that it can; or "none: " and why not.
        where: The kind of sandbox it ran in: plain, mounted (with host directories), limited (with
            a network policy), copied (a process that goes on in a fork), or its own.
    """

    id: str
    area: str
    severity: str
    description: str
    status: str
    evidence: str
    control: str
    where: str = ""

    @property
    def breaks(self) -> bool:
        """True if this is a hole: an escape beyond the known leaks of a shared kernel."""
        return self.status == ESCAPED and self.severity != LOW

    def to_json(self) -> dict[str, Any]:
        """Build a JSON object with the attributes' names."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def worst(results: list[ProbeResult]) -> ProbeResult:
    """The worst of several runs of one probe."""
    return max(results, key=lambda result: STATUSES.index(result.status))


def count_by_area(results: list[ProbeResult]) -> dict[str, dict[str, int]]:
    """Area to status to number."""
    counts: dict[str, dict[str, int]] = {}
    for area in AREAS:
        mine = [result.status for result in results if result.area == area]
        if mine:
            counts[area] = {status: mine.count(status) for status in STATUSES}
    return counts
