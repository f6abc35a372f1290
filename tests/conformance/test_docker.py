"""The Docker backend passes the suite over a real engine, which the tests start themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.connecting import Connecting
from tests.engine import running_engine
from tests.features import require

from ringfence import Sandbox
from ringfence.backends.docker.backend import LABEL, DockerBackend
from ringfence.errors import BackendUnavailable
from ringfence.model.spec import OS_HARDENED, UNRESTRICTED, SandboxSpec
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.suspension import Suspension

pytestmark = pytest.mark.root  # an engine of one's own takes root
_socket: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[str]:
    require("dockerd")
    with running_engine() as address:
        _socket.append(address)
        yield address
        _socket.clear()


class TestDocker(
    Connecting, Lifecycle, Execs, Endings, Environment, Network, Suspension, LimitsThatBite, Reports
):
    """What is left out here does not depend on the engine: `tools/conformance.sh docker` runs all of it."""

    def make_backend(self) -> DockerBackend:
        return DockerBackend(_socket[0])


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "docker":

    class TestAllOfDocker(TestDocker, BackendConformance):
        """Everything: each of its sandboxes takes a second."""


def test_the_engine_keeps_no_container(engine: str) -> None:
    backend = DockerBackend(engine)
    sandbox = backend.provision(SandboxSpec())
    found = backend.client().containers.list(all=True, filters={"label": LABEL})

    sandbox.terminate()

    assert [sandbox.id] == [each.labels[LABEL] for each in found]
    assert [] == backend.client().containers.list(all=True, filters={"label": LABEL})
    backend.close()


@pytest.mark.parametrize(("profile", "filters"), [(OS_HARDENED, 2), (UNRESTRICTED, 1)])
def test_what_runs_has_our_filter_besides_the_engines(
    engine: str, profile: str, filters: int
) -> None:
    with Sandbox.create(backend=DockerBackend(engine), profile=profile) as sandbox:
        said = sandbox.exec(["grep", "Seccomp_filters:", "/proc/self/status"]).text

    assert filters == int(said.split()[1])


@pytest.mark.parametrize("address", ["unix:///nonexistent/engine", "tcp://127.0.0.1:1"])
def test_no_engine_no_sandbox(address: str) -> None:
    with pytest.raises(BackendUnavailable):
        DockerBackend(address).provision(SandboxSpec())
