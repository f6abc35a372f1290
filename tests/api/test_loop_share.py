"""Many small pieces are read in turn; who sends a whole message at once is not held up by them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ringfence.api import loop_share
from ringfence.api.loop_share import InSlices, LoopShare
from tests.api.conftest import StartDaemon

pytestmark = pytest.mark.anyone
FREE = loop_share._FREE_READS


class _Sink(asyncio.Protocol):
    def __init__(self) -> None:
        self.parsed: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parsed.append(data)


class Sliced(InSlices, _Sink):
    """Keeps what it was given to parse."""

    async def have(self, sent: bytes) -> None:
        while b"".join(self.parsed) != sent:
            await asyncio.sleep(0.001)


class Connections:
    """Connected pairs: the client's socket, and the server's protocol."""

    def __init__(self, share: LoopShare) -> None:
        self._share = share
        self._made: list[tuple[socket.socket, asyncio.Transport]] = []

    async def make(self) -> tuple[socket.socket, Sliced]:
        ours, theirs = socket.socketpair()
        of_share = type("OfShare", (Sliced,), {"share": self._share})
        transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            of_share, theirs
        )
        self._made.append((ours, transport))
        return ours, protocol

    async def close(self) -> None:
        for ours, transport in self._made:
            transport.close()
            ours.close()
        await asyncio.sleep(0)


@pytest.fixture(name="connections")
async def fixture_connections() -> AsyncIterator[Connections]:
    connections = Connections(LoopShare())
    yield connections
    await connections.close()


async def send_in_pieces(ours: socket.socket, theirs: Sliced, count: int) -> bytes:
    """Send so many bytes, each when the one before was read."""
    for number in range(count):
        ours.send(b"x")
        await theirs.have(b"x" * (number + 1))
    return b"x" * count


async def test_the_first_small_pieces_are_free(connections: Connections) -> None:
    ours, theirs = await connections.make()
    connections._share._next_read = time.monotonic() + 3600  # nobody gets a turn

    await send_in_pieces(ours, theirs, FREE)
    ours.send(b"y")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(theirs.have(b"x" * FREE + b"y"), 0.1)


async def test_so_they_are_again_after_a_whole_message(connections: Connections) -> None:
    ours, theirs = await connections.make()
    connections._share._next_read = time.monotonic() + 3600

    await send_in_pieces(ours, theirs, FREE)
    theirs.complete()
    ours.send(b"y")

    await asyncio.wait_for(theirs.have(b"x" * FREE + b"y"), 10)


async def test_large_pieces_need_no_turn(connections: Connections) -> None:
    ours, theirs = await connections.make()
    connections._share._next_read = time.monotonic() + 3600
    sent = b""

    for _ in range(FREE + 5):
        sent += b"z" * 1024
        ours.send(b"z" * 1024)
        await asyncio.wait_for(theirs.have(sent), 10)


async def test_connections_take_their_turns_together(connections: Connections) -> None:
    """Ten connections take ten times as long as one for as many reads."""
    pairs = [await connections.make() for _ in range(10)]
    beyond = 5
    for ours, theirs in pairs:
        await send_in_pieces(ours, theirs, FREE)
    began = time.monotonic()

    async def go_on(ours: socket.socket, theirs: Sliced) -> None:
        for number in range(beyond):
            ours.send(b"x")
            await theirs.have(b"x" * (FREE + number + 1))

    await asyncio.gather(*(go_on(*pair) for pair in pairs))

    reads = len(pairs) * beyond
    assert time.monotonic() - began >= (reads - 1) * loop_share._BETWEEN_READS_S


async def test_what_waits_for_its_turn_is_not_lost(connections: Connections) -> None:
    ours, theirs = await connections.make()
    sent = await send_in_pieces(ours, theirs, FREE)

    for number in range(100):
        ours.send(bytes([number]))
        sent += bytes([number])

    await asyncio.wait_for(theirs.have(sent), 10)
    assert len(theirs.parsed) < FREE + 100, "what came meanwhile was read at once"


async def test_work_that_took_less_than_thought_lets_the_next_begin() -> None:
    """Else 1 ms is charged for each until a timer looks again, and all wait in one line."""
    share = LoopShare()
    share.charge(0.5)  # so that a timer would be late by a second
    turn = asyncio.ensure_future(share.take(0.001))
    await asyncio.sleep(0)
    assert not turn.done()

    share.charge(-0.5)
    await asyncio.sleep(0)

    assert turn.done()


async def test_the_control_waits_for_the_timer() -> None:
    share = LoopShare()
    share.charge(0.05)
    turn = asyncio.ensure_future(share.take(0.001))
    await asyncio.sleep(0)
    share.charge(-0.001)
    await asyncio.sleep(0)
    assert not turn.done()

    await asyncio.wait_for(turn, 10)


def test_a_head_in_many_pieces_is_answered(start_daemon: StartDaemon) -> None:
    """Byte by byte it comes late, but whole; one beside it is not late."""
    daemon = start_daemon()
    request = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20 + b"\r\n"
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(30)
        slow.connect(str(daemon.socket))
        for byte in request:
            slow.send(bytes([byte]))
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):
            piece = slow.recv(4096)
            assert piece
            answer += piece


async def test_what_runs_in_its_turn_is_charged_also_where_it_fails() -> None:
    share, order = LoopShare(), []

    def work(said: int) -> int:
        time.sleep(0.02)
        order.append(said)
        if said == 1:
            raise ValueError("no")
        return said

    runs = [asyncio.create_task(share.run(lambda n=n: work(n))) for n in range(3)]  # type: ignore[misc]
    first, second, third = await asyncio.gather(*runs, return_exceptions=True)

    assert [0, 1, 2] == order
    assert (0, 2) == (first, third)
    assert isinstance(second, ValueError)
    assert not share.is_free


async def test_who_has_sent_little_goes_before_who_sends_much() -> None:
    """Else a request waits for a slice of each upload, however many there are."""
    share = LoopShare()
    much = await share.take(0.002, await share.take(0.002))
    share.charge(0.5)
    order: list[str] = []

    async def work(name: str, due: float) -> None:
        await share.take(0.001, due)
        order.append(name)

    turns = [("much", much), ("more", much + 0.003), ("little", 0.0), ("also little", 0.0)]
    tasks = [asyncio.ensure_future(work(*each)) for each in turns]
    await asyncio.sleep(0)
    assert [] == order
    share.charge(-10)
    await asyncio.wait_for(asyncio.gather(*tasks), 10)

    assert ["little", "also little", "much", "more"] == order


async def test_nothing_is_saved_up_while_a_connection_is_idle() -> None:
    share = LoopShare()
    due = 0.0
    for _ in range(100):
        due = await share.take(0.001, due)
    share.charge(-10)

    assert await share.take(0.001) == due, "it may be as far as the others, and no further back"


async def test_who_sends_much_is_not_kept_waiting_by_an_endless_number_who_send_little() -> None:
    share = LoopShare()
    due = await share.take(0.001) + 0.005
    share.charge(0.5)
    order: list[str] = []

    async def work(name: str, due: float) -> None:
        await share.take(0.001, due)
        order.append(name)
        if name == "little" and len(order) < 100:
            following.append(asyncio.ensure_future(work("little", 0.0)))

    following = [asyncio.ensure_future(work("much", due))]
    following += [asyncio.ensure_future(work("little", 0.0)) for _ in range(3)]
    await asyncio.sleep(0)
    share.charge(-10)
    while len(order) < 100:
        await asyncio.sleep(0)
        share.charge(0)

    assert 3 <= order.index("much") < 50
    await asyncio.gather(*following)


async def test_a_connection_takes_its_slices_as_one_that_has_sent_much(
    connections: Connections,
) -> None:
    ours, theirs = await connections.make()
    sent = bytes(theirs.most_bytes * 4)
    ours.send(sent)
    await asyncio.wait_for(theirs.have(sent), 10)

    _ours, other = await connections.make()
    assert theirs._due > other._due == 0.0
