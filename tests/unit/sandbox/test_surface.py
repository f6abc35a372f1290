"""`AsyncSandbox` has the surface of `Sandbox`: names, parameters and defaults, no drift."""

from __future__ import annotations

import inspect

import pytest

from ringfence.sandbox.aio import AsyncSandbox
from ringfence.sandbox.sync import Sandbox

pytestmark = pytest.mark.anyone


def _public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_the_same_names() -> None:
    assert _public(Sandbox).keys() == _public(AsyncSandbox).keys()


@pytest.mark.parametrize(
    "name", [n for n, v in _public(Sandbox).items() if not isinstance(v, property)]
)
def test_the_same_parameters(name: str) -> None:
    ours = inspect.signature(getattr(Sandbox, name)).parameters
    theirs = inspect.signature(getattr(AsyncSandbox, name)).parameters
    if name == "start":  # the options travel as they are
        assert "options" in theirs
        return

    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize(
    "name", [n for n, v in _public(Sandbox).items() if not isinstance(v, property)]
)
def test_every_method_can_be_awaited(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AsyncSandbox, name))
