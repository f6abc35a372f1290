"""Data of matplotlib's figures. Runs inside the sandbox, sent with the kernel, read at the first figure."""

from __future__ import annotations

import math
import re
import sys
from typing import Any, List, Optional  # noqa: UP035  Python 3.8

MOST_POINTS = 100_000


def chart_of(figure: Any) -> Optional[dict[str, Any]]:  # noqa: UP045
    """Describe a figure: `type`, `title`, `elements` and axes; None: it is empty or too large.

    Axes without anything in them are those of a line chart, as in E2B's charts. They count as empty
    unless they have units: those a plot that fails leaves behind.
    """
    axes = [each for each in figure.axes if each.get_label() != "<colorbar>"]
    charts = [_chart(each) for each in axes]
    points = sum(len(each.get("points", ())) for chart in charts for each in chart["elements"])
    if not any(_has_any(each) or _has_units(each) for each in axes) or points > MOST_POINTS:
        return None
    if len(charts) == 1:
        return charts[0]
    title = figure._suptitle.get_text() if figure._suptitle is not None else ""
    return {"type": "superchart", "title": title or None, "elements": charts}


def _has_any(axes: Any) -> bool:
    kinds = ("lines", "patches", "collections", "images", "texts", "tables", "artists")
    return any(len(getattr(axes, each)) for each in kinds)


def _has_units(axes: Any) -> bool:
    return any(_converter(axis) is not None for axis in (axes.xaxis, axes.yaxis))


def _chart(axes: Any) -> dict[str, Any]:
    # What stands in axes of three dimensions are projections, not values.
    found = ((kind, find(axes)) for kind, find in _KINDS if axes.name != "3d")
    other = "unknown" if _has_any(axes) else "line"
    kind, elements = next((each for each in found if each[1]), (other, []))
    chart: dict[str, Any] = {"type": kind, "title": axes.get_title() or None, "elements": elements}
    if kind == "pie":
        return chart
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        label = axis.get_label().get_text()
        unit = re.search(r"\(([^()]+)\)", label)
        chart[f"{name}_label"], chart[f"{name}_unit"] = label or None, unit and unit.group(1)
        low, high = sorted(axis.get_view_interval())
        ticks = [each for each in axis.get_majorticklocs() if low <= each <= high]
        chart[f"{name}_ticks"] = [_value(axis, each) for each in ticks]
        chart[f"{name}_tick_labels"] = axis.get_major_formatter().format_ticks(ticks)
        chart[f"{name}_scale"] = _scale(axis)
    return chart


def _scale(axis: Any) -> str:
    if _names(axis):
        return "categorical"
    is_date = "Date" in type(_converter(axis)).__name__ or _period(axis)
    return "datetime" if is_date else str(axis.get_scale())


def _period(axis: Any) -> Any:
    """The period that pandas counts in where it plots a series with regular dates."""
    is_counted = "PeriodConverter" == type(_converter(axis)).__name__
    return getattr(axis.axes, "freq", None) if is_counted else None


def _converter(axis: Any) -> Any:
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def _names(axis: Any) -> dict[float, str]:
    mapping = getattr(axis.units, "_mapping", None) or {}  # of categories
    return {float(at): str(name) for name, at in mapping.items()}


def _value(axis: Any, value: Any) -> Any:
    """A number, a name of a category, or a date in ISO format."""
    value = float(value)
    if not math.isfinite(value):
        return None
    names = _names(axis)
    if names:
        return names.get(value, "")
    if period := _period(axis):
        start = sys.modules["pandas"].Period(ordinal=math.floor(value), freq=period).start_time
        return f"{start.isoformat()}+00:00"
    if _scale(axis) == "datetime":
        return sys.modules["matplotlib.dates"].num2date(value).isoformat()
    return value


def _points(axes: Any, pairs: Any) -> List[List[Any]]:  # noqa: UP006
    return [[_value(axes.xaxis, x), _value(axes.yaxis, y)] for x, y in pairs[: MOST_POINTS + 1]]


def _label(artist: Any, name: str, number: int) -> str:
    label = str(artist.get_label() or "")
    return f"{name} {number}" if not label or label.startswith("_") else label


