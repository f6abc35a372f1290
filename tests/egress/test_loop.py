"""The event loop, its deadlines, and streams over it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ringfence.egress.io.loop import Cancelled, Deadline, Loop, both, current, pause, sleep
from ringfence.egress.io.streams import SocketStream

pytestmark = pytest.mark.anyone


@pytest.fixture(name="loop")
def fixture_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(name="pair")
def fixture_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def test_what_comes_in_pieces_is_read_in_pieces(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    async def talk() -> list[bytes]:
        stream = SocketStream(pair[0], b"first")
        pair[1].sendall(b"second")
        got = [await stream.read(3), await stream.read(100), await stream.read(100)]
        pair[1].close()
        return [*got, await stream.read(100)]

    assert [b"fir", b"st", b"second", b""] == loop.run_until_done(talk())


def test_a_full_socket_is_waited_for(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    size = 16 << 20

    async def read_all() -> int:
        stream, got = SocketStream(pair[1]), 0
        while data := await stream.read(1 << 20):
            got += len(data)
        return got

    async def write_all() -> None:
        stream = SocketStream(pair[0])
        await stream.write(bytes(size))
        stream.close()

    assert (size, None) == loop.run_until_done(both(read_all(), write_all()))


def test_an_abort_is_a_reset(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    async def abort() -> None:
        stream = SocketStream(pair[0])
        stream.abort()
        stream.abort()

    loop.run_until_done(abort())

    with pytest.raises(ConnectionResetError):
        pair[1].recv(1)


def test_small_pieces_do_not_wait(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    async def make() -> None:
        SocketStream(pair[0])

    loop.run_until_done(make())

    assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_deadline_ends_a_wait(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    async def wait() -> bytes:
        stream = SocketStream(pair[0])
        with pytest.raises(TimeoutError), Deadline(0.01):
            await stream.read(1)
        pair[1].sendall(b"x")
        with Deadline(10):
            return await stream.read(1)

    assert b"x" == loop.run_until_done(wait())


def test_the_outer_deadline_passes_through_the_inner(loop: Loop) -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError, match=r"0\.01"), Deadline(0.01), Deadline(10):
            await sleep(20)

    loop.run_until_done(wait())


def test_what_is_done_in_time_is_not_interrupted_later(loop: Loop) -> None:
    async def wait() -> None:
        with Deadline(0.005):
            while not current()._ready:  # the deadline fires, and is forgiven
                loop._timers[0].call()  # type: ignore[misc]
        await sleep(0.01)

    loop.run_until_done(wait())


def test_a_fault_of_one_ends_both(loop: Loop) -> None:
    ended = []

    async def fail() -> None:
        await sleep(0)
        raise LookupError("on purpose")

    async def wait() -> None:
        try:
            await sleep(60)
        except Cancelled:
            ended.append("cancelled")
            raise

    with pytest.raises(LookupError, match="on purpose"):
        loop.run_until_done(both(fail(), wait()))

    assert ["cancelled"] == ended


def test_ending_the_parent_ends_both(loop: Loop) -> None:
    ended = []

    async def wait(name: str) -> None:
        try:
            await sleep(60)
        finally:
            ended.append(name)

    async def main() -> None:
        with pytest.raises(TimeoutError), Deadline(0.01):
            await both(wait("one"), wait("two"))

    loop.run_until_done(main())

    assert ["one", "two"] == sorted(ended)


def test_a_cancel_counts_even_after_a_deadline(loop: Loop) -> None:
    async def wait() -> None:
        with Deadline(60) as deadline:
            deadline._expire()
            current().cancel()
            await pause()

    with pytest.raises(Cancelled):
        loop.run_until_done(wait())


def test_a_fault_in_a_handler_is_told_and_the_loop_goes_on(loop: Loop) -> None:
    told: list[BaseException] = []
    loop.on_fault = told.append
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    loop.watch(ours, lambda events: 1 // 0)  # type: ignore[arg-type]

    loop.run_until_done(sleep(0.01))

    assert [ZeroDivisionError] == [type(exc) for exc in told]
    loop.unwatch(ours)
    os.close(ours)
    os.close(theirs)


def test_timers_come_in_order(loop: Loop) -> None:
    called: list[int] = []
    for number in (3, 1, 2):
        loop.later(number / 1000, lambda n=number: called.append(n))  # type: ignore[misc]
    loop.later(0.0015, lambda: called.append(9)).cancel()

    loop.run_until_done(sleep(0.02))

    assert [1, 2, 3] == called


def test_timers_that_were_cancelled_are_forgotten(loop: Loop) -> None:
    """Every connection has a limit of minutes, and most take less than a second."""
    kept = [loop.later(600, lambda: None) for _ in range(10)]
    for _ in range(100_000):
        loop.later(600, lambda: None).cancel()

    assert len(loop._timers) < 2000
    assert all(timer in loop._timers for timer in kept)
