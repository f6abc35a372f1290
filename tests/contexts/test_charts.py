"""Data of figures, from stand-ins for matplotlib's objects: tests of whole cells need the library."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringfence.contexts import charts

pytestmark = pytest.mark.anyone


class Axis:
    def __init__(
        self,
        label: str = "",
        *,
        names: dict[str, float] | None = None,
        converter: Any = None,
        ticks: tuple[float, ...] = (0.0, 1.0, 2.0),
        view: tuple[float, float] = (0.0, 1.0),
        fixed: bool = False,
    ) -> None:
        kind = "FixedFormatter" if fixed else "ScalarFormatter"
        formatter = type(kind, (), {"format_ticks": lambda _, ticks: [f"t{t:g}" for t in ticks]})
        self._formatter, self._converter = formatter(), converter
        self._label, self._ticks, self._view = label, ticks, view
        self.units = SimpleNamespace(_mapping=names) if names else None
        self.axes: Any = None

    def get_label(self) -> Any:
        return SimpleNamespace(get_text=lambda: self._label)

    def get_view_interval(self) -> tuple[float, float]:
        return self._view

    def get_majorticklocs(self) -> tuple[float, ...]:
        return self._ticks

    def get_major_formatter(self) -> Any:
        return self._formatter

    def get_converter(self) -> Any:
        return self._converter

    def get_scale(self) -> str:
        return "linear"


class Axes:
    def __init__(
        self,
        *lines: Any,
        x: Axis | None = None,
        y: Axis | None = None,
        label: str = "",
        title: str = "",
        name: str = "rectilinear",
        **parts: Any,
    ) -> None:
        self.xaxis, self.yaxis = x or Axis(), y or Axis()
        self.xaxis.axes = self.yaxis.axes = self
        self.lines, self.name, self.transData = list(lines), name, object()
        self._label, self._title = label, title
        for each in ("patches", "collections", "images", "texts", "tables", "artists"):
            setattr(self, each, parts.get(each, []))
        self.containers = parts.get("containers", [])
        for line in lines:
            line.axes = self

    def get_label(self) -> str:
        return self._label

    def get_title(self) -> str:
        return self._title

    def get_lines(self) -> list[Any]:
        return self.lines


class Line:
    def __init__(self, points: Any, label: str = "_child0", *, is_data: bool = True) -> None:
        self._points, self._label, self._is_data = points, label, is_data
        self.axes: Any = None

    def get_label(self) -> str:
        return self._label

    def get_xydata(self) -> Any:
        return self._points

    def get_transform(self) -> Any:
        return SimpleNamespace(
            contains_branch=lambda data: self._is_data and data is self.axes.transData
        )


def artist(kind: str, label: str = "", **facts: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(get_label=lambda: label, **facts)


def chart(*axes: Axes, suptitle: str = "") -> Any:
    title = SimpleNamespace(get_text=lambda: suptitle) if suptitle else None
    return charts.chart_of(SimpleNamespace(axes=axes, _suptitle=title))


def test_lines_have_labels_points_axes_and_units() -> None:
    lines = [
        Line([(0, 1), (1, math.inf)], "sin"),
        Line([(0, 2)]),
        Line([(9, 9)], is_data=False),
    ]
    found = chart(Axes(*lines, x=Axis("Time (s)"), y=Axis("Level"), title="Waves"))

    assert {
        "type": "line",
        "title": "Waves",
        "elements": [
            {"label": "sin", "points": [[0.0, 1.0], [1.0, None]]},
            {"label": "Line 2", "points": [[0.0, 2.0]]},
        ],
        "x_label": "Time (s)",
        "x_unit": "s",
        "x_ticks": [0.0, 1.0],
        "x_tick_labels": ["t0", "t1"],
        "x_scale": "linear",
        "y_label": "Level",
        "y_unit": None,
        "y_ticks": [0.0, 1.0],
        "y_tick_labels": ["t0", "t1"],
        "y_scale": "linear",
    } == found


def test_dots_bars_and_wedges_are_elements_of_their_own() -> None:
    dots = [artist("PathCollection", "a", get_offsets=lambda: [(1, 2)]), artist("LineCollection")]
    found = chart(Axes(collections=dots))
    assert ("scatter", [{"label": "a", "points": [[1.0, 2.0]]}]) == (
        found["type"],
        found["elements"],
    )

    def bar(at: float, value: float, *, is_flat: bool) -> Any:
        sides = {"x": 0.0, "y": at - 0.4, "width": value, "height": 0.8}
        if not is_flat:
            sides = {"x": at - 0.4, "y": 0.0, "width": 0.8, "height": value}
        return SimpleNamespace(
            **{f"get_{name}": lambda side=side: side for name, side in sides.items()}
        )

    for is_flat in (False, True):
        group = artist(
            "BarContainer",
            patches=[bar(0, 3, is_flat=is_flat), bar(1, 5, is_flat=is_flat)],
            orientation="horizontal" if is_flat else "vertical",
        )
        axis = Axis(names={"one": 0.0, "two": 1.0})
        axes: dict[str, Any] = {"y" if is_flat else "x": axis}
        found = chart(Axes(patches=[1], containers=[artist("Other"), group], **axes))
        assert "bar" == found["type"]
        assert [
            {"label": "one", "group": "Group 1", "value": 3.0},
            {"label": "two", "group": "Group 1", "value": 5.0},
        ] == found["elements"]
        assert "categorical" == found["y_scale" if is_flat else "x_scale"]
    wedges = [artist("Wedge", "w", theta1=90.0, theta2=30.00001, r=1), artist("Patch")]
    found = chart(Axes(patches=wedges))
    assert {
        "type": "pie",
        "title": None,
        "elements": [{"label": "w", "angle": 60.0, "radius": 1.0}],
    } == found


class Points:
    """As much of an array as boxes need."""

    def __init__(self, *pairs: tuple[float, float]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        return iter(self.pairs)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int):
            return self.pairs[at]
        rows, column = at
        if isinstance(rows, int):
            return self.pairs[rows][column]
        return Column(pair[column] for pair in self.pairs)


class Column(list[float]):
    def min(self) -> float:
        return min(self)

    def max(self) -> float:
        return max(self)

    def __sub__(self, other: float) -> Column:
        return Column(each - other for each in self)

    def __abs__(self) -> Column:
        return Column(abs(each) for each in self)


@pytest.mark.parametrize("is_flat", [False, True])
def test_boxes_are_read_from_their_lines(is_flat: bool) -> None:
    def turned(*pairs: tuple[float, float]) -> Line:
        return Line(Points(*((y, x) if is_flat else (x, y) for x, y in pairs)))

    lines = [
        turned((0.5, 2), (1.5, 2), (1.5, 6), (0.5, 6), (0.5, 2)),  # box
        turned((1, 2), (1, 1)),  # whiskers
        turned((1, 6), (1, 9)),
        turned((0.5, 4), (1.5, 4)),  # median
        turned((1, 12), (1, -3), (1, 12)),  # outliers
        turned((3, 3), (4, 4)),
    ]
    axis = Axis(ticks=(1.0,), fixed=True)
    named: dict[str, Any] = {"y" if is_flat else "x": axis}
    found = chart(Axes(*lines, **named))

    assert "box_and_whisker" == found["type"]
    assert [
        {
            "label": "t1",
            "min": 1.0,
            "first_quartile": 2.0,
            "median": 4.0,
            "third_quartile": 6.0,
            "max": 9.0,
            "outliers": [-3.0, 12.0],
        }
    ] == found["elements"]


@pytest.mark.full
def test_what_is_empty_or_too_large_has_no_data() -> None:
    assert None is chart(Axes())
    assert "line" == chart(Axes(x=Axis(converter=object())))["type"], "units of a plot that failed"
    assert "unknown" == chart(Axes(images=[1]))["type"]
    assert "unknown" == chart(Axes(Line([(0, 1)]), name="3d"))["type"], "projections are no values"
    most = charts.MOST_POINTS
    assert most == len(chart(Axes(Line([(0, 0)] * most)))["elements"][0]["points"])
    assert None is chart(Axes(Line([(0, 0)] * (most + 1))))
    half = most // 2 + 1
    assert None is chart(Axes(Line([(0, 0)] * half)), Axes(Line([(0, 0)] * half)))


def test_several_axes_are_one_chart_without_the_bar_of_colours() -> None:
    axes = [Axes(Line([(0, 1)]), title="a"), Axes(Line([(2, 3)]), title="b")]
    bar = Axes(images=[1], label="<colorbar>")
    found = chart(*axes, bar, suptitle="both")
    assert ("superchart", "both", ["a", "b"]) == (
        found["type"],
        found["title"],
        [each["title"] for each in found["elements"]],
    )
    assert None is chart(*axes)["title"]
    assert "line" == chart(axes[0], bar)["type"]


def test_dates_and_periods_are_iso_and_names_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    dates, pandas = ModuleType("dates"), ModuleType("pandas")

    def iso(text: str) -> Any:
        return SimpleNamespace(isoformat=lambda: text)

    def num2date(value: float) -> Any:
        return iso(f"day {value:g}")

    def period(*, ordinal: int, freq: str) -> Any:
        return SimpleNamespace(start_time=iso(f"{freq} {ordinal}"))

    vars(dates)["num2date"], vars(pandas)["Period"] = num2date, period
    monkeypatch.setitem(sys.modules, "matplotlib.dates", dates)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    kinds: dict[str, Any] = {
        kind: type(kind, (), {})() for kind in ("ConciseDateConverter", "PeriodConverter")
    }
    found = chart(Axes(Line([(1.5, 7)]), x=Axis(converter=kinds["ConciseDateConverter"])))
    assert ("datetime", [["day 1.5", 7.0]]) == (
        found["x_scale"],
        found["elements"][0]["points"],
    )
    axes = Axes(Line([(1.5, 7)]), x=Axis(converter=kinds["PeriodConverter"]))
    axes.freq = "M"  # type: ignore[attr-defined]
    found = chart(axes)
    assert ("datetime", [["M 1+00:00", 7.0]]) == (found["x_scale"], found["elements"][0]["points"])
    names = Axis(names={"a": 0.0})
    found = chart(Axes(Line([(0, 1), (5, 1)]), x=names))
    assert [["a", 1.0], ["", 1.0]] == found["elements"][0]["points"]


@pytest.mark.parametrize(("at", "label"), [(0.4, "t0"), (0.5, "t0"), (2.6, "2.6"), (1.6, "t2")])
def test_a_label_is_that_of_the_nearest_tick_unless_it_is_far(at: float, label: str) -> None:
    assert label == charts._tick(Axis(fixed=True), at)
    assert f"{at:g}" == charts._tick(Axis(), at), "labels of numbers are no names"
