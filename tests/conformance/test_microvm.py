"""The microVM backend passes the suite in machines of an emulator's, as whoever runs it."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from tests.connecting import Connecting
from tests.machines import machine_backend, require_machines

from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.testing.conformance import BackendConformance, ConformanceBase
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.suspension import Suspension


@pytest.fixture(scope="module", autouse=True)
def _microvm() -> None:
    require_machines()


class Machines(Connecting, ConformanceBase):
    patience_s: ClassVar[float] = 180.0
    soon_s: ClassVar[float] = 6.0

    def make_backend(self) -> MicrovmBackend:
        return machine_backend()

    def make_spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"tier": STRONG, **changes})


@pytest.mark.rootless  # once is enough: nothing of either class asks who has started the machine
class TestMicrovm(Machines, Lifecycle, Execs, Endings, Suspension, Reports):
    """What is left out here does not depend on the machine: `tools/conformance.sh microvm` runs all of it."""


@pytest.mark.root
class TestMicrovmAsRoot(Machines, Environment, Network, LimitsThatBite):
    """The rest of what depends on the machine."""


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "microvm":

    class TestAllOfMicrovm(Machines, BackendConformance):
        """Everything: under software emulation each of its machines takes most of a second."""
