"""The Docker backend passes the suite over a real engine, which the tests start themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.connecting import Connecting
from tests.engine import running_engine
from tests.features import require

from ringfence import Sandbox
from ringfence.attack.lab import first_host_pid
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.docker.options import LABEL
from ringfence.errors import BackendUnavailable
from ringfence.model.spec import UNRESTRICTED, SandboxSpec
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.conformance.base import ConformanceBase
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.mounts import Mounts
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.reports import Reports
from ringfence.testing.conformance.snapshots import Snapshots
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


class TestWhatHelpersOfTheHostDo(ConformanceBase):
    """Of two long parts, what depends on the container: its root is the engine's, its ids one."""

    source, save, restore = Mounts.source, Snapshots.save, Snapshots.restore
    test_read_only_holds = Mounts.test_read_only_holds
    test_read_write = Mounts.test_read_write
    test_a_mount_in_another_is_never_hidden = Mounts.test_a_mount_in_another_is_never_hidden
    test_a_read_only_directory = Mounts.test_a_read_only_directory_of_the_session
    test_memory_outlives_the_session = Mounts.test_memory_outlives_the_session
    test_protected_paths_cannot_be_moved = Mounts.test_protected_paths_cannot_be_moved_away
    test_nothing_is_left_behind = Mounts.test_nothing_is_left_behind
    test_restored_after_the_session_is_gone = Snapshots.test_restored_after_the_session_is_gone
    test_a_snapshot_is_a_moment = Snapshots.test_a_snapshot_is_a_moment
    test_host_directories_are_not_copied = Snapshots.test_host_directories_are_not_copied

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


ENGINES_ALONE = {"seccomp": 2, "own user namespace": False, "settings of /proc": True}
WALLS = {"seccomp": 1, "own user namespace": True, "settings of /proc": False}


def what_holds(backend: DockerBackend, **options: Any) -> dict[str, Any]:
    with Sandbox.create(backend=backend, **options) as sandbox:
        filters = sandbox.exec(["grep", "Seccomp_filters:", "/proc/self/status"]).text
        namespace = sandbox.exec(["readlink", "/proc/self/ns/user"]).text.strip()
        own = sandbox.exec(["sh", "-c", ": >>/proc/self/oom_score_adj"]).ok
        said = {each.name: each.status for each in sandbox.protections()}
    backend.close()
    assert ("enforced" if namespace != os.readlink("/proc/self/ns/user") else "degraded") == said[
        "host_identity"
    ]
    return {
        "seccomp": int(filters.split()[1]),
        "own user namespace": namespace != os.readlink("/proc/self/ns/user"),
        "settings of /proc": own,
    }


def test_the_agent_puts_up_walls_that_the_engine_has_not(engine: str) -> None:
    assert WALLS == what_holds(DockerBackend(engine))


def test_a_host_that_allows_no_walls_has_the_engines_and_ours_behind_them_and_says_so(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own filter left around it: it refuses the first call."""
    monkeypatch.setattr("ringfence.backends.docker.options._security", lambda _engine: [])

    assert ENGINES_ALONE == what_holds(DockerBackend(engine))


def test_without_our_filter_the_engines_stays(engine: str) -> None:
    found = what_holds(DockerBackend(engine), profile=UNRESTRICTED)

    assert {**ENGINES_ALONE, "seccomp": 1} == found


def test_each_container_has_host_ids_of_its_own(engine: str) -> None:
    backend = DockerBackend(engine)
    with Sandbox.create(backend=backend) as one, Sandbox.create(backend=backend) as other:
        maps = [
            Path(f"/proc/{first_host_pid(each)}/uid_map").read_text().split()
            for each in (one, other)
        ]
        assert "1000" == one.exec(["id", "-u"]).text.strip()
    backend.close()

    assert all("1000" == inside and "1" == count for inside, _outside, count in maps)
    assert maps[0][1] != maps[1][1]
    assert not {"0", "1000"} & {outside for _inside, outside, _count in maps}


@pytest.mark.parametrize("address", ["unix:///nonexistent/engine", "tcp://127.0.0.1:1"])
def test_no_engine_no_sandbox(address: str) -> None:
    with pytest.raises(BackendUnavailable):
        DockerBackend(address).provision(SandboxSpec())
