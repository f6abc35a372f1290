"""Sandbox in the egress process: its policy as it was sent, a change of that, its end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from ringfence import Credential, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.egress import passage, reach, rules
from ringfence.egress.inbound import Inbound, Unruled
from ringfence.egress.rules import exact_names, read_policy
from ringfence.egress.tls.ca import Authority
from ringfence.egress.tls.hello import _RETRY
from ringfence.egress.tls.terminator import Terminator
from ringfence.linux.destination import packed
from tests.egress.hellos import ECH, message, records, sni, vector
from tests.egress.one_sandbox import Scene
from tests.egress.scene import tcp_pair

POLICIES = [
    NetworkPolicy.none(),
    NetworkPolicy.parse(
        "a.test,*.b.test:443,!x.b.test,10.0.0.0/8:5432,[2001:db8::1]:80,2001:db8::/32,"
        "fd00::1,[fd00::2]:80,fe80::/10"
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


# -- connections that go on ----------------------------------------------------------------------

NAME, ADDRESS = None, packed("127.0.0.1")
LITERAL = NetworkPolicy(allowed_hosts=(HERE,))
WITHOUT_HERE = NetworkPolicy(allowed_hosts=("a.test",))


def is_reset(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        client.recv(1)
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    raise AssertionError("something came")


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("to", "port", "said", "before", "after", "why"),
    [
        (NAME, 9000, b"\0raw", ALL, ALL, ""),
        (NAME, 9000, b"\0raw", ALL, LITERAL, "no rule allows a.test:9000"),
        (NAME, 9000, b"\0raw", ALL, WITHOUT_HERE, "127.0.0.1 is loopback"),
        (NAME, 9000, b"\0raw", ALL, ONLY_GET, "the policy checks each request to it"),
        (NAME, 80, REQUEST, ALL, ONLY_POST, ""),
        (NAME, 80, REQUEST, ALL, ONLY_GET, "no rule allows POST"),
        (NAME, 80, REQUEST, ONLY_POST, ONLY_GET, "no rule allows POST"),
        (NAME, 80, REQUEST, ONLY_POST, ALL, ""),
        (NAME, 80, REQUEST, ALL, WITHOUT_HERE, "127.0.0.1 is loopback"),
        (ADDRESS, 9000, b"\0raw", ALL, LITERAL, ""),
        (ADDRESS, 9000, b"\0raw", ALL, ONLY_GET, ""),
        (ADDRESS, 9000, b"\0raw", ALL, WITHOUT_HERE, "127.0.0.1 is loopback"),
        (ADDRESS, 80, REQUEST, ALL, WITHOUT_HERE, "127.0.0.1 is loopback"),
    ],
)
def test_a_connection_ends_with_the_policy_that_allowed_it_and_not_before(
    made: Callable[[NetworkPolicy], Scene],
    to: bytes | None,
    port: int,
    said: bytes,
    before: NetworkPolicy,
    after: NetworkPolicy,
    why: str,
) -> None:
    scene = made(before)
    scene._name = to or scene._name
    with scene.begin(port, said) as client:
        while not scene._servers:
            scene.settle()
        scene.settle()
        assert scene._hear()
        (live,) = scene.sandbox.live()
        assert ("127.0.0.1", port, "sbx-1") == (live["address"], live["port"], live["sandbox_id"])
        assert ("a.test" if to is NAME else "") == live["host"]
        scene.change(after)
        scene.settle()
        assert bool(why) == is_reset(client)
        assert bool(why) == (not scene.sandbox.live())
        if why:
            ended = [each for each in scene.events if each["kind"] != "dns"][-1]
            assert ended["reason"].startswith("no longer allowed: ")
            assert why in ended["reason"]
            assert ended["allowed"], "it was, and something has been said"
        else:
            scene.answer(b"HTTP/1.1 204 No\r\n\r\n")
            client.settimeout(30)
            assert client.recv(99).startswith(b"HTTP/1.1 204 No\r\n")


@pytest.mark.anyone
def test_only_what_leads_somewhere_is_listed_as_open(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene = made(ALL)
    with scene.begin(80, b"GET / HT"):
        assert 1 == len(scene.sandbox.connections)
        assert [] == scene.sandbox.live()


@pytest.mark.anyone
def test_a_change_while_a_server_is_dialled_counts(
    made: Callable[[NetworkPolicy], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = made(ALL)
    for after in (ALL, WITHOUT_HERE):
        scene.change(ALL)
        scene.dialled.clear()

        async def connect(
            places: list[tuple[int, str]], port: int, after: NetworkPolicy = after
        ) -> tuple[socket.socket, str]:
            found = await scene._connect(places, port)
            scene.change(after)
            return found

        monkeypatch.setattr(reach, "connect", connect)
        assert (b"\0raw" if after is ALL else b"") == scene.say(9000, [b"\0raw"])
        assert [("127.0.0.1", 9000)] == scene.dialled
        assert 0 == scene.commons.connections


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("found", "dialled"),
    [
        (["127.0.0.1", "10.0.0.1", "127.0.0.2"], ["127.0.0.1", "127.0.0.2"]),
        (["10.0.0.1", "127.0.0.2"], ["127.0.0.2"]),
        (["10.0.0.1"], None),
    ],
)
def test_of_a_names_addresses_those_are_dialled_that_may_be(
    made: Callable[[NetworkPolicy], Scene],
    monkeypatch: pytest.MonkeyPatch,
    found: list[str],
    dialled: list[str] | None,
) -> None:
    scene = made(ALL)
    asked: list[list[str]] = []
    answer = tuple((socket.AF_INET, each) for each in found)
    monkeypatch.setattr(scene.commons.resolver, "_look_up", lambda _: answer)

    async def connect(places: list[tuple[int, str]], port: int) -> tuple[socket.socket, str]:
        asked.append([address for _, address in places])
        return await scene._connect(places, port)

    monkeypatch.setattr(reach, "connect", connect)
    scene.say(9000, [b"\0raw"])
    assert ([] if dialled is None else [dialled]) == asked
    event = scene.events[-1]
    assert (dialled is not None) == event["allowed"]
    assert found[0] == event["address"] if dialled is None else dialled[0] == event["address"]


@pytest.mark.anyone
def test_what_a_name_leads_to_is_asked_for_anew_under_another_policy(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene = made(ALL)
    scene.say(9000, [b"\0raw"])
    assert scene.commons.resolver._kept
    scene.change(ALL)
    assert {} == scene.commons.resolver._kept


# -- what is put on record -----------------------------------------------------------------------

IMPATIENT = replace(ALL, limits=NetworkLimits(idle_s=0.05, header_s=0.5))


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("server", "status"), [("is silent", 504), ("ends", 502), ("speaks nonsense", 502)]
)
def test_a_request_whose_server_fails_was_allowed(
    made: Callable[[NetworkPolicy], Scene], server: str, status: int
) -> None:
    scene = made(IMPATIENT)
    with scene.begin(80, REQUEST) as client:
        while not scene._servers:
            scene.settle()
        if server == "ends":
            scene._servers[-1].shutdown(socket.SHUT_WR)
        elif server == "speaks nonsense":
            scene.answer(b"nonsense\r\n\r\n")
        client.setblocking(False)
        while is_silent(client):
            scene.settle()
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status)
    while scene.sandbox.connections:
        scene.settle()
    event = scene.events[-1]
    assert ("http", True, "POST", "/") == tuple(
        event[name] for name in ("kind", "allowed", "method", "path")
    )
    assert event["reason"]


def is_silent(client: socket.socket) -> bool:
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


@pytest.mark.anyone
def test_a_request_that_is_refused_was_not_allowed(made: Callable[[NetworkPolicy], Scene]) -> None:
    scene = made(ONLY_GET)
    assert b"" == scene.say(80, [REQUEST])
    assert (False, "POST") == (scene.events[-1]["allowed"], scene.events[-1]["method"])


@pytest.mark.anyone
def test_bytes_are_those_before_and_after_a_hello_was_looked_at(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    hello = records(message(sni(b"a.test")))
    scene = made(ALL)
    with scene.begin(443, hello + b"early") as client:
        while not scene._servers:
            scene.settle()
        scene.answer(b"\x15\x03\x03\x00\x02\x02\x28")
        scene.answer(b"more")
        heard, received = scene._hear(), client.recv(99)
        assert (hello + b"early", 11) == (heard, len(received))
        (live,) = scene.sandbox.live()
        assert (len(heard), len(received)) == (live["bytes_out"], live["bytes_in"])
        scene.sandbox.close()
        scene.settle()
    event: dict[str, Any] = scene.events[-1]
    assert (len(heard), len(received)) == (event["bytes_out"], event["bytes_in"])
    assert len(heard) + len(received) == scene.sandbox.meter.moved_bytes


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("second", "why"),
    [
        (records(message(sni(b"a.test"))), ""),
        (records(message(sni(b"b.test"))), "TLS for 'b.test' in a connection for a.test"),
        (records(message()), "without a server name"),
        (records(message(sni(b"a.test"), (ECH, b"\0"))), "(ECH)"),
    ],
)
def test_a_second_hello_is_looked_at_as_the_first_and_the_servers_message_counted(
    made: Callable[[NetworkPolicy], Scene], second: bytes, why: str
) -> None:
    """Servers are expected to compare both: one that does not would serve another name."""
    hello = records(message(sni(b"a.test")))
    again = records(bytes([2]) + vector(3, b"\x03\x03" + _RETRY + b"\0\x13\x01\0"))
    scene = made(ALL)
    with scene.begin(443, hello) as client:
        while not scene._servers:
            scene.settle()
        scene.answer(again)
        assert (hello, again) == (scene._hear(), client.recv(999))
        client.sendall(second)
        scene.settle()
        if why:
            assert (b"", True) == (scene._hear(), is_reset(client))
        else:
            assert second == scene._hear()
            scene.answer(b"more")
            assert b"more" == client.recv(99), "and the first message is not sent twice"
        scene.sandbox.close()
        scene.settle()
    event: dict[str, Any] = scene.events[-1]
    heard = (len(hello) + (0 if why else len(second)), len(again) + (0 if why else 4))
    assert (*heard, True) == (event["bytes_out"], event["bytes_in"], why in event["reason"])
    assert sum(heard) == scene.sandbox.meter.moved_bytes


# -- another policy, other limits ------------------------------------------------------------------


@pytest.mark.anyone
def test_the_authority_is_the_one_that_was_given_last(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene, terminator = made(ALL), Terminator()
    scene.commons.terminator = terminator
    one, other = (terminator.make(["a.test"]) for _ in range(2))

    def apply(ca: dict[str, str] | None) -> Authority | None:
        scene.sandbox.apply({**scene._settings(ALL), "ca": ca})
        return scene.sandbox.authority

    first = apply(one)
    assert first is not None
    assert one["cert"] == first.certificate
    assert first is apply(dict(one)), "what it has signed stays good"
    second = apply(other)
    assert second is not None
    assert other["cert"] == second.certificate
    assert apply(None) is None


@pytest.mark.anyone
def test_new_limits_hold_for_what_comes_then(made: Callable[[NetworkPolicy], Scene]) -> None:
    scene = made(ALL)
    for limits, refusal in (
        (NetworkLimits(), ""),
        (NetworkLimits(connections_per_s=1), "too many new connections a second"),
        (NetworkLimits(), ""),
    ):
        scene.change(replace(ALL, limits=limits))
        for _ in range(2):
            scene.say(9000, [b"\0raw"])
        reasons = [each["reason"] for each in scene.events if each["kind"] == "tcp"]
        assert refusal == reasons[-1]
    moved = scene.sandbox.meter.moved_bytes
    assert moved
    scene.sandbox.apply({**scene._settings(ALL), "network_bytes": moved})
    assert b"" == scene.say(9000, [b"\0raw"])
    assert "network bytes" in scene.events[-1]["reason"]
    scene.sandbox.apply({**scene._settings(ALL), "network_bytes": moved + 100})
    assert b"\0raw" == scene.say(9000, [b"\0raw"])


@pytest.mark.anyone
def test_names_of_the_policy_keep_their_addresses_however_many_are_asked_for(
    made: Callable[[NetworkPolicy], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = made(ALL)
    scene.change(NetworkPolicy.parse(f"b.test,*.c.test,{HERE}"))
    names = scene.sandbox.names
    kept = names.addresses("b.test")
    assert {"b.test"} == set(names._pinned)
    assert "b.test" == names.name_at(kept[0])


GET = REQUEST.replace(b"POST", b"GET")
BY_METHOD = tuple(
    NetworkRule("a.test", "80", action=action, methods=(method,))
    for action, method in (("allow", "POST"), ("deny", "GET"))
)


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("address", "port", "is_proxy", "is_resolver"),
    [
        ("198.18.0.1", 3128, True, False), ("198.18.0.1", 80, True, False),
        ("2001:2::1", 3128, True, False), ("127.0.0.1", 1021, True, False),
        ("::1", 1021, True, False), ("127.9.9.9", 1021, True, False),
        ("127.0.0.1", 3128, False, False), ("198.18.0.2", 1021, False, False),
        ("203.0.113.1", 1021, False, False), ("127.0.0.53", 53, False, True),
        ("127.0.0.53", 54, False, False), ("127.0.0.54", 53, False, False),
    ],
)  # fmt: skip
def test_where_the_proxy_and_the_resolver_are(
    made: Callable[[NetworkPolicy], Scene],
    address: str,
    port: int,
    is_proxy: bool,
    is_resolver: bool,
) -> None:
    sandbox = made(ALL).sandbox

    assert is_proxy == sandbox.is_proxy(packed(address), port)
    assert is_resolver == sandbox.is_resolver(packed(address), port)


@pytest.mark.anyone
def test_decisions_that_are_remembered_do_not_pile_up(
    made: Callable[[NetworkPolicy], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_MOST_KEPT", 3)
    sandbox = made(ALL).sandbox
    for n in range(10):
        assert sandbox.judge_name("a.test", n + 1)
        assert not sandbox.judge_name(f"{n}.test", 80)
        assert not sandbox.terminates("a.test", n + 1)
        assert not sandbox.judge_address(None, f"203.0.113.{n}", 80)
    for kept in (sandbox._names_judged, sandbox._terminated, sandbox._addresses_judged):
        assert 1 <= len(kept) <= 3


@pytest.mark.anyone
def test_an_address_is_judged_at_the_port_that_it_is_dialled_at(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene = made(NetworkPolicy.parse("a.test,127.0.0.0/8:9000"))

    assert b"\0raw" == scene.say(9000, [b"\0raw"])
    assert b"" == scene.say(9001, [b"\0raw"])
    event = scene.events[-1]
    assert "127.0.0.1 is loopback" in event["reason"]
    assert ("", False) == (event["rule"], event["allowed"])


@pytest.mark.anyone
def test_the_rule_that_denies_each_address_of_a_name_is_on_record(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene = made(NetworkPolicy.parse("a.test,!127.0.0.0/8"))

    assert b"" == scene.say(9000, [b"\0raw"])
    event = scene.events[-1]
    assert ("!127.0.0.0/8", "127.0.0.1", False) == (
        event["rule"],
        event["address"],
        event["allowed"],
    )


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("policy", "port", "said", "rule", "allowed"),
    [
        (NetworkPolicy(allowed_hosts=(HERE, "a.test:9000")), 9000, b"\0raw", "a.test:9000", True),
        (NetworkPolicy(allowed_hosts=(HERE, "a.test", "!a.test:9000")), 9000, b"\0raw", "!a.test:9000", False),
        (NetworkPolicy(allowed_hosts=("a.test", f"!{HERE}")), 9000, b"\0raw", f"!{HERE}", False),
        (NetworkPolicy(allowed_hosts=("a.test",)), 9000, b"\0raw", "", False),
        (NetworkPolicy(allowed_hosts=("a.test", f"!{HERE}")), 80, GET, f"!{HERE}", False),
        (NetworkPolicy(allowed_hosts=("a.test",)), 80, GET, "", False),
        (NetworkPolicy(allowed_hosts=(HERE, "a.test")), 80, GET, "a.test", True),
        (NetworkPolicy(allowed_hosts=(HERE,), rules=BY_METHOD), 80, REQUEST, "a.test:80", True),
        (NetworkPolicy(allowed_hosts=(HERE,), rules=BY_METHOD), 80, GET, "!a.test:80", False),
    ],
)  # fmt: skip
def test_the_record_names_the_rule_that_decided(
    made: Callable[[NetworkPolicy], Scene],
    policy: NetworkPolicy,
    port: int,
    said: bytes,
    rule: str,
    allowed: bool,
) -> None:
    scene = made(policy)
    scene.say(port, [said])
    (event,) = (each for each in scene.events if each["kind"] != "dns")
    assert (rule, allowed) == (event["rule"], event["allowed"])


@pytest.mark.anyone
def test_a_fault_of_ours_ends_its_connection_and_is_told(
    made: Callable[[NetworkPolicy], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, faults = made(ALL), list[BaseException]()
    scene.loop.on_fault = faults.append

    async def serve(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(passage, "serve", serve)
        with scene.begin(9000, b"\0raw") as client:
            assert is_reset(client)
    assert ["a bug"] == [str(each) for each in faults]
    assert "an internal error of the egress process" == scene.events[-1]["reason"]
    assert (0, set()) == (scene.commons.connections, scene.sandbox.connections)
    assert b"\0raw" == scene.say(9000, [b"\0raw"]), "the next is served"


@pytest.mark.anyone
def test_a_connection_on_which_nothing_is_said_ends_after_the_time_of_its_policy(
    made: Callable[[NetworkPolicy], Scene],
) -> None:
    scene = made(IMPATIENT)
    with scene.begin(9000, b"\0raw") as client:
        while not scene._servers:
            scene.settle()
        while scene.sandbox.connections:
            scene.settle()
        assert is_reset(client)
    assert "idle for too long" == scene.events[-1]["reason"]
