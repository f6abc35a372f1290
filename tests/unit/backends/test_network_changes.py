"""A live sandbox's network is changed as a whole or not at all: kernel, egress process and sockets agree."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Credential, NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.backends.landlock.network import LandlockNetwork, Loopback
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.network import (
    _MOST_PAST,
    SandboxNetwork,
    check_given_secrets,
    refused_by_kernel,
)
from ringfence.backends.local.routes import plan_to_change
from ringfence.egress.host.client import Egress
from ringfence.errors import InvalidRequest, NetworkPolicyError

pytestmark = pytest.mark.anyone

NONE, UNRESTRICTED = NetworkPolicy(), NetworkPolicy.parse("unrestricted")
A = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
B = NetworkPolicy(rules=(NetworkRule("10.0.0.0/8", "80"), NetworkRule("b.example", "443")))


class Network(SandboxNetwork):
    """In place of a helper inside: notes each plan, and refuses those that it is told to."""

    def __init__(self, sandbox: Any, sockets: list[int]) -> None:
        super().__init__(sandbox, sockets, None)
        self.plans: list[Any] = []
        self.kept: list[int] = []
        self.refuses: list[bool] = []

    def _enter(self, plan: Any) -> list[int]:
        self.plans.append(plan)
        if self.refuses and self.refuses.pop(0):
            raise Refused(errno.EPERM, "not permitted")
        return two_sockets() if plan["port"] else []

    def _keep(self, sockets: list[int]) -> None:
        self.kept = list(sockets)


def two_sockets() -> list[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    return [listener.detach(), datagrams.detach()]


@pytest.fixture(scope="module")
def egress() -> Iterator[Egress]:
    made = Egress()
    yield made
    made.close()


def sandbox_of(egress: Egress, policy: NetworkPolicy, name: str, **options: Any) -> Any:
    backend = SimpleNamespace(egress=lambda: egress)
    return SimpleNamespace(id=name, spec=SandboxSpec(network=policy, **options), backend=backend)


@pytest.fixture
def make(egress: Egress, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Network] = []

    def create(policy: NetworkPolicy, **options: Any) -> Network:
        name = f"{request.node.name}-{len(made)}"
        sockets = [] if policy.is_none else two_sockets()
        made.append(Network(sandbox_of(egress, policy, name, **options), sockets))
        made[-1].serve()
        return made[-1]

    yield create
    for each in made:
        each.close()


def in_force(egress: Egress, network: Any) -> Any:
    """What the egress process has of the sandbox; None: nothing."""
    name = network._sandbox.id
    line = egress._line_of(name)
    served = line.served(name) if line is not None else None
    return served and served.body["policy"]


def test_a_policy_that_the_kernel_refuses_is_in_force_nowhere(make: Any, egress: Egress) -> None:
    network, control = make(A), make(A)
    before = in_force(egress, network)
    descriptors = len(os.listdir("/proc/self/fd"))
    network.refuses = [True]
    with pytest.raises(NetworkPolicyError, match="cannot be enforced here: not permitted"):
        network.change(B)
    control.change(B)

    assert before == in_force(egress, network)
    assert before != in_force(egress, control)
    assert [plan_to_change(A, B), plan_to_change(B, A)] == network.plans
    assert [plan_to_change(A, B)] == control.plans
    assert descriptors == len(os.listdir("/proc/self/fd"))


def test_what_cannot_be_undone_hides_no_cause(make: Any, egress: Egress) -> None:
    network = make(A)
    before = in_force(egress, network)
    network.refuses = [True, True]
    with pytest.raises(NetworkPolicyError, match="not permitted"):
        network.change(B)

    assert before == in_force(egress, network)


def test_from_nothing_to_something_and_back(make: Any, egress: Egress) -> None:
    """Its sockets are with the fd store while it has some; what it did is known for good."""
    before = len(os.listdir("/proc/self/fd"))
    network = make(NONE)
    assert in_force(egress, network) is None
    assert [] == network.events()
    network.change(A)
    assert in_force(egress, network) is not None
    assert 2 == len(network.kept)
    assert 2 == len({*network.inodes})
    network._sandbox.spec = SandboxSpec(network=A)
    network.change(NONE)

    assert in_force(egress, network) is None
    assert [] == network.kept
    assert [plan_to_change(NONE, A), plan_to_change(A, NONE)] == network.plans
    assert before == len(os.listdir("/proc/self/fd"))


def test_what_was_recorded_before_is_kept_each_time_it_has_no_network_and_bounded(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make(NONE)
    records: list[list[Any]] = [["first", "second"], ["third"], ["last"] * _MOST_PAST]
    dropped: list[str] = []

    def drop(sandbox_id: str) -> list[Any]:
        dropped.append(sandbox_id)
        return records[len(dropped) - 1]

    monkeypatch.setattr(Network, "_egress", SimpleNamespace(drop=drop))
    found = []
    for _ in records:
        network._known = True
        network._stop_serving()
        network._stop_serving()  # and it is asked for once
        found.append(network.events())
    assert [["first", "second"], ["first", "second", "third"], records[2]] == found
    assert [network._sandbox.id] * 3 == dropped


@pytest.mark.parametrize("where", ["the kernel", "the egress process"])
def test_a_network_that_cannot_be_opened_is_closed_again(
    make: Any, egress: Egress, where: str
) -> None:
    network, control = make(NONE), make(NONE)
    before = len(os.listdir("/proc/self/fd"))
    if where == "the kernel":
        network.refuses = [True]
    else:
        network._settings = lambda _policy: (_ for _ in ()).throw(
            NetworkPolicyError("none", field="")
        )
    with pytest.raises(NetworkPolicyError):
        network.change(A)

    assert in_force(egress, network) is None
    assert [plan_to_change(NONE, A), plan_to_change(A, NONE)] == network.plans
    assert [] == network.kept
    assert before == len(os.listdir("/proc/self/fd"))
    control.change(A)
    assert in_force(egress, control) is not None


def test_closing_cuts_everything_and_does_nothing_twice(make: Any, egress: Egress) -> None:
    network = make(A)
    network.close()
    assert in_force(egress, network) is None
    assert [] == network.events()
    network.close()
    unserved = Network(sandbox_of(egress, A, "unserved"), two_sockets())
    before = len(os.listdir("/proc/self/fd"))
    unserved.close()
    unserved.close()
    assert before - 2 == len(os.listdir("/proc/self/fd"))


SECRET = NetworkPolicy(rules=(NetworkRule("a.example", "443", credential=Credential("TOKEN")),))


def test_what_a_live_sandbox_cannot_get_is_refused(make: Any) -> None:
    network = make(A)
    with pytest.raises(NetworkPolicyError, match="only be chosen when the sandbox is created"):
        network.check(UNRESTRICTED)
    with pytest.raises(InvalidRequest, match="no such secret is given"):
        network.check(SECRET)
    with pytest.raises(NetworkPolicyError, match=r"trust no authority that covers a\.example"):
        make(A, secrets={"TOKEN": "value"}).check(SECRET)
    network._sandbox.spec = SandboxSpec(network=UNRESTRICTED)
    with pytest.raises(NetworkPolicyError, match="only be chosen when the sandbox is created"):
        network.check(A)
    network._sandbox.spec = SandboxSpec(network=A)
    for fine in (NONE, A, B):
        network.check(fine)


def test_secrets_are_given_once_and_can_stand_in_a_header() -> None:
    check_given_secrets(SandboxSpec(network=SECRET, secrets={"TOKEN": "value", "OTHER": "x"}))
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "no such secret is given"),
        ({"secrets": {"OTHER": "value"}}, "writes TOKEN into requests"),
        ({"secrets": {"TOKEN": "value"}, "env": {"TOKEN": "value"}}, "both a secret and"),
    ]
    for options, why in refused:
        with pytest.raises(InvalidRequest, match=why):
            check_given_secrets(SandboxSpec(network=SECRET, **options))


def test_programs_get_stand_ins_that_tell_no_secret(make: Any) -> None:
    network, other = (make(NONE, secrets={"TOKEN": "value"}) for _ in range(2))
    stand_in = network.environment()["TOKEN"]

    assert stand_in.startswith("ringfence-secret-TOKEN-")
    assert "value" not in stand_in
    assert stand_in != other.environment()["TOKEN"]
    assert {"TOKEN"} == {*network.environment()}
    proxies = {*make(A).environment()}
    assert {
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    } == proxies


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL]
)
def test_a_missing_module_is_named(number: int) -> None:
    assert "nf_tables" in (refused_by_kernel(Refused(number, "x")).hint or "")
    assert "doctor" in (refused_by_kernel(Refused(errno.EPERM, "x")).hint or "")


class Agent(SimpleNamespace):
    """Notes each way that the agent of a sandbox without namespaces is told, and what is served then."""

    def ask(self, verb: str, way: Any) -> None:
        assert verb == "network"
        self.ways.append((way, in_force(self.egress, self.network) is not None))


def test_an_agent_without_namespaces_is_told_each_way(egress: Egress) -> None:
    """Nothing is led to the egress process before that has the policy, nor when it has none any more."""
    agent: Any = Agent(**vars(sandbox_of(egress, NONE, "agent")), egress=egress, ways=[])
    loopback = Loopback()
    agent.network = network = LandlockNetwork(agent, loopback, None)
    before = len(os.listdir("/proc/self/fd"))
    network.serve()
    assert [] == agent.ways
    for policy in (A, B, NONE, B):
        network.change(policy)
        agent.spec = SandboxSpec(network=policy)
    ways, served = zip(*agent.ways, strict=True)

    assert (True,) * 4 == served, "the way goes before the policy goes"
    assert ways[2] is None
    found = [each and sorted({row[2] for row in each["others"]} - {53}) for each in ways]
    assert [[443, 3128], [80, 443, 3128], None, [80, 443, 3128]] == found, "3128: the proxy"
    assert ways[0]["at"] == ways[1]["at"] != ways[3]["at"]
    assert ways[0]["token"] == ways[1]["token"] != ways[3]["token"]
    assert socket.inet_ntoa(loopback.way) == ways[0]["at"][0]

    agent.ask = lambda *_: (_ for _ in ()).throw(NetworkPolicyError("no agent", field=""))
    network.close()
    agent.spec = SandboxSpec(network=NONE)
    with pytest.raises(NetworkPolicyError):
        network.change(A)
    assert in_force(egress, network) is None
    assert before == len(os.listdir("/proc/self/fd"))
    loopback.close()
