"""Sandboxes served by an egress process of the test's own, which the test may look at and kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.egress.host.client import Egress
from tests.egress.inside.conftest import new_sandbox
from tests.egress.world import World

MakeBox = Callable[..., Sandbox]


@pytest.fixture
def egress() -> Iterator[Egress]:
    """Ended with the test, which must not have made it say that something was wrong with itself."""
    made = Egress()
    yield made
    faults = [line.fault for line in made._lines.values() if line.fault]
    made.close()
    assert [] == faults


@pytest.fixture
def backend(egress: Egress, tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"), egress=lambda: egress)
    yield made
    made.close()


@pytest.fixture
def box(world: World, backend: NativeBackend) -> Iterator[MakeBox]:
    """`box(*rules, **options)`: a sandbox in which `attempt` works; ended with the test."""
    stack = ExitStack()

    def create(*rules: str, **options: Any) -> Sandbox:
        options.setdefault("network", list(rules))
        return stack.enter_context(new_sandbox(world, backend=backend, **options))

    with stack:
        yield create
