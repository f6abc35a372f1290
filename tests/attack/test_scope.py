"""Which probes say something of which backend."""

from __future__ import annotations

import os

import pytest

from ringfence.attack import scope


def test_a_backend_with_the_hosts_kernel_answers_every_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scope, "masks_of_proc", list)
    for backend in ("native", "docker", "mine"):
        assert "" == scope.why_not("syscalls.bpf", backend) == scope.why_not("files.lease", backend)
    assert "" == scope.why_not("devices_proc.host-processes", "native")
    monkeypatch.setattr(scope, "masks_of_proc", lambda: ["x"])
    assert "degraded" in scope.why_not("devices_proc.host-processes", "native")
    assert "" == scope.why_not("devices_proc.host-processes", "docker"), "it has its own"


def test_a_guests_own_kernel_is_asked_only_what_concerns_the_host() -> None:
    for backend in ("gvisor", "microvm"):
        for probe in (
            "syscalls.bpf",
            "identity.no-new-privs",
            "resources.core-dump",
            "network.socket-raw",
        ):
            assert scope.why_not(probe, backend), (probe, backend)
        for probe in (
            "files.secret-by-path",
            "network.loopback-v4",
            "network.sockets",
            "leaks.environment",
        ):
            assert "" == scope.why_not(probe, backend), (probe, backend)
    assert ("", True) == (
        scope.why_not("resources.processor-hog", "gvisor"), bool(scope.why_not("files.lease", "microvm")),
    )  # fmt: skip


def test_without_namespaces_what_is_reported_as_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out = {
        0: ("files.set-id-file-written", "ipc.socket-of-own", "files.upload-swapped"),
        1000: ("identity.securebits", "resources.fork-bomb"),
    }
    for uid, own in left_out.items():
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        for probe in (*own, "identity.namespace-pid", "files.protected-chmod", "syscalls.tiocsti"):
            assert scope.why_not(probe, "landlock"), (uid, probe)
        (other,) = left_out.keys() - {uid}
        for probe in (
            *left_out[other],
            "files.secret-by-path",
            "files.read-only-chmod",
            "syscalls.bpf",
        ):
            assert "" == scope.why_not(probe, "landlock"), (uid, probe)
