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
from ringfence.testing.conformance.checkpoints import Checkpoints
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.files import Files
from ringfence.testing.conformance.helper_tasks import HelperTasks
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.live_forks import LiveForks
from ringfence.testing.conformance.mounts import Mounts
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.optional import (
    Attendance,
    Comparison,
    Durability,
    Forks,
    Profiles,
    Tenancy,
)
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.requests import Requests
from ringfence.testing.conformance.suspension import Suspension
from ringfence.testing.conformance.trees import Trees
from ringfence.testing.conformance.warmth import Warmth

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _microvm() -> None:
    require_machines()


class Machines(Connecting, ConformanceBase):
    patience_s: ClassVar[float] = 180.0
    soon_s: ClassVar[float] = 6.0
    big_bytes: ClassVar[int] = 2_500_003  # more than a pipe on either side, of a mebibyte each

    def make_backend(self) -> MicrovmBackend:
        return machine_backend()

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        """Not even Python alone: to start it takes an imitated processor a second, and Bash a tenth."""
        return ("bash", "-c", 'exec 3<>"/dev/tcp/$0/$1"', host, str(port))

    def make_spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"tier": STRONG, **changes})


@pytest.mark.rootless
class TestMicrovm(
    Machines,
    Lifecycle,
    Execs,
    Endings,
    Requests,
    Files,
    Trees,
    HelperTasks,
    Suspension,
    Warmth,
    Reports,
    Comparison,
    Durability,
    Tenancy,
    Profiles,
    Attendance,
    Forks,
    LiveForks,
):
    """One half of the suite."""


@pytest.mark.root
class TestMicrovmAsRoot(Machines, Environment, Mounts, Network, Checkpoints, LimitsThatBite):
    """The other half: each of its machines takes most of a second, and once is enough.

    `tools/conformance.sh microvm` runs both as one user.
    """


def test_the_halves_are_the_whole() -> None:
    halves = _tests_of(TestMicrovm) | _tests_of(TestMicrovmAsRoot)

    assert _tests_of(BackendConformance) == halves


def _tests_of(part: type) -> set[str]:
    return {name for name in dir(part) if name.startswith("test_")}


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "microvm":

    class TestAllOfMicrovm(Machines, BackendConformance):
        """Everything, as whoever runs it."""
