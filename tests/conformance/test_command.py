"""The command backend passes the suite over real launchers, as whoever runs it."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading

import pytest
from tests.connecting import Connecting
from tests.features import require
from tests.halves import ForAnybody, ForEachUser

from ringfence import Mount, Sandbox
from ringfence.backends.command import launchers, place
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.codex import codex as codex_launcher
from ringfence.errors import Unsupported
from ringfence.testing.conformance import BackendConformance, ConformanceBase
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.reports import Reports

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require("user namespaces")
    require("bwrap")


class Bubblewrap(Connecting, ConformanceBase):
    def make_backend(self) -> CommandBackend:
        return CommandBackend(launchers.bubblewrap())


class TestBubblewrap(Bubblewrap, ForEachUser):
    pass


@pytest.mark.anyone
class TestBubblewrapForAnybody(Bubblewrap, ForAnybody):
    pass


# Nothing but our filter keeps a program from asking for a keyring: keyctl(2), KEYCTL_GET_KEYRING_ID.
ASKS_FOR_A_KEYRING = """
import ctypes, platform
number = {"x86_64": 250, "aarch64": 219}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(number, 0, -3, 1) < 0 and ctypes.get_errno())
"""


@pytest.mark.parametrize(("filtered", "refused"), [(True, errno.EPERM), (False, False)])
def test_bubblewraps_programs_run_under_our_filter(filtered: bool, refused: object) -> None:
    launcher = dataclasses.replace(launchers.bubblewrap(), filtered=filtered)
    with Sandbox.create(backend=CommandBackend(launcher)) as sandbox:
        said = sandbox.exec(["/usr/bin/python3", "-c", ASKS_FOR_A_KEYRING]).text

    assert str(refused) == said.strip()


LEAVES_ITS_TREE = (
    "import resource; resource.setrlimit(15, (1, 1))"  # RLIMIT_RTTIME: see guest/tags.py
)


@pytest.mark.parametrize("filtered", [True, False])
def test_nothing_leaves_its_tree_under_our_filter(filtered: bool) -> None:
    launcher = dataclasses.replace(launchers.bubblewrap(), filtered=filtered)
    with Sandbox.create(backend=CommandBackend(launcher)) as sandbox:
        left = sandbox.exec(["/usr/bin/python3", "-c", LEAVES_ITS_TREE]).ok
        told = "process_trees" in {each.name for each in sandbox.protections()}

    assert (not filtered, not filtered) == (left, told)


def test_without_the_agents_isolation_mounts_are_refused() -> None:
    """A launcher that lets nobody make a user namespace: its agent is refused, and it is started without."""
    tight = launchers.bubblewrap()
    backend = CommandBackend(dataclasses.replace(tight, within=tight.argv))
    with Sandbox.create(backend=backend) as sandbox:
        held = {each.name: each.status for each in sandbox.protections()}
        assert sandbox.exec(["true"]).ok
    with pytest.raises(Unsupported) as refused:
        Sandbox.create(backend=backend, mounts=[Mount("/data", "/usr")])
    backend.close()
    control = CommandBackend(tight)
    with Sandbox.create(backend=control, mounts=[Mount("/data", "/usr")]) as sandbox:
        assert sandbox.exec(["test", "-d", "/data/bin"]).ok
    control.close()

    assert "enforced" == held["nested_user_namespaces"]
    assert "mounts" == refused.value.field


FIRST_THREAD_ENDS = """
import ctypes, os, platform, threading, time
def linger():
    while ") Z " not in open("/proc/self/stat").read():
        time.sleep(0.01)
    print("gone", flush=True)
    time.sleep(600)
threading.Thread(target=linger).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread
"""


def test_who_only_looks_like_a_zombie_is_killed_too() -> None:
    with Sandbox.create(backend=CommandBackend(launchers.bubblewrap())) as sandbox:
        process = sandbox.start(["/usr/bin/python3", "-c", FIRST_THREAD_ENDS])
        while b"gone" not in process.stdout.read():
            assert process.running

        process.kill()

        assert signal.SIGKILL == process.wait(timeout_s=60).signal


@pytest.mark.root  # the CLI runs as an ordinary user of its own either way
class TestCodex(Connecting, Execs, Endings, Environment, Network, LimitsThatBite, Reports):
    """The real Codex CLI. Its policy lets no program connect; each of its sandboxes takes a second.

    What is left out here does not depend on the launcher: `tools/conformance.sh codex` runs all of it.
    """

    def make_backend(self) -> CommandBackend:
        require("codex")
        return CommandBackend(codex_launcher())

    def serve_argv(self, port: int) -> tuple[str, ...]:
        """No server may even listen: that nobody can connect is said all the same."""
        return ("sh", "-c", "echo up; sleep 600")


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "codex":

    class TestAllOfCodex(TestCodex, BackendConformance):
        """Everything, in five minutes."""


def test_who_asks_for_an_image_is_told_who_starts_from_one() -> None:
    with pytest.raises(Unsupported, match="host's programs") as caught:
        Sandbox.create(backend="bubblewrap", image="mine:1")

    assert "native, gvisor, microvm and docker" in caught.value.hint


@pytest.mark.parametrize("name", ["disk_bytes", "inodes"])
def test_who_asks_for_a_quota_is_told_why_there_is_none(name: str) -> None:
    """The reason is the files, with cgroups and without."""
    backend = CommandBackend(launchers.bubblewrap())
    with pytest.raises(Unsupported, match="no quota") as refused:
        Sandbox.create(backend=backend, limits={name: 4 << 20})

    assert f"limits.{name}" == refused.value.field
    assert "cgroup" not in str(refused.value)


def test_a_create_does_not_wait_for_what_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 directories of killed processes took 27 s of the first sandbox."""
    begun, go_on = threading.Event(), threading.Event()

    def sweep() -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(place, "sweep", sweep)
    try:
        with Sandbox.create(backend=CommandBackend(launchers.bubblewrap())) as sandbox:
            assert "hi\n" == sandbox.exec(["echo", "hi"]).text
            assert begun.wait(60)
            assert not go_on.is_set()
    finally:
        go_on.set()
