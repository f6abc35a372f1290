"""What a reader of the documentation has at hand."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
Reader = tuple[Path, dict[str, str]]
"""The directory that a reader works in, and the environment."""


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A reader's shell: an empty directory with the examples, and `ringfence` on PATH."""
    desk, commands = tmp_path / "desk", tmp_path / "bin"
    desk.mkdir(mode=0o755)
    commands.mkdir()
    shutil.copytree(ROOT / "examples", desk / "examples")
    command = commands / "ringfence"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ringfence "$@"\n')
    command.chmod(0o755)
    env = dict(os.environ)
    env["PATH"] = f"{commands}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT / 'src'}:{env.get('PYTHONPATH', '')}".rstrip(":")
    env["RINGFENCE_IMAGES"] = str(tmp_path / "images")
    return desk, env
