"""Smaller parts: JSON, the meter, the record, the host's own addresses, original destinations."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.control import write
from ringfence.egress.dns import own as own_addresses
from ringfence.egress.dns.own import OwnAddresses
from ringfence.egress.io.loop import Loop, sleep
from ringfence.egress.meter import SPENT, Meter, Rate
from ringfence.egress.record import _BURST, Record
from ringfence.linux import routes
from ringfence.linux.destination import destination, packed, plain, shown
from tests.egress.scene import no_descriptor_left

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


def test_what_a_rate_has_not_used_for_long_is_no_more_than_its_burst() -> None:
    rate = Rate(100, 10)
    rate.spend(10)
    rate._at -= 0.06
    for _ in range(3):  # the same time counts once
        assert 6 <= rate.available() < 9
    rate._at -= 1000
    assert 10 == rate.available()


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


def test_all_that_waits_for_the_rate_has_one_timer(loop: Loop) -> None:
    meter = Meter(loop, bytes_per_s=1)
    meter.count(100)
    before = len(loop._timers)
    for _ in range(50):
        assert 0 >= meter.grant(10, lambda: None)

    assert (before + 1, 50) == (len(loop._timers), len(meter._waiting))


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


def test_as_many_as_fit_a_message_go_out_at_once_and_later_ones_in_their_time(loop: Loop) -> None:
    told: list[int] = []

    def tell(message: dict[str, Any]) -> bool:
        told.append(len(message["events"]))
        return True

    record = Record(loop, tell)
    for number in range(65):
        record.add("sbx-1", "tcp", host=f"{number}.test", allowed=True)
    assert [64] == told
    for expected in ([64, 1], [64, 1, 1]):
        while len(told) < len(expected):
            loop.turn()
        assert expected == told
        record.add("sbx-1", "tcp", host="x.test", allowed=True)
    record.flush()


def test_names_that_are_asked_for_do_not_pile_up(loop: Loop) -> None:
    record = Record(loop, lambda _: True)
    for number in range(1030):
        record.add("sbx-1", "dns", host=f"{number}.test", allowed=False)
    assert 1024 == len(record._asked)
    assert "1029.test" in {key[1] for key in record._asked}
    record.flush()


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


@pytest.mark.parametrize("at", [0.0, 0.6, 0.99])
def test_a_question_is_the_same_from_one_sandbox_with_one_answer_within_a_second(
    loop: Loop, at: float
) -> None:
    """Counted from the first: who asks without end is on record once a second."""
    told: list[dict[str, Any]] = []

    def tell(message: dict[str, Any]) -> bool:
        told.extend(message.get("events", ()))
        return True

    record, began = Record(loop, tell), loop.now
    for now, sandbox, allowed in (
        (0.0, "one", False),
        (at, "one", False),
        (at, "one", True),
        (at, "other", False),
        (1.01, "one", False),
        (1.01, "one", False),
    ):
        loop.now = began + now
        record.add(sandbox, "dns", host="a.test", allowed=allowed)
    record.flush()
    assert [("one", False), ("one", True), ("other", False), ("one", False)] == [
        (each["sandbox_id"], each["allowed"]) for each in told
    ]


def test_what_is_not_limited_is_counted_all_the_same(loop: Loop) -> None:
    meter = Meter(loop)
    assert 10 == meter.at_once(10) == meter.grant(10, pytest.fail)
    meter.count(7)
    assert 7 == meter.moved_bytes
    meter.limit(10, None)
    assert (3, 2) == (meter.at_once(10), meter.at_once(2))
    meter.count(3)
    assert (0, True) == (meter.at_once(10), meter.is_spent)
    meter.limit(None, 1)
    assert 1 == meter.at_once(10)
    meter.count(5)
    assert 0 == meter.at_once(10)


def test_routes_are_looked_at_at_once_and_not_again_for_a_moment(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_addresses, "_LEAST_S", 0.02)
    own, looks = OwnAddresses(loop, lambda: None), list[float]()
    monkeypatch.setattr(own, "_look", lambda: looks.append(time.monotonic()))
    later, rests = loop.later, list[float]()

    def rest(delay_s: float, call: Any) -> Any:
        rests.append(time.monotonic())
        return later(delay_s, call)

    monkeypatch.setattr(loop, "later", rest)
    for number in range(1, 4):
        for _ in range(3):
            own._on_notice(0)
        assert 2 * number - 1 == len(looks), "the first at once, the others later"
        while len(looks) < 2 * number:
            loop.turn()
        assert looks[-1] - rests[-2] >= 0.02, "from before the look, however long that takes"
        while own._is_resting:
            loop.turn()
        assert 2 * number == len(looks)

    def lose(_most: int) -> bytes:
        raise OSError(errno.ENOBUFS, "some were lost")

    sock = own._socket
    monkeypatch.setattr(own, "_socket", SimpleNamespace(recv=lose))
    own._on_notice(0)
    assert 7 == len(looks), "what counts is that there were any"
    monkeypatch.setattr(own, "_socket", sock)
    own.close()


def test_routes_that_could_not_be_looked_at_are_looked_at_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_addresses, "_LEAST_S", 0.01)
    own = OwnAddresses(loop, lambda: None)
    own._networks = ()
    with no_descriptor_left():
        own._on_notice(0)
        assert () == own._networks
    until = time.monotonic() + 10
    while not own._networks and time.monotonic() < until:
        loop.run_until_done(sleep(0.005))
    assert own.covers(packed("127.0.0.1"))
    own.close()


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


def test_a_network_of_one_version_covers_no_address_of_the_other(loop: Loop) -> None:
    own = OwnAddresses(loop, lambda: None)
    own._networks = ((packed("10.0.0.0"), 8), (packed("::a00:0"), 120))
    assert own.covers(packed("10.0.0.1"))
    assert own.covers(packed("::a00:1"))
    assert not own.covers(packed("::a00:100"))
    own._networks = ((packed("10.0.0.0"), 8),)
    assert not own.covers(packed("::a00:1"))
    own._networks = ((packed("::a00:0"), 24),)
    assert not own.covers(packed("10.0.0.1"))
    own.close()


def test_what_changes_during_the_first_look_is_noticed(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(routes, name)

        def call() -> Any:
            done.append(name)
            return real()

        return call

    for name in ("watch_routes", "local_networks"):
        monkeypatch.setattr(routes, name, noted(name))
    OwnAddresses(loop, lambda: None).close()

    assert ["watch_routes", "local_networks"] == done


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
