"""Which backend makes a sandbox where only a tier is asked for: never one of another tier."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends import registry
from ringfence.backends.docker.engine import connect
from ringfence.backends.local.host import mountinfo
from ringfence.backends.optional import TierDefault
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IsolationError,
    NetworkPolicyError,
    RingfenceError,
)
from ringfence.model.capabilities import Protection
from ringfence.model.session import ResolvedMount
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


class TestWithoutNamespaces:
    """What is weaker is taken where that was allowed by name, and it is told."""

    LIGHT = SandboxSpec(allow_degraded=("namespaces",))

    @pytest.fixture
    def light(self, two: dict[str, Backend], monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
        two["landlock"] = Backend(None)
        two["native"].problem = IsolationError("no namespaces here")
        two["landlock"].session = SimpleNamespace(backend="landlock", mounts=())  # type: ignore[attr-defined]
        monkeypatch.setattr(mountinfo, "masks_of_proc", lambda: ())
        return two

    def test_one_is_taken_only_where_it_is_allowed(self, light: dict[str, Backend]) -> None:
        with pytest.warns(UserWarning, match="without namespaces.*; no namespaces here") as told:
            made: object = registry.provision(self.LIGHT)
        assert light["landlock"] is made
        assert 1 == len(told)
        for allowed in ((), ("*",)):
            with pytest.raises(IsolationError, match="no namespaces here"):
                registry.provision(SandboxSpec(allow_degraded=allowed))
        with pytest.raises(IsolationError):
            registry.provision(self.LIGHT, "native")

    def test_the_best_is_taken_first_and_a_masked_proc_is_told(
        self, light: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        light["native"].problem = None
        assert light["native"] is registry.provision(self.LIGHT)  # type: ignore[comparison-overlap]
        monkeypatch.setattr(mountinfo, "masks_of_proc", lambda: ("/proc/kcore",))
        with pytest.warns(UserWarning, match="masked: /proc/kcore"):
            registry.provision(self.LIGHT)

    def test_mounts_that_are_elsewhere_are_named(self, tmp_path: Path) -> None:
        mounts = [
            ResolvedMount("/data", "read_only", "/host"),
            ResolvedMount(str(tmp_path), "read_only", str(tmp_path)),
            ResolvedMount("/home/sandbox/in", "read_only", "/host"),
            ResolvedMount("/own", "read_write"),
        ]
        sandbox: Any = SimpleNamespace(session=SimpleNamespace(backend="landlock", mounts=mounts))
        assert ["/data is /host"] == registry.mapped_mounts(sandbox)
        sandbox.session.backend = "native"
        assert [] == registry.mapped_mounts(sandbox)


def test_a_backend_may_have_conditions_for_being_taken_unasked(two: dict[str, Any]) -> None:
    class Careful(Backend, TierDefault):
        def provision_unasked(self, spec: SandboxSpec) -> Any:
            raise BackendUnavailable("without hardware")

    two["first"] = Careful(None)
    assert two["second"] is registry.provision(STRONG)
    assert two["first"] is registry.provision(STRONG, "first")


@pytest.mark.parametrize(
    ("backend", "available", "weak", "is_taken"),
    [
        ("native", True, (), True),
        ("native", True, ("namespaces",), False),
        ("native", True, ("pids_limit",), True),
        ("gvisor", True, ("namespaces",), True),
        ("microvm", True, ("virtual_machine",), False),
        ("gvisor", False, (), False),
    ],
)
def test_a_report_tells_whether_one_is_taken_unasked(
    backend: str, available: bool, weak: tuple[str, ...], is_taken: bool
) -> None:
    protections = [Protection("seccomp", "enforced")] + [Protection(w, "degraded") for w in weak]
    report: Any = SimpleNamespace(backend=backend, available=available, protections=protections)
    assert is_taken == registry.is_taken_unasked(report)


def test_a_snapshot_is_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [SimpleNamespace(id="snap-1", backend="gvisor")]
    named: list[str] = []

    def backend_named(name: str) -> Any:
        named.append(name)
        return SimpleNamespace(name=name, snapshots=lambda: taken)

    monkeypatch.setattr(registry, "backend_named", backend_named)
    assert "gvisor" == registry.backend_of("snap-1").name
    assert "native" == registry.backend_of("unknown").name, "which raises"


def test_all_that_is_shared_is_closed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    backends = {
        (name, 1, 1): SimpleNamespace(close=lambda name=name: closed.append(name)) for name in "ab"
    }
    monkeypatch.setattr(registry, "_shared", backends)
    monkeypatch.setitem(
        sys.modules, "ringfence.egress.host.client",
        SimpleNamespace(close_shared=lambda: closed.append("egress")),
    )  # fmt: skip
    registry.close_all()
    registry.close_all()
    assert ["a", "b", "egress", "egress"] == closed
    assert {} == backends


def test_what_is_neither_a_backend_nor_a_name_is_refused() -> None:
    assert "mine" == registry.name_of(SimpleNamespace(name="mine"))
    assert [None, "x"] == [registry.name_of(None), registry.name_of("x")]
    for wrong in (3, SimpleNamespace(name=3)):
        with pytest.raises(InvalidRequest, match="must be a backend or its name") as refused:
            registry.name_of(wrong)  # type: ignore[arg-type]
        assert "backend" == refused.value.field
    assert ["light", "strong"] == [registry.tier_of(name) for name in ("nobodys", "gvisor")]
