"""The probes from inside against every other backend; `ringfence doctor --attack --backend NAME` runs all.

Docker and bubblewrap share the host's kernel, and every probe is for them. A machine has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from ringfence.attack import again, inside, outside, runner
from ringfence.attack.canaries import Canaries
from ringfence.attack.inside import run_inside
from ringfence.attack.lab import Lab
from ringfence.attack.outside import descriptors
from ringfence.attack.probes.kit import BOTH, PLAIN
from ringfence.attack.result import CRITICAL, ESCAPED, HELD, HIGH, NOT_APPLICABLE, ProbeResult
from ringfence.attack.scope import why_not
from ringfence.backends.command import launchers
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.codex import codex as codex_launcher
from ringfence.backends.command.lxc import lxc as lxc_launcher
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.protocol import Backend
from tests.attack.test_attack import KNOWN
from tests.engine import running_engine
from tests.features import require
from tests.machines import machine_backend, require_machines

pytestmark = pytest.mark.full

FROM_OUTSIDE = {
    "docker": (
        "files.working-directory",
        "identity.neighbour-host-id",
        "resources.fork-bomb",
        "resources.memory-private",
    ),
    "bubblewrap": (
        "files.working-directory",
        "identity.neighbour-host-id",
        "lifecycle.kill-tree",
        "lifecycle.terminate",
    ),
    "codex": ("files.working-directory", "lifecycle.kill-tree", "lifecycle.stop-the-next"),
    "lxc": ("identity.neighbour-host-id", "lifecycle.terminate", "lifecycle.maker-killed"),
}
LEAST_HELD = {
    "docker": 270,
    "bubblewrap": 265,
    "codex": 200,
    "lxc": 265,
}  # the rest needs mounts or a network policy


@contextmanager
def docker() -> Iterator[Backend]:
    require("dockerd")
    with running_engine() as address:
        backend = DockerBackend(address)
        yield backend
        backend.close()


@contextmanager
def bubblewrap() -> Iterator[Backend]:
    require("user namespaces")
    require("bwrap")
    backend = CommandBackend(launchers.bubblewrap())
    yield backend
    backend.close()


@contextmanager
def codex() -> Iterator[Backend]:
    require("user namespaces")
    require("codex")
    backend = CommandBackend(codex_launcher())
    yield backend
    backend.close()


@contextmanager
def lxc() -> Iterator[Backend]:
    require("lxc-start")
    backend = CommandBackend(lxc_launcher())
    yield backend
    backend.close()


@contextmanager
def microvm() -> Iterator[Backend]:
    require_machines()
    backend = machine_backend()
    yield backend
    backend.close()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(docker, marks=pytest.mark.root),  # an engine of one's own takes root
        bubblewrap,
        codex,
        pytest.param(lxc, marks=pytest.mark.root),
    ],
)
def test_nothing_escapes(made: Callable[[], AbstractContextManager[Backend]]) -> None:
    with made() as backend, Canaries() as canaries:
        lab = Lab(backend, canaries)
        found = runner.attack_from_inside(lab)
        found += [outside.registered()[id].attack(lab) for id in FROM_OUTSIDE[backend.name]]

    assert [] == [f"{r.severity} {r.id}: {r.evidence}" for r in found if r.breaks]
    assert {r.id for r in found if ESCAPED == r.status} <= KNOWN
    assert_most_say_something(found, backend.name)


@pytest.mark.root  # once is enough: no probe sees who started the machine
@pytest.mark.timeout(400)
def test_nothing_escapes_from_a_machine() -> None:
    """What is critical or high, in one machine: with two more, an emulated one takes a minute."""
    probes = [
        id
        for id, probe in inside.registered().items()
        if probe.severity in (CRITICAL, HIGH) and probe.where in (PLAIN, BOTH)
    ]
    chosen = [id for id in probes if not why_not(id, "microvm")]
    with microvm() as backend, Canaries() as canaries, Lab(backend, canaries).sandbox() as sandbox:
        found = run_inside(sandbox, chosen, canaries.context)
        entered = descriptors.entered(sandbox)

    assert [] == entered, "a program was started in a directory of the agent's"
    assert {} == {id: said for id, (status, said) in found.items() if ESCAPED == status}
    assert len(chosen) * 9 // 10 <= [status for status, _ in found.values()].count(HELD)
    assert 60 <= len(chosen)


def assert_most_say_something(found: list[ProbeResult], name: str) -> None:
    assert set(inside.registered()) <= {r.id for r in found}
    held = [r for r in found if HELD == r.status]
    assert LEAST_HELD[name] <= len(held)
    broken = [f"{r.id}: {r.evidence}" for r in found if "Error: " in r.evidence]
    # Codex lets nobody make a socket, not even to see what else there is.
    known = ("nsupported", "PermissionError") if name == "codex" else ("nsupported",)
    assert [] == [line for line in broken if not any(word in line for word in known)]
    assert not [r.id for r in found if NOT_APPLICABLE == r.status]
    assert {CRITICAL, HIGH} <= {r.severity for r in held}


def test_below_codex_they_escape_without_isolation() -> None:
    """Its helper is then PID 1 beside the guest: what beginning anew is for."""
    require("user namespaces")
    require("codex")
    probes = [
        *("devices_proc.init-mem", "devices_proc.proc-writable", "devices_proc.init-is-ours"),
        *("resources.terminals", "files.run-directory"),
    ]
    backend = CommandBackend(dataclasses.replace(codex_launcher(), anew=()))
    with Canaries() as canaries, Lab(backend, canaries).sandbox() as box:
        found = run_inside(box, probes, canaries.context)
        told = {each.name: each.status for each in box.protections()}
    backend.close()

    assert dict.fromkeys(probes, ESCAPED) == {id: status for id, (status, _) in found.items()}
    for name in ("kernel_interfaces", "nested_user_namespaces"):
        assert "degraded" == told[name]


@pytest.mark.root  # an engine of one's own takes root
def test_they_escape_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own filter and masks alone: what isolation is for."""
    probes = [
        "identity.namespace-user",
        "identity.not-host-root",
        "devices_proc.proc-writable",
        "devices_proc.sysfs",
        "devices_proc.masked-files",
        "syscalls.namespaces-left",
        "leaks.control-group-path",
    ]
    monkeypatch.setattr("ringfence.backends.docker.options._security", lambda _engine: [])
    with docker() as backend, Canaries() as canaries, Lab(backend, canaries).sandbox() as sandbox:
        found = run_inside(sandbox, probes, canaries.context)
        seen = again.seen_from_the_host(sandbox, found)

    assert dict.fromkeys(probes, ESCAPED) == {id: status for id, (status, _) in seen.items()}


def test_what_a_launcher_shows_inside_is_judged_by_the_host() -> None:
    """Bubblewrap's ids are shown as its outer namespace has them, and its lock is there."""
    require("user namespaces")
    require("bwrap")
    probes = ["identity.not-host-root", "syscalls.namespaces-left"]
    alone = dataclasses.replace(launchers.bubblewrap(), within=())  # no isolation of our agent's
    backend = CommandBackend(alone)
    with Canaries() as canaries, Lab(backend, canaries).sandbox() as box:
        found = run_inside(box, probes, canaries.context)
        seen = again.seen_from_the_host(box, found)
    backend.close()

    assert ESCAPED == found["syscalls.namespaces-left"][0]
    assert dict.fromkeys(probes, HELD) == {id: status for id, (status, _) in seen.items()}
