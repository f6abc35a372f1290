"""The Docker backend over Podman's service, which speaks as an engine does: what depends on the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.connecting import Connecting
from tests.engine import running_podman
from tests.features import require

from ringfence import Sandbox
from ringfence.backends.docker.backend import DockerBackend
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.conformance.base import ConformanceBase
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.mounts import Mounts
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.snapshots import Snapshots

pytestmark = [pytest.mark.root, pytest.mark.full]
_socket: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[str]:
    require("podman")
    with running_podman() as address:
        _socket.append(address)
        yield address
        _socket.clear()


class TestPodman(Connecting, LimitsThatBite, Reports):
    """`RINGFENCE_TEST_ALL_OF=podman` runs all of the suite."""

    def make_backend(self) -> DockerBackend:
        return DockerBackend(_socket[0])


class TestWhatHelpersOfTheHostDo(ConformanceBase):
    source, save, restore = Mounts.source, Snapshots.save, Snapshots.restore
    test_read_write = Mounts.test_read_write
    test_attach_to_a_live_sandbox = Mounts.test_attach_to_a_live_sandbox
    test_attach_several = Mounts.test_attach_several
    test_attach_to_a_suspended_sandbox = Mounts.test_attach_to_a_suspended_sandbox
    test_denied_paths = Mounts.test_denied_paths
    test_restored_after_the_session_is_gone = Snapshots.test_restored_after_the_session_is_gone

    def make_backend(self) -> DockerBackend:
        return DockerBackend(_socket[0])


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "podman":

    class TestAllOfPodman(TestPodman, BackendConformance):
        """Everything: each of its sandboxes takes a second."""


def test_the_agent_has_isolation_of_its_own(engine: str) -> None:
    backend = DockerBackend(engine)
    with Sandbox.create(backend=backend) as sandbox:
        told = {each.name: each.status for each in sandbox.protections()}
    backend.close()

    assert {"enforced"} == set(told.values()), told
