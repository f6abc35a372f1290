"""Cells with packages: figures with their data, tables, kernels of Jupyter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.contexts import Context
from ringfence.errors import ExecError, InvalidRequest
from tests.features import require

SCIENCE = Path("/usr/local/lib/ringfence-tests/science")  # tools/needs.sh
ENV = {"PYTHONPATH": str(SCIENCE)}

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(
        not (SCIENCE / "matplotlib").exists(), reason=f"no matplotlib in {SCIENCE}: tools/needs.sh"
    ),
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    require("user namespaces")
    backend = NativeBackend()
    try:
        with Sandbox.create(backend=backend) as made:
            yield made
    finally:
        backend.close()


@pytest.fixture(scope="module")
def plots(sandbox: Sandbox) -> Iterator[Context]:
    with sandbox.context(env=ENV) as made:
        made.run("import datetime, matplotlib.pyplot as plt, numpy as np", timeout_s=120)
        yield made


def chart(plots: Context, code: str) -> Any:
    cell = plots.run(code, timeout_s=120)
    assert cell.error is None, cell.error.traceback
    (result,) = [each for each in cell.results if each.png]
    return result.chart


@pytest.mark.full
def test_lines(plots: Context) -> None:
    found = chart(
        plots,
        "x = np.linspace(0, 6, 100)\nplt.plot(x, np.sin(x), label='sin'); plt.plot(x, np.cos(x))\n"
        "plt.axhline(0); plt.xlabel('Time (s)'); plt.ylabel('Level (log scale)'); plt.title('Waves')\n"
        "plt.yscale('symlog'); plt.show()",
    )

    assert ("line", "Waves", "Time (s)", "s", "log scale", "linear", "symlog") == tuple(
        found[key] for key in ("type", "title", "x_label", "x_unit", "y_unit", "x_scale", "y_scale")
    )
    assert [("sin", 100), ("Line 2", 100)] == [
        (each["label"], len(each["points"])) for each in found["elements"]
    ]
    assert [0.0, 0.0] == found["elements"][0]["points"][0]
    assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0] == found["x_ticks"]
    assert ["0", "1", "2", "3", "4", "5", "6"] == found["x_tick_labels"]


@pytest.mark.full
def test_a_cell_that_fails_shows_its_figures(plots: Context) -> None:
    failed = plots.run("plt.plot([1, 2]); plt.title('Own')\n1 / 0", timeout_s=120)

    assert ["Own"] == [each.chart["title"] for each in failed.results]
    assert "ZeroDivisionError" == getattr(failed.error, "name", "")
    assert [] == plots.run("None").results
    ended = plots.run("plt.plot([1, 2]); plt.title('Ended')\nraise SystemExit(1)")
    assert ["Ended"] == [each.chart["title"] for each in ended.results]
    assert [] == plots.run("None").results


def test_a_plot_that_fails_has_the_units_of_its_axes(plots: Context) -> None:
    """A test of E2B's plots ten dates against a hundred values, and reads the scales."""
    code = "plt.plot([datetime.date(2023, 9, 1)] * 10, range(100)); plt.show()"
    failed = plots.run(code, timeout_s=120)

    assert "ValueError" == getattr(failed.error, "name", "")
    (found,) = [each.chart for each in failed.results]
    assert ("line", [], "datetime", "linear") == (
        found["type"], found["elements"], found["x_scale"], found["y_scale"]
    )  # fmt: skip
    numbers = plots.run("plt.plot([1, 2], [3])", timeout_s=120)
    assert [None] == [each.chart for each in numbers.results], "nothing is known of it"


