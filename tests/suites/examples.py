"""Programs that others start from a shell, run in this process: importing a framework takes seconds."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

_EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def output_of(name: str, where: Path) -> str:
    """What `examples/NAME.py` prints, in an empty directory."""
    said = io.StringIO()
    with contextlib.chdir(where), contextlib.redirect_stdout(said):
        runpy.run_path(str(_EXAMPLES / f"{name}.py"), run_name="__main__")
    return said.getvalue()


def status_of(*argv: str) -> tuple[int, str]:
    """How a command of an installed package ends, and what it says."""
    (command,) = entry_points(group="console_scripts", name=argv[0])
    said = io.StringIO()
    with mock.patch.object(sys, "argv", list(argv)), contextlib.redirect_stdout(said):
        try:
            status = command.load()()
        except SystemExit as exc:
            status = exc.code
    return int(status or 0), said.getvalue()
