"""What every test of a mistake needs: the command, and the form of an answer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import ringfence
from tests.cli.command import PATIENCE_S, RINGFENCE, environment

LONGEST = 600
OWN_FAILURE = 125

REFUSALS = (ringfence.RingfenceError, TypeError, AttributeError)


def command(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RINGFENCE, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=place,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )


def answers(text: str, fault: str, remedy: str) -> None:
    assert fault in text
    assert remedy in text
    assert "Traceback" not in text
    assert "internal error" not in text
    assert len(text.strip()) <= LONGEST


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(REFUSALS) as caught:
        act()
    return str(caught.value)
