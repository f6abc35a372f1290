"""What importing costs: every command pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ringfence

pytestmark = pytest.mark.anyone

SOURCE = Path(ringfence.__file__).parents[1]
HEAVY = ("typing", "re", "json", "pathlib", "uuid", "ipaddress", "enum", "inspect", "dataclasses")


def loaded_after(statement: str) -> set[str]:
    # -S: site may load anything on its own, by way of .pth files.
    script = f"import sys; sys.path[:0] = {sys.path!r}; {statement}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", script]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", ["ringfence", "ringfence.model"])
def test_packages_load_nothing(module: str) -> None:
    assert set() == loaded_after(f"import {module}").intersection(HEAVY)


def test_models_load_nothing_heavy() -> None:
    """`dataclasses` alone takes longer than Python's own start."""
    rooms = (
        "capabilities execs.exec files base.ids limits mount net.network session spec state stats"
    )
    statement = "import " + ", ".join(f"ringfence.model.{room}" for room in rooms.split())

    assert set() == loaded_after(statement).intersection(HEAVY)


def test_every_public_name_is_there() -> None:
    from ringfence import errors, model

    assert all(getattr(model, name) is getattr(ringfence, name) for name in model.__all__)
    assert ringfence.FileNotFound is errors.FileNotFound
    assert {*model.__all__, "Sandbox", "AsyncSandbox", "InvalidRequest"} <= set(dir(ringfence))
    with pytest.raises(AttributeError):
        _ = ringfence.no_such_name  # type: ignore[attr-defined]


_STAR = "from ringfence import *; print(sorted(name for name in globals() if name[0] != '_'))"


def test_a_star_brings_every_public_name() -> None:
    from ringfence import model

    scope: dict[str, object] = {}
    exec("from ringfence import *", scope)

    assert {*model.__all__, "Sandbox", "Template", "SessionManager", "InvalidRequest"} <= set(scope)
    assert all(scope[name] is getattr(ringfence, name) for name in scope if name[0] != "_")
    assert not {"annotations", "TYPE_CHECKING"} & set(scope)


def test_a_star_needs_no_extra() -> None:
    """Where the client cannot be had, it is left out; asked for by name, it says what is missing."""
    script = f"import sys; sys.path[:0] = [{str(SOURCE)!r}]; {_STAR}"
    command = [sys.executable, "-I", "-S", "-c", script]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "'Mount'" in names
    assert "'Client'" not in names