@pytest.mark.full
def test_dates_and_names_on_axes(plots: Context) -> None:
    found = chart(
        plots,
        "days = [datetime.date(2023, 9, day) for day in (1, 2, 3)]\nplt.plot(days, ['A', 'B', 'C'])",
    )

    assert ("datetime", "categorical") == (found["x_scale"], found["y_scale"])
    assert ["2023-09-01T00:00:00+00:00", "A"] == found["elements"][0]["points"][0]
    assert ["A", "B", "C"] == found["y_tick_labels"]
    pandas = "__import__('pandas')"
    monthly = chart(
        plots,
        f"{pandas}.Series([5, 6], {pandas}.date_range('2023-01-01', periods=2, freq='MS')).plot();",
    )
    assert ("datetime", "linear") == (monthly["x_scale"], monthly["y_scale"])
    assert [["2023-01-01T00:00:00+00:00", 5.0], ["2023-02-01T00:00:00+00:00", 6.0]] == (
        monthly["elements"][0]["points"]
    )
    assert "2023-01-01T00:00:00+00:00" == monthly["x_ticks"][0]
    gap = chart(plots, "plt.plot([1, 2], [3, float('nan')])")
    assert [[1.0, 3.0], [2.0, None]] == gap["elements"][0]["points"]


def test_bars(plots: Context) -> None:
    upright = chart(plots, "plt.bar(['A', 'B'], [100, 200]); plt.ylabel('Sold')")
    grouped = chart(
        plots,
        "fig, ax = plt.subplots()\nat = np.arange(2)\n"
        "ax.bar(at - 0.2, [1, 2], 0.4, label='old'); ax.bar(at + 0.2, [3, 4], 0.4, label='new')\n"
        "ax.set_xticks(at, ['A', 'B']);",
    )
    flat = chart(plots, "plt.barh(['A', 'B'], [5, 6])")

    assert ("bar", None, "Sold", None) == (
        upright["type"], upright["title"], upright["y_label"], upright["x_unit"]
    )  # fmt: skip
    assert [("A", 100.0, "Group 1"), ("B", 200.0, "Group 1")] == _bars(upright)
    assert [("A", 1, "old"), ("B", 2, "old"), ("A", 3, "new"), ("B", 4, "new")] == _bars(grouped)
    assert [("A", 5, "Group 1"), ("B", 6, "Group 1")] == _bars(flat)


def _bars(found: Any) -> list[Any]:
    return [(each["label"], each["value"], each["group"]) for each in found["elements"]]


def test_pies_and_boxes(plots: Context) -> None:
    pie = chart(plots, "plt.pie([90, 10], labels=['No', 'Yes'], startangle=90); plt.title('T');")
    data = "[[1, 2, 3, 4, 5, 50], [2, 3, 4]]"
    boxes = chart(plots, f"plt.boxplot({data}, tick_labels=['a', 'b']);")
    flat = chart(plots, f"plt.boxplot({data}, orientation='horizontal', patch_artist=True);")

    assert [("No", 324.0, 1.0), ("Yes", 36.0, 1.0)] == [
        (each["label"], each["angle"], each["radius"]) for each in pie["elements"]
    ]
    first = {
        "min": 1,
        "first_quartile": 2.25,
        "median": 3.5,
        "third_quartile": 4.75,
        "max": 5,
        "outliers": [50],
    }
    assert "box_and_whisker" == boxes["type"] == flat["type"]
    assert {"label": "a", **first} == boxes["elements"][0]
    assert {"label": "1", **first} == flat["elements"][0]
    assert 2 == len(boxes["elements"]) == len(flat["elements"])


@pytest.mark.full
def test_several_axes_and_what_is_not_known(plots: Context) -> None:
    both = chart(
        plots,
        "fig, axes = plt.subplots(1, 2)\nfig.suptitle('Both')\naxes[0].plot([1, 2])\n"
        "axes[1].scatter([1, 2, 3], [4, 5, 6], c=[1, 2, 3], label='dots')",
    )
    circle = chart(plots, "fig, ax = plt.subplots()\nax.add_artist(plt.Circle((0, 0), 1));")
    large = chart(plots, "plt.plot(np.zeros(200_000));")
    solid = chart(
        plots,
        "ax = plt.figure().add_subplot(projection='3d')\nax.plot([1, 2], [3, 4], [5, 6]);",
    )

    assert ("superchart", "Both") == (both["type"], both["title"])
    assert ["line", "scatter"] == [each["type"] for each in both["elements"]]
    assert [1.0, 4.0] == both["elements"][1]["elements"][0]["points"][0]
    assert ("unknown", []) == (circle["type"], circle["elements"])
    assert large is None, "the picture alone"
    assert ("unknown", []) == (solid["type"], solid["elements"]), "projections are no values"
    assert chart(plots, "plt.subplots();") is None
    assert chart(plots, "plt.subplots(1, 2);") is None


