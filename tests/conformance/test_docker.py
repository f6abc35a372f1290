"""The Docker backend passes the suite over a real engine, which the tests start themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.connecting import Connecting
from tests.engine import running_engine
from tests.features import require
from tests.strangers import PYTHON, package_for_others

from ringfence import Mount, NetworkPolicy, Sandbox
from ringfence.attack.lab import first_host_pid
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.docker.options import LABEL
from ringfence.errors import BackendUnavailable, Unsupported
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

pytestmark = [pytest.mark.root, pytest.mark.full]
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


def test_the_agent_sees_how_much_of_its_memory_limit_is_used() -> None:
    """It waits for what the kernel has yet to give back of a killed program (`guest/execs.py`)."""
    backend = DockerBackend(_socket[0])
    limits = {"memory_bytes": 96 << 20}
    with closing(backend), Sandbox.create(backend=backend, limits=limits) as made:
        fds = os.listdir(at := f"/proc/{made._inner.pid}/fd")  # type: ignore[attr-defined]
        held = [os.path.basename(os.readlink(f"{at}/{fd}")) for fd in fds]

    assert {"memory.usage_in_bytes", "memory.current"} & {*held}


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
    test_attach_to_a_live_sandbox = Mounts.test_attach_to_a_live_sandbox
    test_attach_read_write = Mounts.test_attach_read_write
    test_what_is_attached_is_protected_too = Mounts.test_what_is_attached_is_protected_too
    test_what_hosts_programs_obey = Mounts.test_what_hosts_programs_obey_is_protected
    test_attach_several = Mounts.test_attach_several
    test_what_cannot_be_attached_leaves_nothing = Mounts.test_what_cannot_be_attached_leaves_nothing
    test_attach_to_a_suspended_sandbox = Mounts.test_attach_to_a_suspended_sandbox
    test_denied_paths = Mounts.test_denied_paths
    test_nothing_is_attached_at_what_is_denied = Mounts.test_nothing_is_attached_at_what_is_denied
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


TOLD = ("host_identity", "root_file_system", "kernel_interfaces", "nested_user_namespaces")
ENGINES_ALONE: dict[str, Any] = {
    "seccomp": 3,
    "own user namespace": False,
    "settings of /proc": True,
}
ENGINES_ALONE["told"] = {"degraded"}
ISOLATION = {
    "seccomp": 2,
    "own user namespace": True,
    "settings of /proc": False,
    "told": {"enforced"},
}


def what_holds(backend: DockerBackend, **options: Any) -> dict[str, Any]:
    with Sandbox.create(backend=backend, **options) as sandbox:
        filters = sandbox.exec(["grep", "Seccomp_filters:", "/proc/self/status"]).text
        namespace = sandbox.exec(["readlink", "/proc/self/ns/user"]).text.strip()
        own = sandbox.exec(["sh", "-c", ": >>/proc/self/oom_score_adj"]).ok
        said = {each.name: each.status for each in sandbox.protections()}
    backend.close()
    return {
        "told": {said[name] for name in TOLD},
        "seccomp": int(filters.split()[1]),
        "own user namespace": namespace != os.readlink("/proc/self/ns/user"),
        "settings of /proc": own,
    }


def test_the_agent_isolates_more_than_the_engine(engine: str) -> None:
    assert ISOLATION == what_holds(DockerBackend(engine))


def test_a_host_that_allows_no_isolation_falls_back_to_the_engines_and_says_so(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own filter left around it: it refuses the first call."""
    monkeypatch.setattr("ringfence.backends.docker.options._security", lambda _engine: [])

    assert ENGINES_ALONE == what_holds(DockerBackend(engine))


def test_without_our_filter_the_engines_stays(engine: str) -> None:
    found = what_holds(DockerBackend(engine), profile=UNRESTRICTED)

    assert {**ENGINES_ALONE, "seccomp": 1} == found


def test_what_takes_isolation_is_refused_without_it(engine: str) -> None:
    backend = DockerBackend(engine)
    for asked in ({"mounts": [Mount("/data", "/usr")]}, {"network": NetworkPolicy.parse("x.test")}):
        with pytest.raises(Unsupported) as refused:
            Sandbox.create(backend=backend, profile=UNRESTRICTED, **asked)
        assert "namespaces" in refused.value.message
    with (
        Sandbox.create(backend=backend, profile=UNRESTRICTED) as sandbox,
        pytest.raises(Unsupported),
    ):
        sandbox.snapshot()
    backend.close()


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


ORDINARY_UID = 23456
SDK = ("docker", "requests", "urllib3", "idna", "certifi")
AS_ORDINARY = """
import json, os, sys
from ringfence import NetworkPolicy, Sandbox
from ringfence.backends.docker.backend import DockerBackend
from ringfence.model.mount import Mount
address, work, port = sys.argv[1:]
backend = DockerBackend(address, state_dir=os.environ["HOME"] + "/state")
network = NetworkPolicy.parse(f"127.0.0.1:{port}")
connect = "import socket; socket.create_connection(('127.0.0.1', {}))"
mounts = [Mount("/data", work, "read_write"), Mount("/shown", work)]
with Sandbox.create(backend=backend, mounts=mounts, network=network) as sandbox:
    refused = not sandbox.shell("echo x > /shown/new || echo x > /data/.git/hooks/new").ok
    programs = [["/usr/bin/python3", "-c", connect.format(each)] for each in (port, 1)]
    reached = [sandbox.exec(each).ok for each in programs]
    sandbox.shell("echo kept > kept; echo made > /data/made")
    held = {each.name: each.status for each in sandbox.protections()}
    snapshot = sandbox.snapshot()
with Sandbox.restore(snapshot.id, backend=backend) as again:
    kept = again.shell("cat kept /data/made").text
backend.close()
print(json.dumps([refused, reached, kept, held["host_identity"], held["network"]]))
"""


def test_an_ordinary_user_has_all_of_it_too(engine: str, tmp_path: Path) -> None:
    """Who may ask the engine, and is not root: the helpers are that user's, and so is the container's."""
    place = Path(engine.removeprefix("unix://"))
    place.parent.chmod(0o711)
    place.chmod(0o666)
    package = package_for_others(tmp_path)
    for name in SDK:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, package / name)
    work, home = tmp_path / "work", tmp_path / "home"
    for each in (work, home):
        each.mkdir()
        os.chown(each, ORDINARY_UID, ORDINARY_UID)
    become = ("setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ran = subprocess.run(
            [*become, PYTHON, "-W", "ignore", "-c", AS_ORDINARY, engine, str(work), port],
            env={"PYTHONPATH": str(package), "HOME": str(home), "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )

    assert [True, [True, False], "kept\nmade\n", "enforced", "enforced"] == json.loads(ran.stdout)
    assert [("made", ORDINARY_UID)] == [(each.name, each.stat().st_uid) for each in work.iterdir()]


@pytest.mark.parametrize("address", ["unix:///nonexistent/engine", "tcp://127.0.0.1:1"])
def test_no_engine_no_sandbox(address: str) -> None:
    with pytest.raises(BackendUnavailable):
        DockerBackend(address).provision(SandboxSpec())
