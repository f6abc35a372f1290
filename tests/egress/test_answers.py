"""A sandbox's resolver: which names there are, where they lead, and what is on record."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import NetworkLimits, NetworkPolicy
from ringfence.egress.dns import answers
from ringfence.egress.dns import message as dns
from ringfence.linux.destination import packed
from tests.egress.one_sandbox import Scene

pytestmark = pytest.mark.anyone

_MX = 15
_IP_RECVERR = 11


@pytest.fixture
def scene() -> Iterator[Scene]:
    policy = NetworkPolicy.parse("a.test,*.wild.test:443,!no.wild.test,10.0.0.0/8")
    with ExitStack() as stack:
        made = Scene(policy)
        stack.callback(made.close)
        yield made


def query(name: bytes, kind: int = dns.A, *, flags: int = 0x0100, kind_of_class: int = 1) -> bytes:
    labels = b"".join(bytes((len(label),)) + label for label in name.split(b".") if label)
    head = struct.pack(">HHHHHH", 7, flags, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack(">HH", kind, kind_of_class)


def answered(scene: Scene, data: bytes) -> tuple[int, list[bytes]]:
    """The code of the answer, and the addresses in it."""
    return read(answers.answer(scene.sandbox, data) or b"")


def read(answer: bytes) -> tuple[int, list[bytes]]:
    number, flags, questions, count, _, _ = struct.unpack_from(">HHHHHH", answer)
    assert (7, 0x8000) == (number, flags & 0x8000)
    at = 12
    for _ in range(questions):
        at = answer.index(b"\0", at) + 5
    found = []
    for _ in range(count):
        pointer, _kind, _class, ttl, length = struct.unpack_from(">HHHIH", answer, at)
        assert (0xC00C, answers.TTL_S) == (pointer, ttl)
        found.append(answer[at + 12 : at + 12 + length])
        at += 12 + length
    assert at == len(answer)
    return flags & 0xF, found


def test_an_allowed_name_has_addresses_of_its_own(scene: Scene) -> None:
    scene.sandbox.has_ipv6 = True
    for name in (b"a.test", b"x.wild.test", b"A.Test"):
        v4, v6 = scene.sandbox.names.addresses(name.decode().lower())
        for kind, found in (
            (dns.A, [v4]), (dns.AAAA, [v6]), (dns.ANY, [v4, v6]), (_MX, []),
        ):  # fmt: skip
            assert (dns.NOERROR, found) == answered(scene, query(name, kind))
        assert name.decode().lower() == scene.sandbox.names.name_at(v4)
    events = scene.events
    assert {"a.test", "x.wild.test"} == {each["host"] for each in events}
    assert all(each["allowed"] and "dns" == each["kind"] for each in events)
    assert "*.wild.test:443" in {each["rule"] for each in events}


def test_without_ipv6_there_is_no_address_of_it(scene: Scene) -> None:
    """So nobody waits for a connection that cannot be."""
    scene.sandbox.has_ipv6 = False
    v4, _ = scene.sandbox.names.addresses("a.test")

    assert (dns.NOERROR, []) == answered(scene, query(b"a.test", dns.AAAA))
    assert (dns.NOERROR, [v4]) == answered(scene, query(b"a.test", dns.ANY))


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        (b"b.test", dns.A, "no rule allows b.test (A)"),
        (b"no.wild.test", dns.AAAA, "(AAAA)"),
        (b"wild.test", 65, "no rule allows wild.test (HTTPS)"),
        (b"b.test", 999, "(type 999)"),
        (b"a b.test", dns.A, "not a host name (A)"),
        (b"1.0.0.10.in-addr.arpa", 12, "(PTR)"),
        (b"10.0.0.1", dns.A, "(A)"),
        (b"notlocalhost", dns.A, "(A)"),
    ],
)
def test_no_other_name_is_there(scene: Scene, name: bytes, kind: int, reason: str) -> None:
    before = len(scene.sandbox.names)

    assert (dns.NXDOMAIN, []) == answered(scene, query(name, kind))
    assert before == len(scene.sandbox.names)
    (event,) = scene.events
    assert not event["allowed"]
    assert reason in event["reason"]


@pytest.mark.parametrize("name", [b"localhost", b"x.localhost", b"LOCALHOST"])
def test_localhost_is_the_sandbox_itself(scene: Scene, name: bytes) -> None:
    v4, v6 = packed("127.0.0.1"), packed("::1")
    for kind, found in ((dns.A, [v4]), (dns.AAAA, [v6]), (dns.ANY, [v4, v6]), (_MX, [])):
        assert (dns.NOERROR, found) == answered(scene, query(name, kind))
    assert [] == scene.events


def test_what_deserves_no_answer_gets_none_and_an_error_is_one(scene: Scene) -> None:
    assert answers.answer(scene.sandbox, query(b"a.test", flags=0x8100)) is None
    assert answers.answer(scene.sandbox, b"short") is None
    assert dns.REFUSED == answered(scene, query(b"a.test", kind_of_class=3))[0]
    assert dns.FORMERR == answered(scene, query(b"a.test") + b"x")[0]
    assert [] == scene.events


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def over_tcp(scene: Scene, data: bytes) -> list[bytes]:
    """The answers that come until the end of the connection."""
    scene._name = packed("127.0.0.53")
    with scene.begin(53, data) as client:
        client.shutdown(socket.SHUT_WR)
        while scene.sandbox.connections:
            scene.settle()
        said, found = client.recv(1 << 16), []
    while said:
        length = int.from_bytes(said[:2], "big")
        found.append(said[2 : 2 + length])
        said = said[2 + length :]
    return found


def test_queries_over_one_connection_are_answered_in_turn(scene: Scene) -> None:
    v4, _ = scene.sandbox.names.addresses("a.test")
    both = framed(query(b"a.test")) + framed(query(b"b.test"))

    assert [(0, [v4]), (3, [])] == [read(each) for each in over_tcp(scene, both + b"\0")]
    assert ["dns", "dns"] == [each["kind"] for each in scene.events], "each query, and no more"
    assert 1 == len(over_tcp(scene, framed(query(b"a.test")) + framed(b"short")))
    assert [] == over_tcp(scene, framed(b""))


def test_over_one_connection_there_are_so_many_answers_and_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MOST_QUERIES", 3)
    one = framed(query(b"a.test"))
    for asked, answered_to in ((2, 2), (3, 3), (5, 3)):
        left, said = bytearray(asked * one), list[bytes]()

        class Stream:
            async def read(self, most: int, left: bytearray = left) -> bytes:
                taken = bytes(left[:most])
                del left[:most]
                return taken

            async def write(self, data: bytes, said: list[bytes] = said) -> None:
                said.append(data)

        stream: Any = Stream()
        scene.loop.run_until_done(answers.serve(scene.sandbox, stream))
        assert (answered_to, (asked - answered_to) * one) == (len(said), bytes(left))


def test_a_query_that_ends_before_its_length_is_none(scene: Scene) -> None:
    whole = framed(query(b"a.test"))
    assert 1 == len(over_tcp(scene, whole))
    for left in (1, 2, 5, len(whole) - 1):
        assert [] == over_tcp(scene, whole[:-left])
    assert 1 == len(scene.events)


def test_who_asks_nothing_over_tcp_is_not_waited_for_without_end(scene: Scene) -> None:
    scene.change(NetworkPolicy.parse("a.test").altered(limits=NetworkLimits(idle_s=0.05)))
    scene._name = packed("127.0.0.53")
    with scene.begin(53, b"\0") as client:
        while scene.sandbox.connections:
            scene.settle()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert [] == scene.events


def test_datagrams_are_answered(scene: Scene) -> None:
    v4, _ = scene.sandbox.names.addresses("a.test")
    scene._datagrams.bind(("127.0.0.1", 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(30)
        for data in (b"short", query(b"a.test")):
            client.sendto(data, scene._datagrams.getsockname())
        scene.settle()
        assert (dns.NOERROR, [v4]) == read(client.recv(4096))
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)


def test_a_client_that_is_gone_takes_nothing_from_the_next(scene: Scene) -> None:
    """What the kernel says of the first, when asked for the second or when answering, is the first's alone."""
    scene._datagrams.bind(("127.0.0.1", 0))
    scene._datagrams.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)
        )
        for client in (one, other):
            client.settimeout(10)
            client.sendto(query(b"a.test"), scene._datagrams.getsockname())
            if client is one:
                client.close()
        scene.sandbox._on_datagram()
        assert (dns.NOERROR, [scene.sandbox.names.addresses("a.test")[0]]) == read(other.recv(512))


def test_an_answer_that_cannot_be_sent_takes_nothing_from_the_next(scene: Scene) -> None:
    """A unix socket refuses at once what nobody is there to take."""
    names = [f"\0ringfence-{os.getpid()}-{number}" for number in range(3)]
    with ExitStack() as stack:
        socks = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for _ in names
        ]
        for sock, name in zip(socks, names, strict=True):
            sock.bind(name)
        listening, one, other = socks
        for client in (one, other):
            client.settimeout(10)
            client.sendto(query(b"a.test"), names[0])
        one.close()
        listening.setblocking(False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scene.sandbox, "_datagrams", listening)
            scene.sandbox._on_datagram()
        assert (dns.NOERROR, [scene.sandbox.names.addresses("a.test")[0]]) == read(other.recv(512))
