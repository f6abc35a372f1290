"""Sandbox in the egress process: its policy as it was sent, a change of that, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ringfence import Credential, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.egress.inbound import Inbound, Unruled
from ringfence.egress.rules import exact_names, read_policy
from tests.egress.one_sandbox import Scene
from tests.egress.scene import tcp_pair

POLICIES = [
    NetworkPolicy.none(),
    NetworkPolicy.parse(
        "a.test,*.b.test:443,!x.b.test,10.0.0.0/8:5432,[2001:db8::1]:80,2001:db8::/32"
    ),
    NetworkPolicy(
        allowed_hosts=("a.test",),
        rules=(
            NetworkRule("b.test", "443", methods=("GET",), paths=("/x/*",)),
            NetworkRule("c.test", credential=Credential("TOKEN", header="x-key", scheme="")),
            NetworkRule("d.test", action="deny"),
            NetworkRule("203.0.113.0/24", "80-90"),
        ),
        learn=True,
        limits=NetworkLimits(connections=7, idle_s=3.5),
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_arrives_as_it_was(policy: NetworkPolicy) -> None:
    """Read without what names errors, which the host process has looked for."""
    form = policy.to_json()

    assert policy == read_policy(form) == NetworkPolicy.from_json(form)


@pytest.mark.parametrize("policy", POLICIES)
def test_names_that_are_allowed_one_by_one(policy: NetworkPolicy) -> None:
    """Two readings of the rules, a quick and a thorough one, find the same."""
    thorough = [
        rule.host
        for rule in policy.all_rules
        if not (rule.denies or rule.is_address or rule.host.startswith("*."))
    ]

    assert thorough == exact_names(policy)


HERE = "127.0.0.0/8"  # where the name leads
ALL = NetworkPolicy(allowed_hosts=("a.test", HERE))
ONLY_GET, ONLY_POST = (
    NetworkPolicy(allowed_hosts=(HERE,), rules=(NetworkRule("a.test", methods=(method,)),))
    for method in ("GET", "POST")
)
REQUEST = b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(name="made")
def fixture_made() -> Iterator[Callable[[NetworkPolicy], Scene]]:
    """`made(policy)`: a sandbox under it; ended with the test."""
    with ExitStack() as stack:

        def make(policy: NetworkPolicy) -> Scene:
            scene = Scene(policy)
            stack.callback(scene.close)
            return scene

        yield make


@pytest.mark.parametrize("after", [ONLY_POST, ONLY_GET])
def test_a_request_is_judged_by_the_policy_that_holds_when_its_head_ends(
    made: Callable[[NetworkPolicy], Scene], after: NetworkPolicy
) -> None:
    scene = made(ONLY_POST)
    with scene.begin(80, REQUEST[:-2]) as client:
        scene.change(after)
        client.sendall(REQUEST[-2:])
        scene.settle()

        if after is ONLY_POST:
            assert [("127.0.0.1", 80)] == scene.dialled
        else:
            assert [] == scene.dialled
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("before", ["", "an-older-secret"])
def test_an_answer_is_searched_for_the_secrets_that_hold_when_the_head_ends(
    made: Callable[[NetworkPolicy], Scene], before: str
) -> None:
    scene, secret = made(ALL), b"hunter2-and-more"
    scene.change(ALL, **({"KEY": before} if before else {}))
    with scene.begin(80, REQUEST[:-2]) as client:
        scene.change(ALL, KEY=secret.decode())
        client.sendall(REQUEST[-2:])
        scene.settle()
        scene.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<%b>" % secret)

        assert client.recv(1 << 16).endswith(b"\r\n\r\n<****************>")


def test_another_protocol_is_let_through_as_the_policy_of_now_says(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    """Decisions about a name and a port end with the policy."""
    scene = made(ALL)
    for policy, heard in ((ALL, b"\0raw"), (ONLY_GET, b""), (ALL, b"\0raw")):
        scene.change(policy)
        assert heard == scene.say(9000, [b"\0raw"])


def test_a_closed_sandbox_leaves_nothing_in_what_all_share(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    """A task is cancelled in the next turn: its connection is recorded after the sandbox was closed."""
    scene = made(ALL)
    scene.say(80, [REQUEST])
    assert scene.commons.record._rates
    assert scene.commons.resolver._kept
    with scene.begin(80, b"GET"):
        scene.sandbox.close()
        scene.settle()

    assert "the sandbox is gone" == scene.events[-1]["reason"]
    assert {} == scene.commons.record._rates
    assert {} == scene.commons.resolver._kept


@pytest.mark.parametrize("is_ruled", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_connection_into_a_sandbox_counts_until_it_ends(
    made: Callable[[NetworkPolicy], Scene], is_ruled: bool, is_cut: bool
) -> None:
    scene = made(ALL)
    sandbox = scene.sandbox if is_ruled else Unruled(scene.commons)
    (client, one), (server, other) = tcp_pair(), tcp_pair()
    with client, server:
        Inbound(sandbox, one, other).start()
        assert (1, 1) == (scene.commons.connections, len(sandbox.connections))
        if is_cut:
            sandbox.close()
    scene.settle()

    assert (0, 0) == (scene.commons.connections, len(sandbox.connections))
