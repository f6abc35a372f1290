"""Rows of a benchmark with a verdict, missing peers, one JSON form."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RATIO, VALUE = "ratio", "value"
LOWER, HIGHER = "lower", "higher"
OK, MISS, UNJUDGED = "ok", "miss", ""


@dataclass(frozen=True)
class Target:
    """Required and desired value of a row.

    Attributes:
        by: `ratio` judges ours / theirs, `value` ours alone.
        better: `lower` or `higher`.
    """

    by: str = RATIO
    better: str = LOWER
    must: float | None = None
    aim: float | None = None

    def reached(self, goal: float | None, measured: float | None) -> bool | None:
        """Return whether `measured` is as good as `goal`; None where one of them is unknown."""
        if goal is None or measured is None:
            return None
        return measured <= goal if self.better == LOWER else measured >= goal


@dataclass(frozen=True)
class Row:
    """A measurement beside a peer's.

    Attributes:
        measure: Its name on the command line.
        what: The measured action, for a reader.
        unit: Of `ours` and `theirs`.
        ours, theirs: Medians; None where it could not be measured: `note` says why.
        samples: Number of runs behind each median.
    """

    measure: str
    what: str
    unit: str
    ours: float | None
    peer: str = ""
    theirs: float | None = None
    target: Target = field(default_factory=Target)
    samples: int = 1
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours / theirs."""
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def verdict(self) -> str:
        """`ok` or `miss`; empty where no target is set or nothing was measured."""
        reached = self.target.reached(self.target.must, self._judged)
        return UNJUDGED if reached is None else OK if reached else MISS

    @property
    def aim_reached(self) -> bool | None:
        return self.target.reached(self.target.aim, self._judged)

    @property
    def _judged(self) -> float | None:
        return self.ratio if self.target.by == RATIO else self.ours

    def to_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "judged_by": self.target.by,
            "better": self.target.better,
            "must": self.target.must,
            "aim": self.target.aim,
            "verdict": self.verdict,
            "aim_reached": self.aim_reached,
            "samples": self.samples,
            "note": self.note,
        }


@dataclass(frozen=True)
class Missing:
    peer: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"peer": self.peer, "why": self.why}
