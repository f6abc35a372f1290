"""Synthetic addresses: one name each, the same after a restart, never too many."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.dns.names import PROXY_V4, PROXY_V6, Names, is_synthetic, number_of

pytestmark = pytest.mark.anyone

V4 = ipaddress.ip_network("198.18.0.0/15")
V6 = ipaddress.ip_network("2001:2::/48")
SOME = st.lists(st.text("abcdef.", min_size=1, max_size=6), unique=True, max_size=40)


@given(SOME)
def test_every_name_has_addresses_of_its_own(given_names: list[str]) -> None:
    names = Names("sbx-1")
    pairs = {name: names.addresses(name) for name in given_names}

    assert len(given_names) == len({v4 for v4, _ in pairs.values()})
    for name, (v4, v6) in pairs.items():
        assert ipaddress.ip_address(v4) in V4
        assert ipaddress.ip_address(v6) in V6
        assert name == names.name_at(v4) == names.name_at(v6)
        assert (v4, v6) == names.addresses(name)


@given(SOME, st.randoms())
def test_a_restart_changes_nothing(given_names: list[str], chance: object) -> None:
    before, after = Names("sbx-1"), Names("sbx-1")
    before.pin(given_names)
    given_names.sort(key=lambda _: chance.random())  # type: ignore[attr-defined]
    after.pin(given_names)

    assert [before.addresses(n) for n in given_names] == [after.addresses(n) for n in given_names]


def test_every_sandbox_has_its_own_order() -> None:
    assert Names("sbx-1").addresses("a.test") != Names("sbx-2").addresses("a.test")


def test_a_sandbox_may_have_a_long_id() -> None:
    """A key of the hash has at most 64 bytes."""
    for letters in (64, 65, 200):
        names = Names("s" * letters)
        assert "a.test" == names.name_at(names.addresses("a.test")[0])


def test_the_table_is_bounded_and_what_is_pinned_stays() -> None:
    names = Names("sbx-1", most=10)
    names.pin(["a.test", "b.test"])
    fixed = names.addresses("a.test")
    first = names.addresses("0.wild.test")
    for number in range(1, 1000):
        names.addresses(f"{number}.wild.test")

    assert 12 == len(names)
    assert names.name_at(first[0]) is None
    assert "999.wild.test" == names.name_at(names.addresses("999.wild.test")[0])
    assert "a.test" == names.name_at(fixed[0])


def test_what_is_used_stays() -> None:
    names = Names("sbx-1", most=3)
    kept = names.addresses("kept.test")
    for number in range(10):
        names.addresses(f"{number}.wild.test")
        assert kept == names.addresses("kept.test")


def test_what_is_no_longer_pinned_makes_room() -> None:
    names = Names("sbx-1", most=1)
    names.pin(["a.test"])
    address = names.addresses("a.test")[0]
    names.pin(["b.test"])

    assert "a.test" == names.name_at(address)
    names.addresses("c.test")
    assert names.name_at(address) is None


def test_names_of_one_policy_after_another_do_not_pile_up() -> None:
    """Once every number is taken, the search for a free one would never end."""
    names = Names("sbx-1", most=10)
    for policy in range(20):
        names.pin([f"{number}.policy-{policy}.test" for number in range(8)])
        assert len(names) <= 10 + 8
    kept = [names.addresses(f"{number}.policy-19.test")[0] for number in range(8)]
    names.pin([])

    assert [f"{number}.policy-19.test" for number in range(8)] == [names.name_at(a) for a in kept]
    assert 10 == len(names)


def test_the_proxy_and_the_networks_own_addresses_belong_to_no_name() -> None:
    names = Names("sbx-1")
    taken = {names.addresses(f"{number}.test")[0] for number in range(5000)}

    assert PROXY_V4 not in taken
    assert not any(address[3] in (0, 255) for address in taken)
    assert names.name_at(PROXY_V4) is None
    assert names.name_at(PROXY_V6) is None


@given(st.one_of(st.binary(min_size=4, max_size=4), st.binary(min_size=16, max_size=16)))
def test_other_addresses_have_no_name(address: bytes) -> None:
    network = V4 if 4 == len(address) else V6
    inside = ipaddress.ip_address(address) in network

    assert inside == is_synthetic(address)
    assert inside == (number_of(address) is not None)
    assert Names("sbx-1").name_at(address) is None


def test_thousands_of_names_share_no_address_and_none_is_of_the_first_or_last_of_a_network() -> (
    None
):
    """So many that some begin their search at the number of another, or at one that no name may have."""
    names = Names("sbx-1", most=16000)
    taken = [names.addresses(f"{number}.test")[0] for number in range(16000)]

    assert len(taken) == len(set(taken)) == len(names)
    assert not [each for each in taken if each[3] in (0, 255) or each[:3] == b"\xc6\x12\0"]
    assert [f"{number}.test" for number in range(16000)] == [names.name_at(each) for each in taken]


def test_the_one_that_was_used_last_is_the_last_to_go() -> None:
    names = Names("sbx-1", most=2)
    first, second = (names.addresses(name)[0] for name in ("a.test", "b.test"))
    names.addresses("a.test")
    names.addresses("c.test")

    assert ("a.test", None) == (names.name_at(first), names.name_at(second))


def test_a_name_keeps_its_address_when_it_is_pinned_and_when_it_is_no_longer() -> None:
    names = Names("sbx-1")
    address = names.addresses("a.test")
    for pinned in (["a.test"], []):
        names.pin(pinned)
        assert address == names.addresses("a.test")
    assert 1 == len(names)


def test_beside_the_two_networks_there_is_no_name() -> None:
    names = Names("sbx-1")
    for address in names.addresses("a.test"):
        for bit in range(8 * len(address)):
            other = int.from_bytes(address, "big") ^ 1 << bit
            assert names.name_at(other.to_bytes(len(address), "big")) is None
