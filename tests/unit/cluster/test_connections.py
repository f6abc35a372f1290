"""Connections of a gateway to a node: which are kept, which are not, and what becomes of a broken answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.cluster.nodes_there import end, note_task

from ringfence.cluster import upstream
from ringfence.cluster.upstream import HOP_BY_HOP, Answer, NotSent, Pool, host_of, without
from ringfence.errors import InvalidRequest, ServerUnreachable

pytestmark = pytest.mark.anyone
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
PATIENCE_S = 30.0


class Far:
    """A node that answers each request of a connection with the next of its answers, then hangs up."""

    def __init__(self, path: Path, answers: Callable[[int], list[bytes]]) -> None:
        self.address = f"unix:{path}"
        self.answers = answers
        self.heard: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Queue[int]()
        self.hangs_up = True
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        note_task(self.serving)
        self.connections += 1
        mine = self.connections
        try:
            for answer in self.answers(mine):
                self.heard.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
                await writer.drain()
            if not self.hangs_up:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.left.put_nowait(mine)


@asynccontextmanager
async def far_of(
    place: Path, answers: Callable[[int], list[bytes]]
) -> AsyncIterator[tuple[Far, Pool]]:
    far, pool = Far(place / "s", answers), Pool()
    server = await asyncio.start_unix_server(far.serve, place / "s")
    try:
        yield far, pool
    finally:
        pool.close()
        await end(server, far.serving)


async def get(pool: Pool, far: Far, method: bytes = b"GET", body: bytes | None = b"") -> Answer:
    exchange = pool.exchange(far.address, method, b"/v1/x", [(b"host", b"h")], body)
    return await asyncio.wait_for(exchange, PATIENCE_S)


def idle(pool: Pool, far: Far) -> int:
    return len(pool._idle.get(far.address, ()))


async def test_a_connection_serves_one_request_after_the_other(tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [OK] * 3) as (far, pool):
        for i in range(3):
            answer = await get(pool, far)
            assert (200, b"ok", bool(i)) == (answer.status, await answer.whole(), answer.is_reused)
        assert 1 == far.connections
        assert b"GET /v1/x HTTP/1.1\r\nhost: h\r\n\r\n" == far.heard[0], "no body, no length"


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [
        (b"POST", b"", True),
        (b"GET", b"", False),
        (b"HEAD", b"", False),
        (b"DELETE", b"", False),
        (b"GET", b"x", True),
        (b"PUT", b"abc", True),
    ],
)
async def test_a_length_is_sent_where_a_body_may_be(
    method: bytes, body: bytes, length: bool, tmp_path: Path
) -> None:
    async with far_of(tmp_path, lambda _: [OK]) as (far, pool):
        await get(pool, far, method, body)
        assert length == (b"content-length: %d\r\n" % len(body) in far.heard[0])


@pytest.mark.parametrize("age_s", [29.0, 31.0])
async def test_one_that_was_idle_for_long_is_not_used_again(age_s: float, tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [OK, OK]) as (far, pool):
        far.hangs_up = False
        await (await get(pool, far)).whole()
        [(since, connection)] = pool._idle[far.address]
        pool._idle[far.address][0] = (since - age_s, connection)

        answer = await get(pool, far)

        assert (age_s < 30) == answer.is_reused
        assert (age_s >= 30) == connection.transport.is_closing()


async def test_so_many_are_kept_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "_MOST_IDLE", 2)
    async with far_of(tmp_path, lambda _: [OK]) as (far, pool):
        far.hangs_up = False
        answers = [await get(pool, far) for _ in range(1)]
        await answers[0].whole()
        pool._idle.clear()
        made = [await pool.open(far.address, b"GET", b"/", [], b"", is_new=True) for _ in range(3)]
        for each in made:
            await each.head()
            await each.whole()
        assert 2 == idle(pool, far)
        assert [True, False, False] == [each.connection.transport.is_closing() for each in made]
        pool.forget(far.address)
        assert all(each.connection.transport.is_closing() for each in made)
        answers[0].connection.transport.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nok",
    ],
)
async def test_one_that_the_node_closes_is_not_kept(answer: bytes, tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [answer]) as (far, pool):
        found = await get(pool, far)
        assert b"ok" == await asyncio.wait_for(found.whole(), PATIENCE_S)
        assert 0 == idle(pool, far)
        assert found.connection.transport.is_closing()


async def test_the_answer_to_head_has_no_body_and_ends_the_connection(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    async with far_of(tmp_path, lambda _: [head]) as (far, pool):
        far.hangs_up = False
        answer = await get(pool, far, b"HEAD")
        assert b"" == await asyncio.wait_for(answer.whole(), PATIENCE_S)
        assert 0 == idle(pool, far)


async def test_an_interim_answer_is_not_the_answer(tmp_path: Path) -> None:
    interim = b"HTTP/1.1 100 Continue\r\nx-interim: 1\r\n\r\n"
    async with far_of(tmp_path, lambda _: [interim + OK]) as (far, pool):
        answer = await get(pool, far)
        assert (200, b"ok") == (answer.status, await answer.whole())
        assert [(b"content-length", b"2")] == answer.headers


@pytest.mark.parametrize(
    ("method", "body", "is_asked_again"),
    [
        (b"GET", b"", True),
        (b"HEAD", b"", True),
        (b"POST", b"", False),
        (b"DELETE", b"", False),
        (b"PUT", b"", False),
    ],
)
async def test_only_what_reads_is_asked_again_on_a_connection_that_was_closed(
    method: bytes, body: bytes, is_asked_again: bool, tmp_path: Path
) -> None:
    """The node may have done what it was asked, and have closed before it answered."""
    async with far_of(tmp_path, lambda n: [OK, b""] if n == 1 else [OK]) as (far, pool):
        await (await get(pool, far)).whole()
        if is_asked_again:
            answer = await get(pool, far, method, body)
            assert 200 == answer.status
            assert not answer.is_reused
        else:
            with pytest.raises(ServerUnreachable, match="went away"):
                await get(pool, far, method, body)
        assert (2 if is_asked_again else 1) == far.connections
        assert (3 if is_asked_again else 2) == len(far.heard)


async def test_what_is_lost_on_a_new_connection_is_not_asked_again(tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [b""]) as (far, pool):
        with pytest.raises(ServerUnreachable, match="went away"):
            await get(pool, far)
        assert 1 == far.connections


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
async def test_half_an_answer_is_no_whole_one(answer: bytes, tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [answer]) as (far, pool):
        found = await get(pool, far)
        with pytest.raises(ServerUnreachable, match="went away"):
            await asyncio.wait_for(found.whole(), PATIENCE_S)
        assert 0 == idle(pool, far)


async def test_another_protocol_is_told(tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [b"SSH-2.0-x\r\n\r\n"]) as (far, pool):
        with pytest.raises(ServerUnreachable, match="another protocol"):
            await get(pool, far)


async def test_a_connection_that_says_something_unasked_is_given_up(tmp_path: Path) -> None:
    """The next request would take it for its answer."""
    speaks = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await speaks.wait()
        writer.write(OK)
        await reader.read()
        writer.close()

    pool, tasks = Pool(), set[asyncio.Task[None]]()

    async def serve_noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        note_task(tasks)
        await serve(reader, writer)

    server = await asyncio.start_unix_server(serve_noted, tmp_path / "s")
    try:
        address = f"unix:{tmp_path / 's'}"
        answer = await pool.exchange(address, b"GET", b"/", [], b"")
        await answer.whole()
        speaks.set()
        async with asyncio.timeout(PATIENCE_S):
            while not answer.connection.transport.is_closing():
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        assert pool._take(address) is None
    finally:
        pool.close()
        await end(server, tasks)


async def test_a_whole_answer_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_MOST_WHOLE", 4)
    five = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole"
    four = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhole"
    async with far_of(tmp_path, lambda n: [four if n == 1 else five]) as (far, pool):
        assert b"hole" == await (await get(pool, far)).whole()
        pool.forget(far.address)
        with pytest.raises(ServerUnreachable, match="too long"):
            await (await get(pool, far)).whole()


async def test_a_long_answer_is_read_only_as_fast_as_it_is_taken(tmp_path: Path) -> None:
    size = 8 << 20
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with far_of(tmp_path, lambda _: [head + bytes(size)]) as (far, pool):
        answer = await get(pool, far)
        while not answer.connection._is_paused:
            await asyncio.sleep(0)
        assert answer._unread < 2 << 20
        assert 0 == idle(pool, far)

        assert size == len(await asyncio.wait_for(answer.whole(), PATIENCE_S))


async def test_giving_up_tells_the_node(tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [b""]) as (far, pool):
        far.hangs_up = False
        task = asyncio.ensure_future(get(pool, far))
        while not far.heard:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 1 == await asyncio.wait_for(far.left.get(), PATIENCE_S)


async def test_a_connection_is_kept_once_the_whole_body_was_sent(tmp_path: Path) -> None:
    """The answer may come before: another request would be read as the rest of the body."""
    async with far_of(tmp_path, lambda _: [OK, OK]) as (far, pool):
        far.hangs_up = False
        answer = await pool.open(far.address, b"PUT", b"/", [(b"content-length", b"9")], None)
        answer.connection.hold_open()
        assert b"ok" == await asyncio.wait_for(answer.whole(), PATIENCE_S)
        assert 0 == idle(pool, far)
        answer.connection.sent()
        assert 1 == idle(pool, far)


@pytest.mark.parametrize("target", [b"/a b", b"x", b"/\r\nx: y", b"", b"/\x7f", b"/a\0"])
async def test_what_is_no_target_is_not_sent(target: bytes, tmp_path: Path) -> None:
    async with far_of(tmp_path, lambda _: [OK]) as (far, pool):
        with pytest.raises(InvalidRequest):
            await pool.open(far.address, b"GET", target, [], b"")
        assert 0 == far.connections
        answer = await pool.exchange(far.address, b"GET", b"/a%20b?\xc3\xa9", [], b"")
        assert b"ok" == await answer.whole()


async def test_where_nothing_listens_nothing_was_sent(tmp_path: Path) -> None:
    pool = Pool()
    for address in (f"unix:{tmp_path}/none", "https://127.0.0.1:1"):
        with pytest.raises(NotSent):
            await pool.open(address, b"GET", b"/", [], b"")


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_fields_of_one_connection_are_not_passed_on(name: bytes) -> None:
    given = [(name, b"1"), (b"x-a", b"2"), (b"x-b", b"3")]
    assert given[1:] == without(given, HOP_BY_HOP)
    assert given == without(given, frozenset())


def test_fields_that_the_connection_names_are_not_passed_on() -> None:
    given = [
        (b"connection", b"close, X-A"),
        (b"x-a", b"2"),
        (b"connection", b"x-c"),
        (b"x-c", b"4"),
    ]
    assert [(b"x-b", b"3")] == without([*given, (b"x-b", b"3")], HOP_BY_HOP)


def test_addresses_are_split_at_the_last_colon() -> None:
    assert ("127.0.0.1", 8) == host_of("https://127.0.0.1:8")
    assert ("::1", 8) == host_of("https://[::1]:8")
