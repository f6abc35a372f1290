"""Which backend makes a sandbox where only a tier is asked for: never one of another tier."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.backends import registry
from ringfence.backends.docker.engine import connect
from ringfence.errors import BackendUnavailable, IsolationError, NetworkPolicyError, RingfenceError
from ringfence.model.spec import SandboxSpec

STRONG = SandboxSpec(tier="strong")


class Backend:
    def __init__(self, problem: RingfenceError | None) -> None:
        self.problem = problem

    def provision(self, spec: SandboxSpec) -> Any:
        if self.problem is not None:
            raise self.problem
        return self


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """Two strong backends and a light one; each is as the test says."""
    tiers = {"native": ("light",), "first": ("strong",), "second": ("strong",), "lxc": ("strong",)}
    backends = {name: Backend(None) for name in tiers}
    monkeypatch.setattr(registry, "_BY_TIER", {"light": ("native",), "strong": ("first", "second")})
    monkeypatch.setattr(registry, "_tiers_of", tiers.__getitem__)
    monkeypatch.setattr(registry, "NAMES", tuple(tiers))
    monkeypatch.setattr(registry, "backend_named", lambda name, **_: backends[name])
    return backends


def test_the_first_that_works(two: dict[str, Backend]) -> None:
    two["first"].problem = BackendUnavailable("it is not installed")

    made: object = registry.provision(STRONG)

    assert two["second"] is made


def test_nobody_can_and_everybody_says_why(two: dict[str, Backend]) -> None:
    two["first"].problem = BackendUnavailable("it is not installed", hint="install it")
    two["second"].problem = IsolationError("it did not start")

    with pytest.raises(RingfenceError) as refusal:
        registry.provision(STRONG)

    assert "it did not start" in str(refusal.value)
    two["second"].problem = BackendUnavailable("no KVM")
    with pytest.raises(BackendUnavailable) as nobody:
        registry.provision(STRONG)
    for said in (
        "first: it is not installed",
        "second: no KVM",
        "native: it is tier light",
        "install it",
    ):
        assert said in str(nobody.value)


def test_what_works_says_itself_what_it_cannot_do(two: dict[str, Backend]) -> None:
    """That another backend is not installed is not what the caller has to change."""
    two["first"].problem = NetworkPolicyError("no lists of hosts")
    two["second"].problem = BackendUnavailable("no KVM")

    with pytest.raises(NetworkPolicyError, match="no lists of hosts"):
        registry.provision(STRONG)


def test_a_named_backend_and_no_other(two: dict[str, Backend]) -> None:
    two["first"].problem = BackendUnavailable("it is not installed")

    with pytest.raises(BackendUnavailable, match="not installed"):
        registry.provision(STRONG, "first")


def test_light_is_never_taken_for_strong(two: dict[str, Backend]) -> None:
    for name in ("first", "second"):
        two[name].problem = BackendUnavailable("not here")

    with pytest.raises(BackendUnavailable):
        registry.provision(STRONG)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ssh://host", "nonsense"])
def test_an_engine_without_a_socket_is_told_what_to_name(address: str) -> None:
    """It may well be on this machine: what is wrong is how it is reached."""
    with pytest.raises(BackendUnavailable, match="not reached by a unix socket") as refusal:
        connect(address)

    assert address in refusal.value.message
    assert "unix:///" in refusal.value.hint
