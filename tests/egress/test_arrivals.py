"""Connections of a sandbox as they arrive: whose they are, how many, where they lead, what is given back."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import NetworkLimits, NetworkPolicy
from ringfence.egress import control, record, rules
from ringfence.egress import sandbox as sandboxes
from ringfence.egress.control import Control
from ringfence.egress.host.served import MOST_EVENTS, Served
from ringfence.egress.io.loop import Loop, sleep
from ringfence.launcher import wire
from ringfence.linux.destination import packed
from ringfence.model.net.netlog import NetworkEvent
from ringfence.policy.network import Judge
from tests.egress.one_sandbox import Scene
from tests.egress.scene import no_descriptor_left

pytestmark = pytest.mark.anyone

TOKEN = bytes(range(16))
RAW = b"\0raw"
Make = Callable[..., Scene]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(*hosts: str, **limits: Any) -> Scene:
            policy = NetworkPolicy(
                allowed_hosts=hosts or ("a.test", "127.0.0.0/8"), limits=NetworkLimits(**limits)
            )
            scene = Scene(policy)
            stack.callback(scene.close)
            return scene

        yield made


def reasons(scene: Scene) -> list[str]:
    return [each["reason"] for each in scene.events if each["kind"] != "dns"]


def settled(scene: Scene) -> None:
    """Nothing is counted or open any more."""
    scene.settle()
    assert (0, 0) == (scene.commons.connections, len(scene.sandbox.connections))


def is_cut(client: socket.socket) -> bool:
    try:
        return b"" == client.recv(1)
    except ConnectionResetError:
        return True


# -- whose they are ------------------------------------------------------------------------------


def destination(address: str, port: int) -> bytes:
    family = packed(address)
    mapped = family if len(family) == 16 else bytes(10) + b"\xff\xff" + family
    return struct.pack("!16sH", mapped, port)


@pytest.mark.parametrize(
    ("said", "is_let_in"),
    [
        (TOKEN + destination("127.0.0.1", 9000), True),
        (TOKEN + destination("::ffff:127.0.0.1", 9000), True),
        (TOKEN[:-1] + b"\xff" + destination("127.0.0.1", 9000), False),
        (b"\xff" + TOKEN[1:] + destination("127.0.0.1", 9000), False),
        (destination("127.0.0.1", 9000), False),
        (TOKEN, False),
        (TOKEN + destination("127.0.0.1", 9000)[:-1], False),
        (b"", False),
    ],
)
def test_a_connection_through_an_agent_begins_with_its_token(
    make: Make, said: bytes, is_let_in: bool
) -> None:
    scene = make()
    scene.sandbox._token = TOKEN
    with scene.begin(9000, said + (RAW if is_let_in else b"")) as client:
        if not is_let_in:
            with suppress(OSError):  # it may be cut already
                client.shutdown(socket.SHUT_WR)
            scene.settle()
            assert is_cut(client)
        assert is_let_in == (scene.dialled == [("127.0.0.1", 9000)])
        if is_let_in:
            scene.settle()
            assert RAW == scene._hear(), "the rest is the program's own"
    scene.sandbox.close()
    settled(scene)
    assert (1 if is_let_in else 0) == len(reasons(scene)), (
        "of a stranger there is nothing to record"
    )


def test_through_an_agent_the_destination_is_judged_as_any_other(make: Make) -> None:
    scene = make("a.test")
    scene.sandbox._token = TOKEN
    with scene.begin(9000, TOKEN + destination("127.0.0.1", 9000)) as client:
        assert is_cut(client)
    assert [] == scene.dialled
    assert ["127.0.0.1 is loopback, and no rule allows that network"] == reasons(scene)
    settled(scene)


def test_an_agent_that_says_nothing_is_not_waited_for(make: Make) -> None:
    scene = make(header_s=0.05)
    scene.sandbox._token = TOKEN
    with scene.begin(9000, TOKEN[:4]) as client:
        scene.loop.run_until_done(sleep(0.1))
        assert is_cut(client)
    settled(scene)


# -- how many ------------------------------------------------------------------------------------


def test_as_many_connections_as_may_be_and_not_one_more(make: Make) -> None:
    scene = make(connections=2)
    first, second = (scene.begin(9000, RAW) for _ in range(2))
    with first, second:
        with scene.begin(9000, RAW) as third:
            assert is_cut(third)
        assert (2, 2) == (scene.commons.connections, len(scene.sandbox.connections))
        assert ["too many connections at the same time"] == reasons(scene)
        first.close()
        scene.settle()
        assert 2 >= len(scene.sandbox.connections)
    scene.sandbox.close()
    settled(scene)


def test_a_place_is_free_again_once_a_connection_has_ended(make: Make) -> None:
    scene = make(connections=1)
    for _ in range(3):
        assert RAW == scene.say(9000, [RAW])
        settled(scene)
    assert "" == "".join(reasons(scene))


def test_so_many_connections_a_second(make: Make) -> None:
    scene = make(connections_per_s=2)
    clients = [scene.begin(9000, RAW) for _ in range(4)]
    scene.settle()
    refused = [reason for reason in reasons(scene) if reason]
    assert 1 <= len(refused) <= 2, "some of a second's may have come again meanwhile"
    assert {"too many new connections a second"} == {*refused}
    for client in clients:
        client.close()
    scene.sandbox.close()
    settled(scene)


def test_a_host_without_room_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make()
    monkeypatch.setattr(scene.commons, "has_room_for", lambda _sandbox: False)
    with scene.begin(9000, RAW) as client:
        assert is_cut(client)
    assert ["this host has no room for more connections"] == reasons(scene)
    settled(scene)


def test_without_descriptors_a_connection_waits_and_is_served_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "_PATIENCE_S", 0.03)
    scene = make()
    scene.meant = scene._name, 9000
    with socket.create_connection(scene._listener.getsockname()) as client:
        client.sendall(RAW)
        with no_descriptor_left():
            scene.settle()
            scene.settle()
            assert 0 == scene.commons.connections
            assert not scene.loop._soon, "others have their turn meanwhile"
        scene.loop.run_until_done(sleep(0.06))
        while not scene._servers:
            assert 1 == scene.commons.connections
            scene.settle()
        scene.settle()
        assert RAW == scene._hear()


@pytest.mark.parametrize(
    ("number", "waits"),
    [
        *((number, True) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)),
        (errno.ECONNABORTED, False),
    ],
)
def test_only_want_of_room_puts_arrivals_off(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: int, waits: bool
) -> None:
    """One that has gone meanwhile is no reason to let the next one wait; a full host is one."""
    scene, asked, later = make(), list[None](), list[float]()

    def accept() -> None:
        asked.append(None)
        raise OSError(number, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(scene.sandbox, "_listener", SimpleNamespace(_accept=accept))
        patch.setattr(scene.loop, "later", lambda delay_s, _: later.append(delay_s))
        scene.sandbox._on_connection()
    expected = (1, [sandboxes._PATIENCE_S]) if waits else (sandboxes._TURN, [])
    assert expected == (len(asked), later)


def test_more_than_are_accepted_in_one_turn_are_served_without_a_further_event(make: Make) -> None:
    scene = make()
    scene.meant = scene._name, 9000
    with ExitStack() as stack:
        for _ in range(sandboxes._TURN + 1):
            stack.enter_context(socket.create_connection(scene._listener.getsockname()))
        scene.settle()
        assert sandboxes._TURN + 1 == scene.commons.connections


def test_a_listener_that_was_shut_down_is_not_asked_again_and_again(make: Make) -> None:
    scene = make()
    assert RAW == scene.say(9000, [RAW]), "the control"
    scene._listener.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        scene.sandbox._on_connection()
        assert not scene.loop._soon


def test_a_closed_sandbox_lets_go_of_its_sockets_and_does_nothing_more(make: Make) -> None:
    """Their numbers are those of the next sandbox."""
    scene = make()
    sandbox = scene.sandbox
    numbers = {sandbox._listener.fileno(), sandbox._datagrams.fileno()}
    assert numbers <= set(scene.loop._handlers), "the control"
    sandbox.close()
    assert numbers.isdisjoint(scene.loop._handlers)
    assert (-1, -1) == (sandbox._listener.fileno(), sandbox._datagrams.fileno())
    sandbox._on_connection()
    sandbox._on_datagram()
    assert not scene.loop._soon


@pytest.mark.parametrize(
    ("sandboxes", "of_all", "own", "has_room"),
    [
        (1, 74, 74, True),
        (1, 75, 25, True),
        (1, 75, 26, False),
        (4, 74, 74, True),
        (4, 75, 6, True),
        (4, 75, 7, False),
        (4, 99, 6, True),
        (4, 100, 1, False),
        (40, 99, 1, True),
        (40, 99, 2, False),
    ],
)
def test_the_last_quarter_of_a_hosts_connections_is_divided(
    make: Make, sandboxes: int, of_all: int, own: int, has_room: bool
) -> None:
    commons = make().commons
    commons.sandboxes = {str(number): None for number in range(sandboxes)}  # type: ignore[misc]
    commons._most, commons.connections = 4 * sandboxes + 6 * 100 + 5, of_all
    asking: Any = SimpleNamespace(connections=range(own))
    assert has_room == commons.has_room_for(asking)
    commons.sandboxes, commons.connections = {}, 0


# -- where they lead -----------------------------------------------------------------------------


def test_an_address_of_a_name_that_nobody_asked_for_leads_nowhere(make: Make) -> None:
    scene = make()
    for address in ("198.18.77.77", "2001:2::77:77"):
        assert b"" == scene.say(9000, [RAW], to=packed(address))
    assert ["an address for which no current name was resolved"] * 2 == reasons(scene)
    assert ["198.18.77.77", "2001:2::77:77"] == [each["address"] for each in scene.events]
    assert [] == scene.dialled
    settled(scene)


def test_what_is_routed_to_this_machine_is_its_own_though_no_address_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 203.0.113.0/24 after `ip route add local`; a rule for addresses opens it."""
    everywhere, named = make("public").sandbox, make("203.0.113.8").sandbox
    for sandbox, address in ((everywhere, "203.0.113.7"), (named, "203.0.113.8")):
        assert sandbox.judge_address(None, address, 80), "the control"
        monkeypatch.setattr(sandbox.commons.own, "_networks", ((packed("203.0.113.0"), 24),))
        sandbox._judge_by(Judge(sandbox.policy, ()))
    refused = everywhere.judge_address(None, "203.0.113.7", 80)
    assert (False, "203.0.113.7 leads to the host itself") == (refused.allowed, refused.reason)
    assert named.judge_address(None, "203.0.113.8", 80)
    assert everywhere.judge_address(None, "203.0.114.7", 80)


