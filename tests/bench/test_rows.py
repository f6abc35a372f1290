"""A verdict follows from the target, and an unknown number gets none."""

from __future__ import annotations

import pytest

from ringfence.bench import report
from ringfence.bench.rows import HIGHER, VALUE, Missing, Row, Target
from ringfence.bench.settings import Settings

pytestmark = pytest.mark.anyone

RATIO_ROW = Target(must=0.8, aim=0.5)
RATE_ROW = Target(VALUE, HIGHER, must=150, aim=400)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "aim"),
    [(4.0, 10.0, "ok", True), (8.0, 10.0, "ok", False), (8.1, 10.0, "miss", False)],
)
def test_a_ratio_is_ours_by_theirs(ours: float, theirs: float, verdict: str, aim: bool) -> None:
    row = Row("create", "x", "ms", ours, "bwrap", theirs, RATIO_ROW)

    assert ours / theirs == row.ratio
    assert verdict == row.verdict
    assert aim is row.aim_reached


@pytest.mark.parametrize(("ours", "verdict"), [(149.0, "miss"), (150.0, "ok"), (400.0, "ok")])
def test_a_rate_is_judged_alone(ours: float, verdict: str) -> None:
    assert verdict == Row("throughput", "x", "/s", ours, target=RATE_ROW).verdict


@pytest.mark.parametrize(("ours", "theirs"), [(None, 1.0), (1.0, None), (1.0, 0.0), (None, None)])
def test_what_was_not_measured_has_no_verdict(ours: float | None, theirs: float | None) -> None:
    row = Row("create", "x", "ms", ours, "bwrap", theirs, RATIO_ROW)

    assert row.ratio is None
    assert "" == row.verdict
    assert row.aim_reached is None


def test_json_form_of_a_row_and_of_all() -> None:
    row = Row("create", "a life", "ms", 4.0, "bwrap", 8.0, RATIO_ROW, 40, "a note")

    whole = report.to_json([row], [Missing("nsjail", "not installed")], Settings(quick=True))

    assert {
        "measure": "create",
        "what": "a life",
        "unit": "ms",
        "ours": 4.0,
        "peer": "bwrap",
        "theirs": 8.0,
        "ratio": 0.5,
        "judged_by": "ratio",
        "better": "lower",
        "must": 0.8,
        "aim": 0.5,
        "verdict": "ok",
        "aim_reached": True,
        "samples": 40,
        "note": "a note",
    } == whole["rows"][0]
    assert [{"peer": "nsjail", "why": "not installed"}] == whole["missing"]
    assert {"host", "quick", "full", "rows", "missing"} == set(whole)
    wanted = {"ringfence", "python", "kernel", "machine", "cpus", "memory_bytes", "root", "load_1m"}
    assert wanted == set(whole["host"])


def test_a_line_says_goals_in_their_own_terms() -> None:
    ratio = report.line(Row("create", "a life", "ms", 4.0, "bwrap", 8.0, RATIO_ROW), colour=False)
    rate = report.line(Row("throughput", "many", "/s", 200.0, target=RATE_ROW), colour=False)

    said = "4.00 ms bwrap 8.00 ms 0.50x <= 0.8x <= 0.5x ok, aim"
    assert said.split() == ratio.split()[2:]
    assert rate.split()[1:] == ["200/s", ">=", "150/s", ">=", "400/s", "ok"]


@pytest.mark.parametrize("colour", [False, True])
def test_colours_only_when_asked_for(colour: bool) -> None:
    row = Row("create", "a life", "ms", 4.0, "bwrap", 8.0, RATIO_ROW, note="why")
    text = report.heading(colour=colour) + report.line(row, colour=colour)

    assert colour is ("\x1b[" in text)
