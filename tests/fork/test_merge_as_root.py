"""A merge by root: git reads texts of guests, so it runs as another user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ringfence.fork.text import TextMerger

pytestmark = pytest.mark.root


def test_git_does_not_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in git's place prints its user and its settings."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        git = Path(directory, "git")
        git.write_text(
            '#!/bin/sh\nid -u; id -G; echo "$HOME $GIT_CONFIG_GLOBAL"; cat "$4" "$5" "$6"\n'
        )
        git.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        said = TextMerger().merge(b"base\n", b"ours\n", b"theirs\n")

    assert b"65534\n65534\n/proc /dev/null\nours\nbase\ntheirs\n" == said