def test_a_table_of_pandas(plots: Context) -> None:
    found = plots.run("import pandas\npandas.DataFrame({'a': [1, 2]})", timeout_s=120).results[0]

    assert "<table" in (found.html or "")


@pytest.fixture(scope="module")
def jupyter(sandbox: Sandbox) -> Iterator[Context]:
    env = {**ENV, "JUPYTER_PATH": str(SCIENCE / "share/jupyter")}
    with sandbox.context(kernel="python3", env=env) as made:
        yield made


@pytest.mark.full
def test_a_kernel_of_jupyters(jupyter: Context) -> None:
    jupyter.run("x = 41")
    found = jupyter.run("import sys\nprint('o'); print('e', file=sys.stderr)\ndisplay(1)\nx + 1")
    error = jupyter.run("def f(): return 1 / 0\nf()").error

    assert ("42", "o\n", "e\n", None) == (found.text, found.stdout, found.stderr, found.error)
    assert [False, True] == [each.is_main for each in found.results]
    assert error is not None
    assert ("ZeroDivisionError", "division by zero") == (error.name, error.value)
    assert "return 1 / 0" in error.traceback
    assert "\x1b" not in error.traceback
    assert "'ann'" == jupyter.run("input('name? ')", stdin="ann\n").text
    assert "StdinNotImplementedError" == getattr(jupyter.run("input()").error, "name", "")
    assert "EOFError" == getattr(jupyter.run("input()", stdin="").error, "name", "")


@pytest.mark.full
def test_a_kernel_of_jupyters_is_interrupted_and_its_end_told(jupyter: Context) -> None:
    jupyter.run("kept = 1")
    for patience_s in (0.5, 0.001, 0.002, 0.004, 0.01, 0.03):
        error = str(jupyter.run("while True: pass", timeout_s=patience_s).error)
        assert "variables are kept" in error, patience_s
    assert "1" == jupyter.run("kept").text
    assert "the kernel has ended" in str(jupyter.run("import os; os._exit(1)", timeout_s=60).error)
    jupyter.restart()
    assert "1" == jupyter.run("1").text


@pytest.mark.full
def test_a_kernel_of_jupyters_is_interrupted_before_it_reads_the_cell(
    jupyter: Context, sandbox: Sandbox
) -> None:
    """It ignores SIGINT until the cell begins, and stands still meanwhile."""
    steps = "'until test -e ready; do sleep 0.01; done; kill -STOP $0; sleep 0.5; kill -CONT $0'"
    jupyter.run("import os, subprocess; kept = 1")
    jupyter.run(f"subprocess.Popen(['setsid', 'sh', '-c', {steps}, str(os.getpid())])")
    sandbox.files.write("ready", "")
    sandbox.shell("until grep -q 'State:.T' /proc/[0-9]*/status; do sleep 0.01; done")
    error = str(jupyter.run("while True: pass", timeout_s=0.01).error)
    assert "variables are kept" in error
    assert "1" == jupyter.run("kept").text


def test_a_kernel_that_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises(ExecError, match="no kernel 'nope'"):
        sandbox.context(kernel="nope", env=ENV)
    sandbox.files.make_dir("none")
    sandbox.files.write("none/jupyter_client.py", "raise ImportError")  # the host may have it
    with pytest.raises(ExecError, match="jupyter_client is not installed"):
        sandbox.context(kernel="python3", env={"PYTHONPATH": "none"}, cwd="/home/sandbox")
    with pytest.raises(InvalidRequest):
        sandbox.context(kernel="../x")
