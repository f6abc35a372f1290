"""The gVisor backend passes the suite over a real `runsc`, as whoever runs it."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import pytest
from tests.connecting import Connecting
from tests.features import require
from tests.halves import ForAnybody, ForEachUser

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.testing.conformance import ConformanceBase

pytestmark = pytest.mark.full

_state = tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-")


@pytest.fixture(scope="module", autouse=True)
def _gvisor() -> None:
    require("user namespaces")
    require("runsc")


class Gvisor(Connecting, ConformanceBase):
    patience_s: ClassVar[float] = 120.0
    binds_late: ClassVar[bool] = False

    def make_backend(self) -> GvisorBackend:
        return GvisorBackend(state_dir=_state.name)

    def make_spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"tier": STRONG, **changes})


class TestGvisor(Gvisor, ForEachUser):
    pass


@pytest.mark.anyone
class TestGvisorForAnybody(Gvisor, ForAnybody):
    pass
