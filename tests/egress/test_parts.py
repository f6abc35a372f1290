"""Smaller parts: JSON, the meter, the record, the host's own addresses, original destinations."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.control import write
from ringfence.egress.dns.own import OwnAddresses
from ringfence.egress.io.loop import Loop, sleep
from ringfence.egress.meter import SPENT, Meter, Rate
from ringfence.egress.record import _BURST, Record
from ringfence.linux import routes
from ringfence.linux.destination import destination, packed, plain, shown

pytestmark = pytest.mark.anyone

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture(name="loop")
def fixture_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.mark.full
@given(PLAIN)
def test_json_is_what_json_reads(value: Any) -> None:
    text = write(value)

    assert value == json.loads(text)
    assert text.isascii()


def test_a_rate_refills_and_saves_up_only_so_much() -> None:
    rate = Rate(100, 10)
    assert 10 == rate.available()
    rate.spend(30)
    assert 0 == rate.available()
    time.sleep(0.25)
    assert 1 <= rate.available() <= 10
    assert all(Rate(None, 0).take() for _ in range(1000))


def test_all_that_waits_for_the_rate_goes_on(loop: Loop) -> None:
    meter = Meter(loop, bytes_per_s=100_000)
    done: list[int] = []

    def move(number: int) -> None:
        granted = meter.grant(20_000, lambda: move(number))
        if granted > 0:
            meter.count(granted)
            done.append(number)

    for number in range(4):
        move(number)
    assert len(done) < 4
    loop.run_until_done(sleep(1.0))
    assert {0, 1, 2, 3} == set(done)


def test_the_total_is_never_passed(loop: Loop) -> None:
    meter = Meter(loop, total_bytes=100)
    assert 60 == meter.grant(60, pytest.fail)
    meter.count(60)
    assert 40 == meter.grant(60, pytest.fail)
    meter.count(40)
    assert meter.is_spent
    assert 0 == meter.grant(1, pytest.fail)
    with pytest.raises(OSError, match=SPENT):
        loop.run_until_done(meter.allowance(1))

    meter.limit(200, None)  # a higher limit lets it go on
    assert 100 == meter.grant(1000, pytest.fail)


def test_the_record_goes_out_in_batches(loop: Loop) -> None:
    told: list[dict[str, Any]] = []

    def tell(message: dict[str, Any]) -> bool:
        told.append(message)
        return True

    record = Record(loop, tell)
    for number in range(10):
        record.add("sbx-1", "tcp", host=f"{number}.test", allowed=True)
    assert [] == told
    loop.run_until_done(sleep(0.1))
    assert [10] == [len(message["events"]) for message in told]
    for _ in range(int(_BURST) * 2):
        record.add("sbx-1", "tcp", host="x.test", allowed=False)
    record.flush()
    events = [event for message in told for event in message.get("events", ())]
    assert int(_BURST) + 10 <= len(events) < _BURST * 1.5
    assert int(_BURST) * 2 + 10 - len(events) == sum(
        message["missed"]["sbx-1"] for message in told if "missed" in message
    )


def test_a_host_that_does_not_listen_costs_no_memory(loop: Loop) -> None:
    accepts = False

    def tell(message: dict[str, Any]) -> bool:
        told.append(message)
        return accepts

    told: list[dict[str, Any]] = []
    record = Record(loop, tell)
    for number in range(500):
        record.add("sbx-1", "tcp", host=f"{number}.test", allowed=True)
    record.flush()
    accepts = True
    told.clear()
    record.flush()

    assert [{"missed": {"sbx-1": 500}}] == told


def test_the_same_question_again_is_one_line(loop: Loop) -> None:
    told: list[dict[str, Any]] = []

    def tell(message: dict[str, Any]) -> bool:
        told.append(message)
        return True

    record = Record(loop, tell)
    for name in ("a.test", "a.test", "b.test", "a.test"):
        record.add("sbx-1", "dns", host=name, allowed=False)
    record.flush()

    assert ["a.test", "b.test"] == [event["host"] for event in told[0]["events"]]


def test_every_address_of_the_host_is_its_own(loop: Loop) -> None:
    changes: list[None] = []
    own = OwnAddresses(loop, lambda: changes.append(None))
    assert 1 == len(changes)
    assert "127.0.0.1" in own.texts
    for text in own.texts:
        assert own.covers(packed(text))
    assert own.covers(packed("127.1.2.3"))
    assert "127.1.2.3" not in own.texts
    assert not own.covers(packed("203.0.113.1"))
    assert not own.covers(packed("2001:db8::77"))
    own.close()


def test_the_routes_are_those_of_the_kernel() -> None:
    found = routes.local_networks()

    assert (packed("127.0.0.0"), 8) in found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for address, bits in found:
            if bits == 32:
                sock.bind((shown(address), 0))  # only a local address can be bound
                break


@given(st.ip_addresses())
def test_addresses_there_and_back(address: Any) -> None:
    mapped = getattr(address, "ipv4_mapped", None)

    assert packed(str(address)) == (mapped or address).packed
    assert address.packed == plain(address.packed) or mapped


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_without_an_entry_it_is_where_it_came_to(family: int, host: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)):
            accepted, peer = listener.accept()
            with accepted:
                assert (packed(host), port) == destination(accepted, peer[0])
