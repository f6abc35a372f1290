"""One attack, and one set of controls, for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence.attack.canaries import Canaries
from ringfence.attack.lab import Lab
from ringfence.attack.result import ProbeResult
from ringfence.attack.runner import run_attack
from tests.attack.controls import Controls


@pytest.fixture(scope="session")
def attack() -> list[ProbeResult]:
    return run_attack()


@pytest.fixture(scope="session")
def controls() -> Iterator[Controls]:
    with Canaries() as canaries:
        made = Controls(canaries)
        yield made
        made.close()


@pytest.fixture(scope="session")
def unprotected(controls: Controls) -> Lab:
    """Where probes from outside leave the protection out."""
    return Lab(controls.backend, controls.canaries, protected=False)
