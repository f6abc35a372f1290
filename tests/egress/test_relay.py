"""Two sockets joined: every byte arrives, in order, and the ends come through as they were."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.egress.io.loop import Loop, both, sleep
from ringfence.egress.io.pipes import Pipes
from ringfence.egress.io.relay import Relay
from ringfence.egress.io.streams import SocketStream, prepare
from ringfence.egress.meter import Meter

pytestmark = pytest.mark.anyone


class Joined:
    """Our client's end, our server's end, and a relay between."""

    def __init__(
        self, *, total_bytes: int | None = None, bytes_per_s: int | None = None, idle_s: float = 60
    ) -> None:
        self.loop = Loop()
        self.pipes = Pipes()
        self.meter = Meter(self.loop, total_bytes=total_bytes, bytes_per_s=bytes_per_s)
        self.ended: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.client, theirs = self._connection(server)
            ours, self.server = self._connection(server)
        self.relay = Relay(
            self.loop,
            self.pipes,
            theirs,
            ours,
            meter=self.meter,
            idle_s=idle_s,
            on_end=self.ended.append,
        )

    @staticmethod
    def _connection(server: socket.socket) -> tuple[socket.socket, socket.socket]:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        for sock in (near, far):
            prepare(sock)
        return near, far

    def streams(self) -> tuple[SocketStream, SocketStream]:
        """To be called in a coroutine."""
        return SocketStream(self.client), SocketStream(self.server)

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        self.relay.cut("the test is over")
        self.pipes.close()
        self.loop.close()
        self.client.close()
        self.server.close()


@pytest.fixture(name="joined")
def fixture_joined() -> Iterator[Joined]:
    with Joined() as joined:
        yield joined


async def read_all(stream: SocketStream, most: int = 65536) -> bytes:
    data = bytearray()
    while piece := await stream.read(most):
        data += piece
    return bytes(data)


async def say(stream: SocketStream, pieces: list[bytes]) -> None:
    for piece in pieces:
        await stream.write(piece)
    await stream.end()


PIECES = st.lists(st.binary(min_size=1, max_size=3000), max_size=8)


@settings(deadline=None)
@given(PIECES, PIECES, st.integers(1, 5000))
def test_every_byte_arrives_in_order(
    asked: list[bytes], answered: list[bytes], reading: int
) -> None:
    with Joined() as joined:

        async def talk() -> tuple[bytes, bytes]:
            joined.relay.start()
            client, server = joined.streams()
            heard, _ = await both(
                both(read_all(client, reading), read_all(server, reading)),
                both(say(client, asked), say(server, answered)),
            )
            return heard

        assert (b"".join(answered), b"".join(asked)) == joined.loop.run_until_done(talk())
        joined.loop.run_until_done(sleep(0))
        assert [""] == joined.ended
        assert (sum(map(len, asked)), sum(map(len, answered))) == (
            joined.relay.out.count,
            joined.relay.back.count,
        )


def test_a_side_that_has_finished_still_hears_the_other(joined: Joined) -> None:
    async def talk() -> bytes:
        joined.relay.start()
        client, server = joined.streams()
        await say(client, [b"question"])
        assert b"question" == await read_all(server)
        await say(server, [b"answer"])
        return await read_all(client)

    assert b"answer" == joined.loop.run_until_done(talk())
    assert [""] == joined.ended


def test_the_server_may_speak_while_the_client_is_held(joined: Joined) -> None:
    async def talk() -> None:
        joined.relay.start(on_held=lambda: None)
        client, server = joined.streams()
        await client.write(b"held")
        await server.write(b"banner")
        assert b"banner" == await client.read(100)
        with pytest.raises(BlockingIOError):
            joined.server.recv(100)
        joined.relay.start_out(b"what was ")
        assert b"what was " == await server.read(9)
        assert b"held" == await server.read(100)

    joined.loop.run_until_done(talk())


def test_a_slow_reader_holds_up_the_writer_and_nothing_is_lost(joined: Joined) -> None:
    size = 32 << 20

    async def talk() -> int:
        joined.relay.start()
        client, server = joined.streams()

        async def read_slowly() -> int:
            await sleep(0.3)  # everything between is full by now
            assert joined.relay.out.count < size
            return len(await read_all(server))

        got, _ = await both(read_slowly(), say(client, [bytes(size)]))
        return got

    assert size == joined.loop.run_until_done(talk())


def test_a_reset_of_one_side_is_a_reset_of_the_other(joined: Joined) -> None:
    async def talk() -> None:
        joined.relay.start()
        client, server = joined.streams()
        server.abort()
        with pytest.raises(ConnectionResetError):
            await client.read(1)

    joined.loop.run_until_done(talk())
    assert joined.ended
    assert joined.ended[0]


def test_a_reset_after_an_end_is_noticed(joined: Joined) -> None:
    """The client has finished and waits; nobody reads there any more, but it may still go away."""

    async def talk() -> None:
        joined.relay.start()
        client, server = joined.streams()
        await client.end()
        assert b"" == await server.read(1)
        client.abort()
        while not joined.ended:
            await sleep(0.001)
        with pytest.raises(BrokenPipeError):
            await server.write(b"x")

    joined.loop.run_until_done(talk())


def test_a_cut_is_a_reset_of_both(joined: Joined) -> None:
    async def talk() -> None:
        joined.relay.start()
        client, server = joined.streams()
        joined.relay.cut("on purpose")
        joined.relay.cut("twice")
        for stream in (client, server):
            with pytest.raises(ConnectionResetError):
                await stream.read(1)

    joined.loop.run_until_done(talk())
    assert ["on purpose"] == joined.ended


def test_idle_connections_are_cut() -> None:
    with Joined(idle_s=0.1) as joined:

        async def talk() -> None:
            joined.relay.start()
            client, server = joined.streams()
            for _ in range(4):  # longer than idle_s in all, but never so long in silence
                await sleep(0.05)
                await client.write(b"x")
                await server.read(1)
            with pytest.raises(ConnectionResetError):
                await client.read(1)

        joined.loop.run_until_done(talk())
        assert ["idle for too long"] == joined.ended


def test_the_last_byte_that_is_granted_arrives_and_the_next_cuts() -> None:
    with Joined(total_bytes=1000) as joined:

        async def talk() -> bytes:
            joined.relay.start()
            client, server = joined.streams()
            await client.write(bytes(1000))
            got = b""
            while len(got) < 1000:
                got += await server.read(1000)
            await client.write(b"x")
            with pytest.raises(ConnectionResetError):
                await server.read(1)
            return got

        assert 1000 == len(joined.loop.run_until_done(talk()))
        assert ["the sandbox has used up its network bytes"] == joined.ended


def test_a_rate_is_held() -> None:
    with Joined(bytes_per_s=1_000_000) as joined:

        async def talk() -> float:
            joined.relay.start()
            client, server = joined.streams()
            started = joined.loop.now
            await both(read_all(server), say(client, [bytes(400_000)]))
            return joined.loop.now - started

        assert 0.25 < joined.loop.run_until_done(talk()) < 1.5


def test_what_was_left_in_a_pipe_is_nobody_elses() -> None:
    pipes = Pipes()
    dirty = pipes.take()
    dirty.held = os.write(dirty.write_fd, b"secret")
    pipes.give_back(dirty)

    clean = pipes.take()

    with pytest.raises(BlockingIOError):
        os.read(clean.read_fd, 1)
    pipes.give_back(clean)
    pipes.close()


def test_a_cut_in_the_middle_leaves_no_pipe_behind(joined: Joined) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def talk() -> None:
        joined.relay.start()
        client, _server = joined.streams()
        task = joined.loop.spawn(say(client, [bytes(32 << 20)]))
        task.on_done = lambda: None
        await sleep(0.1)
        assert joined.relay.out.pipe is not None or joined.relay.out.prefix
        joined.relay.cut("on purpose")
        await sleep(0.01)

    joined.loop.run_until_done(talk())
    joined.pipes.close()
    assert before - 2 == len(os.listdir("/proc/self/fd"))


# -- what is given up and given back -------------------------------------------------------------


def is_let_go(joined: Joined) -> bool:
    """True if the loop neither watches a socket of the relay nor will call it."""
    return not joined.loop._handlers and not [
        timer for timer in joined.loop._timers if timer.call is not None
    ]


@pytest.mark.parametrize("server", ["is silent", "spoke", "ended"])
def test_both_sockets_are_given_up_unless_the_server_was_heard(joined: Joined, server: str) -> None:
    joined.relay.start(on_held=lambda: None)
    if server == "spoke":
        joined.server.send(b"banner")
    elif server == "ended":
        joined.server.shutdown(socket.SHUT_WR)
    joined.loop.run_until_done(sleep(0.01))
    assert (server == "is silent") == joined.relay.release()
    assert not joined.relay.release(), "once"
    if server == "is silent":
        assert is_let_go(joined)
        joined.client.send(b"to us")
        assert b"to us" == joined.relay.client.recv(9)
        joined.relay.server.send(b"from us")
        assert b"from us" == joined.server.recv(9)
        joined.relay.client.close()
        joined.relay.server.close()
    assert [] == joined.ended


@pytest.mark.parametrize("in_order", [True, False])
def test_a_relay_that_is_over_is_let_go(joined: Joined, in_order: bool) -> None:
    joined.relay.start()
    assert not is_let_go(joined), "the control"
    if in_order:
        for sock in (joined.client, joined.server):
            sock.shutdown(socket.SHUT_WR)
        joined.loop.run_until_done(sleep(0.01))
    else:
        joined.relay.cut("on purpose")
    assert is_let_go(joined)
    assert ["" if in_order else "on purpose"] == joined.ended
    assert all(sock.fileno() == -1 for sock in (joined.relay.client, joined.relay.server))


def test_a_pipe_into_which_nothing_came_is_given_back(joined: Joined) -> None:
    direction = joined.relay.back
    for _ in range(3):
        assert 0 == direction._take(100)
        assert (None, 1) == (direction.pipe, len(joined.pipes._idle))
    joined.server.close()  # a reset
    with pytest.raises(OSError):
        direction._take(100)
    assert (None, 1) == (direction.pipe, len(joined.pipes._idle))


def test_big_pipes_are_so_many_and_count_no_more_when_they_are_closed() -> None:
    pipes = Pipes()
    for _ in range(3):
        taken = [pipes.take() for _ in range(33)]
        big = sum(pipe.is_big for pipe in taken)
        assert big == pipes._big <= 16
        for pipe in taken:
            pipe.held = os.write(pipe.write_fd, b"x")
            pipes.give_back(pipe)
        assert (0, []) == (pipes._big, pipes._idle)
    taken = [pipes.take() for _ in range(33)]
    for pipe in taken:
        pipes.give_back(pipe)
    assert 32 == len(pipes._idle)
    assert pipes.take().is_big == any(pipe.is_big for pipe in taken), "a big one first"
    for pipe in taken:
        if pipe not in pipes._idle:
            try:
                pipe.close()
            except OSError:
                continue  # the one that was too many
    pipes.close()


def test_an_end_passes_where_all_bytes_are_used_up() -> None:
    with Joined(total_bytes=4) as joined:

        async def talk() -> None:
            joined.relay.start()
            client, server = joined.streams()
            await client.write(b"four")
            assert b"four" == await server.read(9)
            await client.end()
            assert b"" == await server.read(9)
            assert [] == joined.ended
            await server.end()
            assert b"" == await client.read(9)

        joined.loop.run_until_done(talk())
        joined.loop.run_until_done(sleep(0))
        assert ([""], 4) == (joined.ended, joined.meter.moved_bytes)


def test_what_was_read_before_counts_as_moved(joined: Joined) -> None:
    joined.relay.start(on_held=lambda: None)
    joined.relay.hand_over(b"three")
    joined.relay.start_out(b"more")
    joined.loop.run_until_done(sleep(0.01))
    assert b"threemore" == joined.server.recv(99)
    assert (9, 9) == (joined.meter.moved_bytes, joined.relay.out.count)


def test_a_direction_that_may_go_on_moves_what_waits_without_a_further_event(
    joined: Joined,
) -> None:
    joined.relay.start()
    joined.loop.run_until_done(sleep(0))
    direction = joined.relay.out
    direction._waits = True
    joined.client.send(b"waits")
    joined.loop.run_until_done(sleep(0.01))
    with pytest.raises(BlockingIOError):
        joined.server.recv(9)
    direction._pump_later()
    joined.loop.run_until_done(sleep(0.01))
    assert b"waits" == joined.server.recv(9)


def test_once_all_that_was_handed_over_is_gone_the_client_is_looked_at(joined: Joined) -> None:
    size, looks = 32 << 20, list[bool]()

    def look() -> None:
        looks.append(bool(joined.relay.out.prefix))

    async def talk() -> None:
        joined.relay.start(on_held=look)
        await sleep(0.01)
        joined.relay.hand_over(bytes(size))
        assert joined.relay.out.prefix, "more than fits"
        looks.clear()
        _client, server = joined.streams()
        got = 0
        while got < size:
            got += len(await server.read(1 << 20))
        await sleep(0)
        assert False in looks

    joined.loop.run_until_done(talk())
