"""Each bomb ends itself only: its sandbox runs the next program, and the result says what happened."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from tests.bombs import BOMBS, limits_of, set_off

_AT_ITS_LIMIT = (
    "out of memory",
    "processes limit",
    "told the program",
    "timeout",
    "output truncated",
)
_MEMORY = ("malloc", "shared mapping")


@pytest.mark.parametrize("name", BOMBS)
def test_it_ends_itself_only(name: str) -> None:
    with Sandbox.create(backend="native", limits=limits_of("native")) as sandbox:
        told = set_off(sandbox, name, 20.0 if name in _MEMORY else 0.5)

    assert name == "loopback" or any(how in told for how in _AT_ITS_LIMIT), told
    if name in _MEMORY:
        assert told in ("out of memory", "told the program"), told
