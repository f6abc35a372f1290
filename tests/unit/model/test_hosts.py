"""One reading of every host, the same one that other readers have, or a refusal."""

from __future__ import annotations

import ipaddress
import socket
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.model import strategies as some

from ringfence.errors import InvalidRequest
from ringfence.model.net import hosts

pytestmark = pytest.mark.anyone

# Made of what names and addresses are made of, so that many are almost one.
ALMOST = st.text(st.sampled_from("aAbx0127.-_*:[]/%@ \t\0\\é\u212a\u3002\u00ad"), max_size=12)
RANGES = st.tuples(some.ports, some.ports).map(lambda pair: (min(pair), max(pair)))


def read(given: str) -> str | None:
    try:
        return hosts.read_host(given, "host")
    except InvalidRequest:
        return None


def ports_of(text: str) -> set[int]:
    return {p for low, high in hosts.port_ranges(text) for p in range(low, high + 1)}


@given(ALMOST | st.text(max_size=20))
@example("\u212a.com")  # the Kelvin sign, whose lower case is k
@example("a.com\u3002evil.com")  # an ideographic full stop, a dot to IDNA
@example("a\u00ad.com")  # a soft hyphen, nothing to IDNA
def test_reading_twice_changes_nothing(given: str) -> None:
    once = read(given)

    assert once is None or once == read(once)


@given(ALMOST)
def test_a_name_is_nothing_else_to_other_readers(given: str) -> None:
    """Neither the C library nor `ipaddress` takes it for an address; a URL has it as its host."""
    name = read(given)
    if name is None or hosts.looks_like_address(name):
        return
    exact = name.removeprefix("*.")
    with pytest.raises(OSError):
        socket.inet_aton(exact)
    with pytest.raises(ValueError):
        ipaddress.ip_address(exact)
    assert exact == urlsplit(f"http://{exact}:80/").hostname
    assert exact == given.lower().removeprefix("*.").removesuffix(".")


@given(st.ip_addresses() | st.ip_addresses(v=4))
def test_addresses_are_what_ipaddress_reads(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    read = hosts.read_host(str(address), "host")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None

    assert (mapped or address) == ipaddress.ip_address(read)
    family = socket.AF_INET6 if ":" in read else socket.AF_INET
    assert ipaddress.ip_address(read).packed == socket.inet_pton(family, read)


@given(st.ip_addresses())
def test_every_spelling_of_an_address_is_one_rule(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    plain = hosts.read_host(str(address), "host")
    spellings = [address.exploded, str(address).upper(), f"{address}/{address.max_prefixlen}"]
    if isinstance(address, ipaddress.IPv4Address):
        spellings += [f"::ffff:{address}", f"0:0:0:0:0:FFFF:{address}", f"::ffff:{address}/128"]
    else:
        spellings.append(f"[{address}]")

    assert {plain} == {hosts.read_host(each, "host") for each in spellings}


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_networks(address: ipaddress.IPv4Address, bits: int) -> None:
    network = ipaddress.ip_network((int(address), bits), strict=False)
    written = hosts.read_host(str(network), "host")

    assert network == ipaddress.ip_network(written)
    assert written == hosts.read_host(f"::ffff:{network.network_address}/{bits + 96}", "host")


@given(st.ip_addresses(v=4))
def test_what_only_the_c_library_reads_as_an_address_is_refused(
    address: ipaddress.IPv4Address,
) -> None:
    value = int(address)
    a, b, c, d = address.packed
    for text in (
        str(value), hex(value), f"0{value:o}", f"{a}.{value & 0xFFFFFF}", f"{a}.{b}.{(c << 8) + d}",
        f"0x{a:x}.{b}.{c}.{d}", f"{a}.{b}.{c}.0x{d:X}", f"{a}.{b}.{c}.{d}.", f"0{a:o}.{b}.{c}.{d}",
    ):  # fmt: skip
        if text == str(address):
            continue  # "0255" and the like may be decimal again
        assert read(text) in (None, str(address) if not text.startswith("0") else None), text


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("bücher.de", "write xn--bcher-kva.de"),
        ("straße.de", "write the A-label, which starts with xn--"),  # strasse.de in IDNA 2003
        ("a\u200db.de", "write the A-label, which starts with xn--"),
        ("a.de\u3002b", "write the A-label, which starts with xn--"),
        ("\ud800.de", "write the A-label, which starts with xn--"),
        ("http://a.com/x", "use the host name without the URL: a.com"),
    ],
)
def test_hints(given: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        hosts.read_host(given, "host")

    assert hint == refusal.value.hint


@pytest.mark.parametrize("name", ["xn--bcher-kva.de", "a--b.com", "_x.a.com", "1a.com", "a.1x"])
def test_odd_names_are_names(name: str) -> None:
    assert name == hosts.read_name(name.upper() + ".", "host")


@pytest.mark.parametrize(
    "given",
    [
        "", ".", "..", "a..b", "a.com..", "-a.com", "a-.com", "*.com", "*", "*.*.com", "a*.com",
        "*.1.2.3.4", "*.127.1", "a.com:80", "user@a.com", "a.com%2e", "a.com\n", " a.com", "a b",
        "a\0b.com", "fe80::1%lo", "[a.com]", "[::1", "::1]", "1.2.3.4/255.0.0.0", "1.2.3.4/-1",
        "1.2.3.0/+24", "1.2.3.4/", "/8", "::/129", "10.0.0.1/8", "\uff11.2.3.4", "a." * 127 + "com",
    ],
)  # fmt: skip
def test_what_is_no_host(given: str) -> None:
    assert read(given) is None


class TestPorts:
    @given(st.lists(RANGES, min_size=1, max_size=6))
    def test_the_same_ports_are_one_spelling(self, ranges: list[tuple[int, int]]) -> None:
        text = ",".join(f"{low}-{high}" for low, high in ranges)
        canonical = hosts.read_ports(text, "ports")
        wanted = {p for low, high in ranges for p in range(low, high + 1)}

        assert wanted == ports_of(canonical)
        assert canonical == hosts.read_ports(canonical, "ports")
        spans = hosts.port_ranges(canonical)
        assert all(a[1] + 1 < b[0] for a, b in pairwise(spans))

    @pytest.mark.parametrize(
        ("given", "canonical"),
        [
            ("", ""), ("0443", "443"), ("443, 80", "80,443"), ("80,81", "80-81"), ("1-65535", ""),
            ("1-9,10-65535", ""), ("5-5", "5"), ("1-10,5-20", "1-20"),
        ],
    )  # fmt: skip
    def test_spellings(self, given: str, canonical: str) -> None:
        assert canonical == hosts.read_ports(given, "ports")

    @pytest.mark.parametrize(
        "given",
        ["0", "65536", "-1", "1-", "-", "2-1", "1-2-3", "a", ",", "80,", "\uff180", "80\n", "0x50",
         "1e3", "+80", "080000"],
    )  # fmt: skip
    def test_what_is_no_port(self, given: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            hosts.read_ports(given, "ports")

        assert "ports" == refusal.value.field
