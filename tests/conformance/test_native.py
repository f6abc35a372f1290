"""The native backend passes the suite, as whoever runs it: host root or an ordinary user."""

from __future__ import annotations

import tempfile

import pytest
from tests.claimed import ClaimingBackend
from tests.connecting import Connecting
from tests.features import require

from ringfence.backends.native.backend import NativeBackend
from ringfence.testing.conformance import BackendConformance

_state = tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-")


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


class TestNative(Connecting, BackendConformance):
    def make_backend(self) -> NativeBackend:
        return NativeBackend(state_dir=_state.name)

    def make_durable(self, directory: str) -> NativeBackend:
        return NativeBackend(state_dir=_state.name, restart_dir=directory, outlive_s=60.0)


@pytest.mark.anyone
@pytest.mark.full
class TestNativeClaimed(TestNative):
    """Every sandbox is built ahead and then claimed: whoever gets it cannot tell the difference."""

    def make_backend(self) -> ClaimingBackend:  # type: ignore[override]
        return ClaimingBackend(NativeBackend(state_dir=_state.name))
