"""The examples, run as their readers run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def output_of(name: str, where: Path) -> str:
    """What `examples/NAME.py` prints, in an empty directory."""
    run = subprocess.run(
        [sys.executable, str(_EXAMPLES / f"{name}.py")],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == run.returncode, run.stderr
    return run.stdout
