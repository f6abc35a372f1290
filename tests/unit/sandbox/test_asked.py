"""What a `Sandbox` asks of its backend: the backend that is meant, snapshots, and nothing after its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Sandbox, SandboxSpec
from ringfence.backends.optional import Comparable
from ringfence.errors import ExecNotFound, InvalidRequest, LifecycleError, Unsupported
from ringfence.model.net.network import NetworkPolicy
from ringfence.sandbox import sync

pytestmark = pytest.mark.anyone

SECRETS = {"TOKEN": "secret"}


class Inner(Comparable):
    def __init__(self, spec: SandboxSpec) -> None:
        self.spec, self.state = spec, "running"
        self.files = SimpleNamespace()
        self.asked: list[Any] = []

    @property
    def session(self) -> Any:
        return SimpleNamespace(id="sbx-1", backend="one", state=self.state, mounts=())

    def compare(self, since: str | None) -> Any:
        self.asked.append(since)
        return "changes"

    def snapshot(self, metadata: Any) -> Any:
        self.asked.append(("snapshot", metadata))
        return "snapshot"

    def checkpoint(self, metadata: Any) -> Any:
        self.asked.append(("checkpoint", metadata))
        return "checkpoint"

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        self.asked.append(policy)

    def terminate(self) -> None:
        self.state = "terminated"


class Home:
    """A backend."""

    name = "one"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def provision(self, spec: SandboxSpec) -> Inner:
        self.asked.append(("provision", spec))
        return Inner(spec)

    def restore(self, snapshot_id: str, spec: SandboxSpec | None, *, secrets: Any) -> Inner:
        self.asked.append((snapshot_id, spec, secrets))
        return Inner(spec or SandboxSpec(labels={"of": "the snapshot"}))


def used(sandbox: Sandbox) -> Sandbox:
    sandbox.terminate()
    return sandbox


def test_a_snapshot_is_restored_by_the_backend_that_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: Any = Home()
    given: Any = Home()
    monkeypatch.setattr(sync, "backend_of", {"snap-1": "one"}.__getitem__)
    monkeypatch.setattr(sync, "backend_named", {"one": named}.__getitem__)
    spec = SandboxSpec(labels={"job": "1"})
    for backend, home in ((None, named), ("one", named), (given, given)):
        plain = used(Sandbox.restore("snap-1", secrets=SECRETS, backend=backend))
        assert {"of": "the snapshot"} == plain.spec.labels
        other = used(Sandbox.restore("snap-1", spec, backend=backend))
        assert spec is other.spec
        assert (home, home) == (plain._home, other._home)
        assert [("snap-1", None, SECRETS), ("snap-1", spec, None)] == home.asked[-2:]
    assert (4, 2) == (len(named.asked), len(given.asked))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"spec": SandboxSpec(), "secrets": SECRETS}, "secrets"), ({"spec": "none"}, "spec")],
)
def test_a_restore_that_contradicts_itself_asks_no_backend(
    options: dict[str, Any], field: str
) -> None:
    home: Any = Home()
    with pytest.raises(InvalidRequest) as refused:
        Sandbox.restore("snap-1", backend=home, **options)
    assert (field, []) == (refused.value.field, home.asked)


def test_a_backend_of_the_caller_is_the_home_of_its_sandboxes() -> None:
    home = Home()
    chosen: Any = home
    made = used(Sandbox.create(labels={"job": "1"}, network=["a.example"], backend=chosen))
    assert made._home is chosen
    ((_, spec),) = home.asked
    assert ({"job": "1"}, NetworkPolicy.parse("a.example")) == (spec.labels, spec.network)
    assert made.spec is spec


@pytest.mark.parametrize(
    ("options", "tier"),
    [({}, "strong"), ({"tier": "light"}, "light"), ({"spec": SandboxSpec()}, "light")],
)
def test_the_tier_of_a_named_backend_is_meant_where_none_is_named(
    options: dict[str, Any], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[SandboxSpec, Any]] = []

    def provision(spec: SandboxSpec, backend: Any) -> Inner:
        asked.append((spec, backend))
        return Inner(spec)

    monkeypatch.setattr(sync, "provision", provision)
    made = used(Sandbox.create(backend="gvisor", **options))
    assert [(tier, "gvisor")] == [(spec.tier, backend) for spec, backend in asked]
    assert made._home is None


def test_changes_are_since_a_snapshot_or_its_id_or_the_beginning() -> None:
    inner = Inner(SandboxSpec())
    sandbox = Sandbox(inner, inner.spec)  # type: ignore[arg-type]
    for since in (None, "snap-1", SimpleNamespace(id="snap-2")):
        assert "changes" == sandbox.changes(since)  # type: ignore[arg-type]
    assert [None, "snap-1", "snap-2"] == inner.asked
    sandbox.terminate()
    plain: Any = SimpleNamespace(session=inner.session, files=None)
    other = Sandbox(plain, inner.spec)
    with pytest.raises(Unsupported, match="one"):
        other.changes()


def test_what_is_passed_to_a_backend_is_looked_at_before() -> None:
    inner = Inner(SandboxSpec())
    sandbox = Sandbox(inner, inner.spec)  # type: ignore[arg-type]
    sandbox.snapshot()
    sandbox.checkpoint({"a": "1"})
    sandbox.apply_network_policy(["a.example"])
    policy = NetworkPolicy.parse("a.example")
    assert [("snapshot", {}), ("checkpoint", {"a": "1"}), policy] == inner.asked
    for call in (
        lambda: sandbox.snapshot({"a": 1}),  # type: ignore[dict-item]
        lambda: sandbox.checkpoint("a"),  # type: ignore[arg-type]
        lambda: sandbox.apply_network_policy(5),  # type: ignore[arg-type]
        lambda: sandbox.expose(0),
        lambda: sandbox.expose(65536),
        lambda: sandbox.fork(0),
        lambda: sandbox.mark(processes="some"),
        lambda: sandbox.rewind("mark"),  # type: ignore[arg-type]
        lambda: sandbox.fork(at="mark"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest):
            call()
    with pytest.raises(ExecNotFound):
        sandbox.process("exec-1")
    assert 3 == len(inner.asked)
    sandbox.terminate()


def test_one_that_has_ended_says_so() -> None:
    inner = Inner(SandboxSpec())
    sandbox = used(Sandbox(inner, inner.spec))  # type: ignore[arg-type]
    for call in (lambda: sandbox.expose(80), sandbox.mark, sandbox.fork):
        with pytest.raises(LifecycleError, match="terminated"):
            call()
    assert [] == inner.asked