def _lines(axes: Any) -> List[dict[str, Any]]:  # noqa: UP006
    return [
        {"label": _label(line, "Line", number), "points": _points(axes, line.get_xydata())}
        for number, line in enumerate(axes.get_lines(), 1)
        if line.get_transform().contains_branch(axes.transData)  # axhline's is another
    ]


def _scattered(axes: Any) -> List[dict[str, Any]]:  # noqa: UP006
    found = [each for each in axes.collections if type(each).__name__ == "PathCollection"]
    return [
        {"label": _label(each, "Dataset", number), "points": _points(axes, each.get_offsets())}
        for number, each in enumerate(found, 1)
    ]


def _bars(axes: Any) -> List[dict[str, Any]]:  # noqa: UP006
    found = []
    groups = [each for each in axes.containers if type(each).__name__ == "BarContainer"]
    for number, group in enumerate(groups, 1):
        is_flat = getattr(group, "orientation", "vertical") == "horizontal"
        axis = axes.yaxis if is_flat else axes.xaxis
        for bar in group.patches:
            at = (
                bar.get_y() + bar.get_height() / 2 if is_flat else bar.get_x() + bar.get_width() / 2
            )
            found.append(
                {
                    "label": _tick(axis, at),
                    "group": _label(group, "Group", number),
                    "value": float(bar.get_width() if is_flat else bar.get_height()),
                }
            )
    return found


def _tick(axis: Any, at: float) -> str:
    """The label of what stands at a place of an axis."""
    names = _names(axis)
    if not names and type(axis.get_major_formatter()).__name__ in (
        "FixedFormatter",
        "FuncFormatter",
    ):
        ticks = axis.get_majorticklocs()
        names = dict(zip(ticks, axis.get_major_formatter().format_ticks(ticks)))  # noqa: B905  Python 3.8
    near = min(names, key=lambda each: abs(each - at), default=None)
    if near is not None and abs(near - at) <= 0.5:
        return str(names[near])
    value = _value(axis, at)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wedges(axes: Any) -> List[dict[str, Any]]:  # noqa: UP006
    found = [each for each in axes.patches if type(each).__name__ == "Wedge"]
    return [
        {
            "label": _label(each, "Wedge", number),
            "angle": round(abs(float(each.theta2 - each.theta1)), 4),
            "radius": float(each.r),
        }
        for number, each in enumerate(found, 1)
    ]


def _boxes(axes: Any) -> List[dict[str, Any]]:  # noqa: UP006
    """Box plots: matplotlib draws each from lines, its box also as a patch."""
    patches = [each for each in axes.patches if type(each).__name__ == "PathPatch"]
    shapes = [each.get_path().vertices for each in patches]
    lines = [each.get_xydata() for each in axes.get_lines()]
    outlines = [each for each in shapes if len(each) in (5, 6)]
    outlines = outlines or [
        each for each in lines if len(each) == 5 and tuple(each[0]) == tuple(each[4])
    ]
    for along in (1, 0):  # the coordinate of the values: upright, then flat
        found = [each for each in (_box(axes, along, one, lines) for one in outlines) if each]
        if found:
            return found
    return []


def _box(axes: Any, along: int, outline: Any, lines: Any) -> Optional[dict[str, Any]]:  # noqa: UP045
    across = 1 - along
    low, high = outline[:, along].min(), outline[:, along].max()
    left, right = outline[:, across].min(), outline[:, across].max()
    middle, width = (left + right) / 2, right - left
    ends, median, outliers = [low, high], None, []
    for line in lines:
        at = line[:, across]
        if len(line) == 2 and abs(at - middle).max() < width * 1e-6:
            ends += list(line[:, along])  # whisker
        elif len(line) == 2 and abs(abs(at - middle) - width / 2).max() < width * 1e-6:
            median = float(line[0, along])
        elif len(line) and abs(at - middle).max() < width * 1e-6:
            outliers += [float(each) for each in line[:, along]]
    if median is None or not low <= median <= high:
        return None
    return {
        "label": _tick(axes.xaxis if along else axes.yaxis, middle),
        "min": float(min(ends)),
        "first_quartile": float(low),
        "median": median,
        "third_quartile": float(high),
        "max": float(max(ends)),
        "outliers": sorted(set(outliers)),
    }


_KINDS = (
    ("pie", _wedges),
    ("box_and_whisker", _boxes),
    ("bar", _bars),
    ("scatter", _scattered),
    ("line", _lines),
)