def test_an_address_that_the_host_has_is_refused_from_then_on_also_inside_another(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each sandbox, and by each policy that comes after."""
    scenes = make("public"), make("public")
    commons = scenes[0].commons
    monkeypatch.setattr(commons, "sandboxes", {"1": scenes[0].sandbox, "2": scenes[1].sandbox})
    places = "203.0.113.7", "64:ff9b::cb00:7107"

    def judged(scene: Scene) -> list[str]:
        found = [scene.sandbox.judge_address(None, place, 80) for place in places]
        return ["" if each else each.reason.partition(" is ")[2][:22] for each in found]

    refused = ["the host's own address"] * 2
    for texts, expected in ((frozenset(), ["", ""]), (frozenset(places[:1]), refused)):
        for scene in scenes:
            monkeypatch.setattr(scene.commons.own, "texts", texts)
        commons._rejudge()
        for scene in scenes:
            assert expected == judged(scene)
            scene.change(scene.sandbox.policy)
            assert expected == judged(scene)


def test_what_was_decided_of_an_address_holds_for_the_name_that_led_there(make: Make) -> None:
    sandbox = make("a.test", "127.0.0.2").sandbox
    for _ in range(2):  # the second time, as it is remembered
        assert not sandbox.judge_address("a.test", "10.0.0.1", 80)
        assert sandbox.judge_address("a.test", "203.0.113.1", 80)
        assert not sandbox.judge_address("b.test", "203.0.113.1", 80)
        assert not sandbox.judge_address(None, "203.0.113.1", 80)
        assert sandbox.judge_address(None, "127.0.0.2", 80)
        assert not sandbox.judge_address("b.test", "127.0.0.2", 80)


def test_a_sandbox_that_ends_without_a_connection_is_forgotten_at_once(make: Make) -> None:
    scene = make()
    assert RAW == scene.say(9000, [RAW])
    settled(scene)
    assert scene.commons.record._rates, "the control: it is not before"
    scene.sandbox.close()
    assert {} == scene.commons.record._rates


def test_a_policy_that_cannot_be_read_changes_nothing(make: Make) -> None:
    scene = make()
    sandbox = scene.sandbox
    before = sandbox.policy, sandbox.judge, sandbox.limits, sandbox.secrets, sandbox.authority
    good = scene._settings(NetworkPolicy.parse("b.test"))
    for bad in (
        {
            **good,
            "policy": {**good["policy"], "allowed_hosts": ["a b"], "rules": [{"host": "a b"}]},
        },
        {**good, "policy": NetworkPolicy.parse("unrestricted").to_json()},
        {name: each for name, each in good.items() if name != "ca"},
    ):
        with pytest.raises(Exception):  # noqa: B017
            sandbox.apply(bad)
        now = sandbox.policy, sandbox.judge, sandbox.limits, sandbox.secrets, sandbox.authority
        assert all(one is other for one, other in zip(before, now, strict=True))
    sandbox.apply(good)
    assert ("b.test",) == sandbox.policy.allowed_hosts


def test_decisions_that_are_remembered_are_bounded_and_end_with_the_policy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program inside chooses the names and addresses that it asks for."""
    sandbox = make().sandbox
    assert 4096 == rules._MOST_KEPT
    monkeypatch.setattr(rules, "_MOST_KEPT", 3)
    remembered = ("_names_judged", "_addresses_judged", "_terminated")
    for number in range(10):
        assert not sandbox.judge_name(f"n{number}.test", 80)
        assert not sandbox.judge_address(None, f"192.0.2.{number}", 80)
        assert not sandbox.terminates(f"n{number}.test", 80)
        assert all(1 <= len(getattr(sandbox, name)) <= 3 for name in remembered)
    sandbox.rejudge()
    assert [0, 0, 0] == [len(getattr(sandbox, name)) for name in remembered]


def test_an_authority_is_read_once_while_it_is_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificates would be made anew for each change of the policy."""
    scene = make()
    read: list[Any] = []

    def authority_of(given: Any) -> Any:
        read.append(given)
        return None if given is None else object()

    monkeypatch.setattr(scene.commons, "authority_of", authority_of)
    settings = scene._settings(NetworkPolicy.parse("a.test"))
    found = []
    for given in ({"cert": "1"}, {"cert": "1"}, {"cert": "2"}, None, None, {"cert": "1"}):
        scene.sandbox.apply({**settings, "ca": given})
        found.append(scene.sandbox.authority)
    assert [{"cert": "1"}, {"cert": "2"}, None, {"cert": "1"}] == read
    assert found[0] is found[1]
    assert len({id(each) for each in (found[0], found[2], found[5])}) == 3
    assert [None, None] == found[3:5]


# -- what is told --------------------------------------------------------------------------------


def test_what_waits_for_a_host_that_does_not_read_is_bounded_but_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "_MOST_WAITING", 3)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended: list[bool] = []
    loop = Loop()
    with theirs:
        told = Control(
            loop, wire.Socket(fileno=ours.detach()), lambda *_: None, lambda: ended.append(True)
        )
        number = 0
        while told.tell({"number": number}):
            number += 1
        assert 3 == len(told._waiting)
        assert told.tell({"number": number}, must=True)
        assert not told.tell({"number": -1})
        theirs.setblocking(False)
        heard: list[bytes] = []
        for _ in range(2 * number + 10):
            try:
                heard.append(theirs.recv(1 << 16))
            except BlockingIOError:
                loop.run_until_done(sleep(0.001))
        assert [b'{"number":%d}' % each for each in range(number + 1)] == heard
        assert 0 == len(told._waiting)
    loop.run_until_done(sleep(0.01))
    assert ended, "the host process is gone"
    told._socket.close()
    loop.close()


def test_a_host_that_is_gone_is_noticed_by_who_tells_it_something() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended: list[bool] = []
    loop = Loop()
    told = Control(
        loop, wire.Socket(fileno=ours.detach()), lambda *_: None, lambda: ended.append(True)
    )
    told.tell({"number": 1})
    assert [] == ended
    theirs.close()
    told.tell({"number": 2})
    assert [True] == ended, "at once, and not when it is heard"
    told._socket.close()
    loop.close()


def event(number: int, *, allowed: bool, kind: str = "tcp", port: int = 80) -> NetworkEvent:
    return NetworkEvent(
        kind=kind,
        time=float(number),
        sandbox_id="s",
        host="a",
        port=port,
        allowed=allowed,
        bytes_in=1,
    )


def test_a_sandboxs_record_keeps_the_newest_of_each_sort_and_the_first_to_each_place() -> None:
    served = Served({}, [])
    for number in range(MOST_EVENTS + 2):
        served.add(event(number, allowed=True, port=1 if number else 2))
        served.add(event(number, allowed=False))
    served.add(event(9999, allowed=True, kind="dns"))
    found = served.events()
    passed = [each for each in found if each.allowed and each.kind != "dns"]
    others = [each for each in found if not each.allowed]
    assert [0.0, 1.0, 2.0] == [each.time for each in passed[:3]]
    assert MOST_EVENTS + 2 == len(passed)
    assert MOST_EVENTS - 1 == len(others), "a name that was asked for is one of them"
    assert (MOST_EVENTS + 3, MOST_EVENTS + 2) == (served.allowed, served.refused)
    assert found == sorted(found, key=lambda each: each.time)
    again = Served({}, [])
    again.add(event(5000, allowed=True, port=3))
    again.missed = 2
    again.inherit(served)
    assert (MOST_EVENTS + 4, MOST_EVENTS + 2, 2) == (again.allowed, again.refused, again.missed)
    assert 0.0 == again.events()[0].time
    assert served.bytes_in + 1 == again.bytes_in


def test_what_was_known_before_comes_before_what_is_known_since() -> None:
    """A sandbox moves to another process, and what its new one has told already is newer."""
    heard: list[NetworkEvent] = []
    before, since = Served({}, []), Served({}, [])
    before.listener = heard.append
    for number in range(2):
        before.add(event(number, allowed=True, port=1))
        before.add(event(number, allowed=False))
    for number in range(2, MOST_EVENTS):
        since.add(event(number, allowed=True, port=1))
        since.add(event(number, allowed=False))
    assert 4 == len(heard)
    since.inherit(before)
    for allowed in (True, False):
        times = [each.time for each in since.events() if each.allowed is allowed]
        assert [*map(float, range(MOST_EVENTS))] == times
    assert 0.0 == since._first["a", "", 1].time
    for number in (MOST_EVENTS, MOST_EVENTS + 1):
        since.add(event(number, allowed=True, port=2))
        since.add(event(number, allowed=False))
    assert 8 == len(heard), "its listener is told as before"
    passed, others = since._passed, since._others
    assert (2.0, 2.0) == (passed[0].time, others[0].time), "the oldest go first"


def test_what_a_sandbox_held_is_closed_once() -> None:
    one, other = socket.socketpair()
    served = Served({}, [one.detach()])
    served.close()
    served.close()
    assert b"" == other.recv(1)
    other.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = listener.dup()
        given_up = Served({}, [listener.dup().detach()])
        given_up.give_up()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(kept.getsockname() if kept.fileno() >= 0 else ("127.0.0.1", 1))
        kept.close()
        assert [] == given_up.fds


def test_a_flood_of_one_sort_hides_nothing_of_the_other_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "_EVENTS_PER_S", 1e-9)
    monkeypatch.setattr(record, "_BURST", 2.0)
    told: list[dict[str, Any]] = []
    loop = Loop()

    def tell(message: dict[str, Any]) -> bool:
        told.append(message)
        return True

    made = record.Record(loop, tell)
    for _ in range(5):
        made.add("s", "tcp", allowed=False)
    for _ in range(3):
        made.add("s", "tcp", allowed=True)
    made.flush()
    events = [each["allowed"] for message in told for each in message.get("events", ())]
    assert [False, False, True, True] == events
    assert [{"s": 4}] == [message["missed"] for message in told if "missed" in message]
    assert (2, {}) == (len(made._rates), made._missed)
    told.clear()
    for number in range(3):  # questions are of the rest, whatever they are answered
        made.add("t", "dns", allowed=True, host=f"{number}.test")
    for _ in range(2):
        made.add("t", "tcp", allowed=True)
    made.flush()
    kinds = [each["kind"] for message in told for each in message.get("events", ())]
    assert ["dns", "dns", "tcp", "tcp"] == kinds
    for name in ("s", "t"):
        made.forget(name)
    assert {} == made._rates
    loop.close()
