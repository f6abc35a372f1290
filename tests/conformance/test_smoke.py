"""Every other backend does the main job: the first gear's check, where the second runs the whole suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.engine import running_engine
from tests.features import require
from tests.machines import machine_backend, require_machines

from ringfence import Sandbox
from ringfence.backends.command import launchers
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.protocol import Backend
from ringfence.errors import FileNotFound


def _bubblewrap(_stack: ExitStack) -> Backend:
    require("user namespaces")
    require("bwrap")
    return CommandBackend(launchers.bubblewrap())


def _docker(stack: ExitStack) -> Backend:
    if 0 != os.geteuid():
        pytest.skip("a Docker engine of the tests' own needs root")
    require("dockerd")
    return DockerBackend(stack.enter_context(running_engine()))


def _gvisor(_stack: ExitStack) -> Backend:
    require("user namespaces")
    require("runsc")
    return GvisorBackend()


def _microvm(_stack: ExitStack) -> Backend:
    require_machines()
    return machine_backend()


pytestmark = pytest.mark.timeout(400)  # the first machine of a run boots: minutes beside a load

MAKERS: dict[str, Callable[[ExitStack], Backend]] = {
    "bubblewrap": _bubblewrap,
    "docker": _docker,
    "gvisor": _gvisor,
    "microvm": _microvm,
}


# An emulated machine takes as long to start as all the others together: one pass starts it.
_PARAMS = [
    pytest.param(name, marks=[pytest.mark.anyone] if "microvm" == name else []) for name in MAKERS
]


@pytest.fixture(scope="module", params=_PARAMS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with ExitStack() as stack:
        backend = MAKERS[request.param](stack)
        stack.callback(backend.close)
        with Sandbox.create(backend=backend, env={"GIVEN": "1"}) as made:
            yield made


@pytest.mark.full
def test_commands_end_as_they_do(sandbox: Sandbox) -> None:
    result = sandbox.exec(["sh", "-c", "cat; echo $GIVEN >&2; exit 7"], stdin=b"in")

    assert (b"in", b"1\n", 7) == (result.stdout, result.stderr, result.exit_code)
    assert 127 == sandbox.exec(["no-such-command"]).exit_code


def test_a_command_is_ended_by_its_timeout(sandbox: Sandbox) -> None:
    ended = sandbox.exec(["sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=0.5)

    assert ended.timed_out
    assert sandbox.exec(["true"]).ok


def test_files_come_and_go(sandbox: Sandbox) -> None:
    sandbox.files.write("note.txt", "text")

    assert "text" == sandbox.exec(["cat", "note.txt"]).text
    sandbox.files.remove("note.txt")
    with pytest.raises(FileNotFound):
        sandbox.files.read_text("note.txt")


def test_the_host_is_not_reached(sandbox: Sandbox) -> None:
    here = os.getpid()

    assert not sandbox.exec(["sh", "-c", "test -e /proc/1/root/etc/shadow && cat /etc/shadow"]).ok
    assert not sandbox.exec(["sh", "-c", f"kill -0 {here}"]).ok
    assert (
        "lo"
        == sandbox.exec(["sh", "-c", "ls /sys/class/net 2>/dev/null || echo lo"]).text.split()[0]
    )


def test_protections_are_told(sandbox: Sandbox) -> None:
    told = {each.name: each.status for each in sandbox.protections()}

    assert told
    assert "missing" not in told.values()
