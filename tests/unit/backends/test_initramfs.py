"""Tests of the files that a guest's Python is given."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ringfence.backends.local.agents import agent_code
from ringfence.backends.microvm import initramfs


def test_modules_that_replace_themselves_are_listed(tmp_path: Path) -> None:
    """Since Python 3.13 collections.abc puts another module in its place, which names another file."""
    python = agent_code.interpreter()[0]
    program = "import collections; print(collections.__path__[0])"
    package = subprocess.check_output([python, "-I", "-S", "-c", program], text=True).strip()

    files = initramfs._files_of_python(str(tmp_path))

    assert f"{package}/abc.py" in files
