"""The ten cells that an interpreter has to get right, for every backend and way to it."""

from __future__ import annotations

from typing import Any

PATH = "/usr/local/lib/ringfence-tests/science"  # tools/needs.sh; an image has it not

SETUP = f"""
import os, subprocess, sys, zipfile
sys.path.append({PATH!r})
class Table:
    def __init__(self, rows): pass
    def _repr_html_(self): return '<table>'
class Figure:
    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n'
def draw():
    try: import matplotlib.pyplot as plt
    except ImportError: return display(Figure())
    plt.plot([1, 2])
try: from pandas import DataFrame
except ImportError: DataFrame = Table
with zipfile.ZipFile('tenth-1-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('tenth.py', 'value = 10')
    wheel.writestr('tenth-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tenth\\nVersion: 1\\n')
    wheel.writestr('tenth-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')
    wheel.writestr('tenth-1.dist-info/RECORD', '')
"""
PIP = "%pip install -q --no-index --no-warn-script-location ./tenth-1-py3-none-any.whl"


def check_ten_cells(context: Any) -> None:
    """Run them in a context of Python."""

    def run(code: str, **options: Any) -> Any:
        return context.run(code, timeout_s=120, **options)

    imported = run(SETUP)
    assert imported.error is None, imported.error.traceback
    assert "42" == run("6 * 7").text
    assert "<table" in run("DataFrame({'a': [1]})").results[0].html
    assert [b"\x89PNG"] == [each.png[:4] for each in run("draw()").results]
    assert ("ZeroDivisionError", "division by zero") == _error(run("1 / 0"))
    assert "'ann'" == run("input('name? ')", stdin="ann\n").text
    assert "5" == run("import asyncio\nawait asyncio.sleep(0, 5)").text
    if run("!python3 -m pip --version >/dev/null 2>&1 && echo yes").stdout:
        run(PIP)
        assert "10" == run("import tenth; tenth.value").text
    assert 5_000_001 == len(run("print('x' * 5_000_000)").stdout)
    assert "sub\n" == run("subprocess.run(['echo', 'sub']);").stdout


def _error(cell: Any) -> tuple[str, str]:
    return cell.error.name, cell.error.value
