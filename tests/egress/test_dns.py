"""DNS messages: every query that a stub sends, and every packet that somebody makes up."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.dns import message as dns

pytestmark = pytest.mark.anyone

# RFC 1035, 3596, 2782 and 9460.
NUMBERS = {
    "A": 1,
    "NS": 2,
    "CNAME": 5,
    "SOA": 6,
    "PTR": 12,
    "MX": 15,
    "TXT": 16,
    "AAAA": 28,
    "SRV": 33,
    "SVCB": 64,
    "HTTPS": 65,
    "ANY": 255,
}
NAMES = st.lists(
    st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=20),
    min_size=1,
    max_size=6,
).map(".".join)


def encode(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def query(
    name: bytes, kind: int = dns.A, *, flags: int = 0x0100, counts: str = "1000", extra: bytes = b""
) -> bytes:
    head = struct.pack(">HH4H", 0x1234, flags, *map(int, counts))
    return head + name + struct.pack(">HH", kind, dns.IN) + extra


OPT = b"\0" + struct.pack(">HHIH", dns.OPT, 4096, 0, 0)


def test_types_have_the_names_of_their_rfcs() -> None:
    assert NUMBERS == {name: number for number, name in dns.TYPES.items()}


def read(packet: bytes) -> tuple[int, list[tuple[int, int, bytes]]]:
    """A second reader: code (EDNS included) and (type, TTL, data) of each answer."""
    _, flags, questions, answers, none, additional = struct.unpack_from(">6H", packet)
    assert flags & 0x8000
    assert 0 == none
    at = 12
    for _ in range(questions):
        while packet[at]:
            at += packet[at] + 1
        at += 5
    found = []
    for _ in range(answers):
        assert b"\xc0\x0c" == packet[at : at + 2]
        kind, _klass, ttl, size = struct.unpack_from(">HHIH", packet, at + 2)
        found.append((kind, ttl, packet[at + 12 : at + 12 + size]))
        at += 12 + size
    code = flags & 15
    if additional:
        assert b"\0" == packet[at : at + 1]
        kind, _size, extended, length = struct.unpack_from(">HHIH", packet, at + 1)
        assert (dns.OPT, 0) == (kind, length)
        code |= extended >> 24 << 4
        at += 11
    assert at == len(packet), "bytes after the last field"
    return code, found


def parsed(packet: bytes) -> dns.Query:
    found = dns.parse(packet)
    assert found is not None
    return found


@given(NAMES, st.sampled_from([dns.A, dns.AAAA, 65, 255]), st.booleans())
def test_a_plain_query_is_read(name: str, kind: int, edns: bool) -> None:
    packet = query(
        encode(name), kind, counts="1001" if edns else "1000", extra=OPT if edns else b""
    )

    found = parsed(packet)

    assert (name, kind, True, 0, edns) == (
        found.name,
        found.kind,
        found.is_host_name,
        found.failure,
        found.edns,
    )


def test_the_spelling_of_the_question_comes_back() -> None:
    packet = query(encode("ExAmPlE.TeSt"))
    found = parsed(packet)

    assert "example.test" == found.name
    assert b"\7ExAmPlE\4TeSt" in dns.answer(found)


def test_addresses_are_answered() -> None:
    v4, v6 = ipaddress.ip_address("198.18.1.2").packed, ipaddress.ip_address("2001:2::5").packed
    packet = dns.answer(parsed(query(encode("a.test"))), records=[v4, v6], ttl_s=30)

    assert (0, [(dns.A, 30, v4), (dns.AAAA, 30, v6)]) == read(packet)


@pytest.mark.parametrize(
    ("asked", "told"),
    [(0x0000, 0x8080), (0x0100, 0x8180), (0x0010, 0x8090), (0x0110, 0x8190), (0x0560, 0x8180)],
)
def test_of_what_was_asked_for_only_recursion_and_no_checks_come_back(
    asked: int, told: int
) -> None:
    """Recursion can be had; nothing here is authoritative, cut short or authenticated."""
    packet = dns.answer(parsed(query(encode("a.test"), flags=asked)))

    assert told == struct.unpack_from(">H", packet, 2)[0]


def test_an_error_has_no_answer_but_the_question() -> None:
    packet = dns.answer(parsed(query(encode("no.test"), counts="1001", extra=OPT)), dns.NXDOMAIN)

    assert (dns.NXDOMAIN, []) == read(packet)
    assert encode("no.test") in packet


@pytest.mark.parametrize(
    "packet",
    [
        query(b"\x01a\xc0\x0c"),  # a pointer to itself
        query(b"\xc0\x0c"),
        query(b"\x40" + b"a" * 64 + b"\0"),
        query(b"\x81a\0"),
        query(b"\x3fa\0"),  # a label that is longer than the packet
        query((b"\x3f" + b"a" * 63) * 4 + b"\0"),  # 257 bytes
        query(encode("a.test"))[:-1],
        query(encode("a.test")) + b"\0",
        query(encode("a.test"), counts="2000", extra=encode("b.test") + b"\0\1\0\1"),
        query(encode("a.test"), counts="0000"),
        query(encode("a.test"), counts="1100"),
        query(encode("a.test"), counts="1010"),
        query(encode("a.test"), counts="1002", extra=OPT * 2),
        query(encode("a.test"), counts="1001", extra=OPT + b"x"),
        *(query(encode("a.test"), counts="1001", extra=OPT[:size]) for size in range(len(OPT))),
        query(encode("a.test"), counts="1002", extra=OPT),  # one of two
        query(encode("a.test"), counts="1001", extra=b"\1" + OPT),
        query(encode("a.test"), counts="1001", extra=b"\1" + OPT[1:]),  # not at the root
        query(encode("a.test"), counts="1001", extra=b"\0" + struct.pack(">HHIH", 250, 1, 0, 0)),
        query(encode("a.test"), flags=0x0300),  # truncated
    ],
)
def test_what_is_not_one_plain_question_is_a_format_error(packet: bytes) -> None:
    answer = dns.answer(parsed(packet))

    assert (dns.FORMERR, []) == read(answer)
    assert len(answer) <= 12 + len(OPT)  # no question: what was read of it may be half of one


def test_the_longest_name_is_read() -> None:
    name = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert 253 == len(name)

    assert name == parsed(query(encode(name))).name


@pytest.mark.parametrize("packet", [b"", bytes(11), query(encode("a.test"), flags=0x8180)])
def test_what_is_no_query_gets_no_answer(packet: bytes) -> None:
    assert dns.parse(packet) is None


def test_other_operations_and_classes_are_refused() -> None:
    update = dns.answer(parsed(query(encode("a.test"), flags=0x2800)))
    chaos = query(encode("version.bind"), 16)[:-2] + b"\0\3"

    newer = b"\0" + struct.pack(">HHIH", dns.OPT, 4096, 1 << 16, 0)
    both = chaos[:10] + b"\0\1" + chaos[12:] + newer

    assert dns.NOTIMP == read(update)[0]
    assert dns.REFUSED == read(dns.answer(parsed(chaos)))[0]
    assert dns.REFUSED == read(dns.answer(parsed(both)))[0]


def test_a_newer_edns_is_told_our_version() -> None:
    newer = b"\0" + struct.pack(">HHIH", dns.OPT, 4096, 1 << 16, 0)
    found = parsed(query(encode("a.test"), counts="1001", extra=newer))

    assert (dns.BADVERS, []) == read(dns.answer(found))


@pytest.mark.parametrize("label", [b"a.b", b"a\0b", b"a b", b"\xff", b"a\nb", b"*"])
def test_what_is_no_host_name_is_escaped(label: bytes) -> None:
    found = parsed(query(bytes([len(label)]) + label + encode("test")))

    assert not found.is_host_name
    assert found.name.isprintable()
    assert found.name.isascii()
    assert not found.name.startswith(label.decode("latin-1") + ".")


def test_the_root_is_no_host_name() -> None:
    assert not parsed(query(b"\0")).is_host_name


@given(st.binary(max_size=600))
def test_anything_is_survived(packet: bytes) -> None:
    found = dns.parse(packet)

    if found is not None:
        code, answers = read(dns.answer(found, dns.NXDOMAIN))
        assert code
        assert not answers


@given(NAMES, st.data())
def test_a_damaged_query_is_survived(name: str, data: st.DataObject) -> None:
    """Closer to the truth than random bytes: one byte of a good query differs."""
    packet = bytearray(query(encode(name), counts="1001", extra=OPT))
    packet[data.draw(st.integers(2, len(packet) - 1))] = data.draw(st.integers(0, 255))

    found = dns.parse(bytes(packet))

    assert found is None or read(dns.answer(found, dns.NXDOMAIN))


def test_a_label_and_a_name_are_as_long_as_they_may_be_and_no_longer() -> None:
    """63 and 255 bytes, lengths and the root among them: RFC 1035, section 2.3.4."""
    assert 0 == parsed(query(encode("a" * 63))).failure
    assert dns.FORMERR == parsed(query(encode("a" * 64))).failure
    longest = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert 255 == len(encode(longest))
    assert 0 == parsed(query(encode(longest))).failure
    assert dns.FORMERR == parsed(query(encode(longest + "a"))).failure
    assert dns.FORMERR == parsed(query(encode(longest[:-2] + ".a.a"))).failure


def test_the_answers_are_numbered_as_others_number_them() -> None:
    """RFC 1035, section 4.1.1; RFC 6891, section 9."""
    numbers = (dns.NOERROR, dns.FORMERR, dns.NXDOMAIN, dns.NOTIMP, dns.REFUSED, dns.BADVERS)
    assert (0, 1, 3, 4, 5, 16) == numbers
