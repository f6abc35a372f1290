"""A snapshot keeps the policy and no secret: who restores it gives the secrets again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import NetworkPolicy, Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import InvalidRequest
from ringfence.model.net.rules import Credential, NetworkRule

SECRET = "hunter2-hunter2"
POLICY = NetworkPolicy(rules=(NetworkRule("a.test", "443", credential=Credential("TOKEN")),))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"))
    yield made
    made.close()


@pytest.fixture
def snapshot_id(backend: NativeBackend) -> str:
    with Sandbox.create(network=POLICY, secrets={"TOKEN": SECRET}, backend=backend) as sandbox:
        assert SECRET not in sandbox.shell("env; cat /etc/ringfence/*").text
        return sandbox.snapshot().id


def test_without_its_secrets_it_does_not_come_back(
    backend: NativeBackend, snapshot_id: str
) -> None:
    with pytest.raises(InvalidRequest, match="TOKEN") as refusal:
        Sandbox.restore(snapshot_id, backend=backend)

    assert "secrets" == refusal.value.field
    assert {} == backend._live


def test_with_them_it_does(backend: NativeBackend, snapshot_id: str) -> None:
    with Sandbox.restore(snapshot_id, secrets={"TOKEN": SECRET}, backend=backend) as sandbox:
        assert POLICY == sandbox.spec.network
        placeholder = sandbox.shell("echo $TOKEN").text
        assert placeholder.startswith("ringfence-secret-TOKEN-")
        assert b"BEGIN CERTIFICATE" in sandbox.exec(["cat", "/etc/ringfence/ca.pem"]).stdout


def test_no_secret_is_in_what_is_kept(
    backend: NativeBackend, snapshot_id: str, tmp_path: Path
) -> None:
    kept = [path for path in (tmp_path / "snapshots").rglob("*") if path.is_file()]

    assert any(snapshot_id in str(path) for path in kept)
    assert [] == [path for path in kept if SECRET.encode() in path.read_bytes()]
