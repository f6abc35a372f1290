"""What tests import is compiled already: each of some hundred daemons would else compile it for itself."""

from __future__ import annotations

import os
import py_compile
import struct
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec
from pathlib import Path

import pytest


def is_compiled(source: str) -> bool:
    """Whether Python takes what it finds compiled; see "Cached bytecode invalidation" of its reference."""
    try:
        head = Path(cache_from_source(source)).read_bytes()[:16]
    except FileNotFoundError:
        return False
    info = os.stat(source)
    return head == MAGIC_NUMBER + struct.pack("<3I", 0, int(info.st_mtime), info.st_size)


@pytest.mark.parametrize("name", ["httpx", "hypothesis", "pydantic", "ringfence", "starlette"])
def test_it_is_compiled(name: str) -> None:
    found = find_spec(name)

    assert found is not None
    assert found.origin is not None
    assert is_compiled(found.origin)


def test_what_changed_since_is_not(tmp_path: Path) -> None:
    """The control: so is a copy with another time, be its content the same."""
    source = tmp_path / "module.py"
    source.write_text("")
    assert not is_compiled(str(source))
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert is_compiled(str(source))

    os.utime(source, (1, 1))

    assert not is_compiled(str(source))
