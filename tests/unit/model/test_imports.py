"""What importing costs: every command pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("typing", "re", "json", "pathlib", "uuid", "ipaddress", "enum", "inspect", "dataclasses")


def loaded_after(statement: str) -> set[str]:
    # -S: site may load anything on its own, by way of .pth files.
    script = f"import sys; sys.path[:0] = {sys.path!r}; {statement}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", script]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", ["ringfence", "ringfence.model"])
def test_packages_load_nothing(module: str) -> None:
    assert set() == loaded_after(f"import {module}").intersection(HEAVY)


def test_nouns_load_nothing_heavy() -> None:
    """`dataclasses` alone takes longer than Python's own start."""
    rooms = "capabilities exec files ids limits mount network session snapshot spec state stats"
    statement = "import " + ", ".join(f"ringfence.model.{room}" for room in rooms.split())

    assert set() == loaded_after(statement).intersection(HEAVY)


def test_every_public_name_is_there() -> None:
    import ringfence
    from ringfence import errors, model

    assert all(getattr(model, name) is getattr(ringfence, name) for name in model.__all__)
    assert ringfence.FileNotFound is errors.FileNotFound
    assert {*model.__all__, "Sandbox", "AsyncSandbox", "InvalidRequest"} <= set(dir(ringfence))
    with pytest.raises(AttributeError):
        _ = ringfence.no_such_name
