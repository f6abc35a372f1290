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
