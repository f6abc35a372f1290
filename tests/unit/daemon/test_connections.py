"""Connections of the daemon's own protocol, over a unix socket: what each may hold, and for how long."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from ringfence.api import loop_share
from ringfence.api.access.peer import PEER
from ringfence.api.bounds import Bounds
from ringfence.api.loop_share import LoopShare
from ringfence.daemon import protocol
from ringfence.daemon.sockets import listen_unix

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE_S = 60.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the uid of the peer; a WebSocket, with what it says."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while "text" in (message := await receive()):
            await send({"type": "websocket.send", "text": message["text"]})
        return
    body = b"uid %d." % scope["state"][PEER].uid
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, *pieces: bytes) -> None:
        for each in pieces:
            self._writer.write(each)
            await self._writer.drain()

    async def answer(self) -> bytes:
        """Read one answer, or what comes before the end."""
        found = b""
        while data := await self._reader.read(1 << 16):
            found += data
            if b"\r\n\r\n" in found and (found.endswith(b".") or b"content-length: 0" in found):
                break
        return found

    async def is_closed(self) -> bool:
        return b"" == await self._reader.read(1)

    def close(self) -> None:
        self._writer.close()


def serving(
    path: Path,
    scene: Callable[[Callable[[], Awaitable[Connection]], Any], Awaitable[None]],
    **bounds: Any,
) -> None:
    """Play a scene with a server of these bounds."""

    async def main() -> None:
        kind = protocol.http_protocol(Bounds(**bounds), LoopShare())
        sockets = protocol.websocket_protocol(LoopShare())
        config = uvicorn.Config(
            app, http=kind, ws=sockets, lifespan="off", log_config=None, access_log=False
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        listener = listen_unix(str(path))
        running = asyncio.ensure_future(server.serve([listener]))
        opened: list[Connection] = []

        async def connect() -> Connection:
            opened.append(Connection(*await asyncio.open_unix_connection(str(path))))
            return opened[-1]

        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(connect, kind)
        finally:
            for each in opened:
                each.close()
            server.should_exit = True
            await running

    asyncio.run(main())


def test_each_head_has_to_come_in_time(tmp_path: Path) -> None:
    async def scene(connect: Any, _kind: Any) -> None:
        silent, first, second = [await connect() for _ in range(3)]
        await first.say(REQUEST[:9])
        await second.say(REQUEST)
        assert b"200 OK" in await second.answer()
        await second.say(REQUEST[:9])
        for each in (silent, first, second):
            assert (await each.answer()).startswith(b"HTTP/1.1 408")
            assert await each.is_closed()

    serving(tmp_path / "s", scene, head_s=0.2)


def test_a_connection_that_waits_for_its_next_request_is_kept(tmp_path: Path) -> None:
    async def scene(connect: Any, _kind: Any) -> None:
        kept, silent = await connect(), await connect()
        await kept.say(REQUEST)
        assert b"200 OK" in await kept.answer()
        assert b"408" in await silent.answer()  # so long it has waited
        await kept.say(REQUEST[:9], REQUEST[9:])
        assert b"200 OK" in await kept.answer()

    serving(tmp_path / "s", scene, head_s=0.1)


@pytest.mark.parametrize("before", [0, 1, 30])
def test_a_head_is_bounded_however_many_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    # A busy machine uses a share of 2 ms up, and pieces that wait for the next are read together.
    monkeypatch.setattr(loop_share, "_BURST_S", PATIENCE_S)

    async def scene(connect: Any, _kind: Any) -> None:
        connection = await connect()
        for _ in range(before):
            await connection.say(REQUEST)
            assert b"200 OK" in await connection.answer()

        def head(size: int) -> bytes:
            return REQUEST[:-2] + b"x: ".ljust(size - len(REQUEST) - 2, b"y") + b"\r\n\r\n"

        async def say_apart(*pieces: bytes) -> None:
            for each in pieces:
                await connection.say(each)
                for _ in range(5):  # of the loop that the server runs on too: it has read it
                    await asyncio.sleep(0)

        assert 601 == len(head(601))
        await say_apart(head(601)[:600], b"\n")
        assert b"200 OK" in await connection.answer()
        # Of a later one the first piece is passed over: it ended the head before, mostly.
        await say_apart(head(1201)[:600], head(1201)[600:1200], b"\n")
        assert b"200 OK" in await connection.answer()
        await say_apart(head(1202)[:600], head(1202)[600:1201], b"\n")
        assert (await connection.answer()).startswith(b"HTTP/1.1 431")
        assert await connection.is_closed()

    serving(tmp_path / "s", scene, head_bytes=600)


def test_the_first_head_of_a_connection_is_bounded(tmp_path: Path) -> None:
    async def scene(connect: Any, _kind: Any) -> None:
        connection = await connect()
        for each in (REQUEST[:-2], b"x: 1\r", b"\n"):
            await connection.say(each)
            for _ in range(5):
                await asyncio.sleep(0)
        assert (await connection.answer()).startswith(b"HTTP/1.1 431")

    serving(tmp_path / "s", scene, head_bytes=len(REQUEST))


def test_one_connection_more_is_refused_and_those_that_end_make_room(tmp_path: Path) -> None:
    async def scene(connect: Any, _kind: Any) -> None:
        first, second = await connect(), await connect()
        for each in (first, second):
            await each.say(REQUEST)
            assert b"200 OK" in await each.answer()
        third = await connect()
        assert (await third.answer()).startswith(b"HTTP/1.1 503")
        assert await third.is_closed()
        first.close()
        while True:
            fourth = await connect()
            await fourth.say(REQUEST)
            if b"200 OK" in await fourth.answer():
                break
        await second.say(REQUEST)
        assert b"200 OK" in await second.answer()

    serving(tmp_path / "s", scene, connections=2)


@pytest.mark.parametrize(
    ("uid", "status"),
    [
        (0, b"200"),
        (None, b"200"),
        (54321, b"403"),
        (1, b"403"),
        (65534, b"403"),
        (0xFFFFFFFF, b"403"),
    ],
)
def test_a_peer_is_this_user_or_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int | None, status: bytes
) -> None:
    """Whatever the mode of the socket's file says: somebody may have changed it."""
    uid = os.geteuid() if uid is None else uid
    monkeypatch.setattr(protocol, "peer_uid", lambda _: uid)

    async def scene(connect: Any, _kind: Any) -> None:
        connection = await connect()
        await connection.say(REQUEST)
        answer = await connection.answer()
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert (status == b"200") == (b"uid %d." % uid in answer)

    serving(tmp_path / "s", scene)


def test_the_uid_of_a_peer_is_read_from_the_kernel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert os.geteuid() == protocol.peer_uid(ours)


def test_a_server_that_leaves_ends_each_connection_with_its_answer(tmp_path: Path) -> None:
    async def scene(connect: Any, kind: Any) -> None:
        connection = await connect()
        await connection.say(REQUEST)
        assert b"connection: close" not in await connection.answer()
        kind.is_leaving = True
        await connection.say(REQUEST)
        assert b"connection: close" in await connection.answer()
        assert await connection.is_closed()

    serving(tmp_path / "s", scene)


class Written:
    """A transport that keeps each piece that was written to it."""

    def __init__(self) -> None:
        self.pieces, self.is_closed = list[bytes](), False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.pieces.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


LARGE = bytes(protocol._SMALL)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ([b"head"], [b"head"]),
        ([b"head", b"body"], [b"headbody"]),
        ([b"head", b"a", b"b"], [b"heada", b"b"]),
        ([b"head", LARGE[:-1]], [b"head" + LARGE[:-1]]),
        ([b"head", LARGE, b"b"], [b"head", LARGE, b"b"]),
        ([b"head", None, b"body"], [b"head", b"body"]),
        ([b"head", None, LARGE, b"b"], [b"head", LARGE, b"b"]),
        ([], []),
    ],
)
@pytest.mark.parametrize("closes", [False, True])
def test_a_head_leaves_with_what_follows_it_at_once_and_once(
    written: list[bytes | None], sent: list[bytes], closes: bool
) -> None:
    """None: the loop has another turn. Closing sends what still waits."""

    async def main() -> list[bytes]:
        transport: Any = Written()
        one = protocol.InOnePiece(transport, asyncio.get_running_loop())
        for data in written:
            if data is None:
                await asyncio.sleep(0)
            else:
                one.write(data)
        if closes:
            one.close()
        for _ in range(2):
            await asyncio.sleep(0)
        assert closes == one.is_closing()
        found: list[bytes] = transport.pieces
        return found

    assert sent == asyncio.run(main())


def watched(kind: Any) -> list[Any]:
    """The connections of a server from now on."""
    found: list[Any] = []
    made = kind.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        found.append(self)
        made(self, transport)

    kind.connection_made = connection_made
    return found


def test_a_request_that_has_arrived_is_answered_before_an_idle_connection_ends(
    tmp_path: Path,
) -> None:
    async def scene(connect: Any, kind: Any) -> None:
        there = watched(kind)
        with_request, idle, busy = [await connect() for _ in range(3)]
        for each in (with_request, idle):
            await each.say(REQUEST)
            assert b"200 OK" in await each.answer()
        there[0].transport.pause_reading()
        await with_request.say(REQUEST)
        for each in there[:2]:
            each._close_idle()
        assert await idle.is_closed()
        assert not there[0].transport.is_closing()
        there[0].transport.resume_reading()
        assert b"200 OK" in await with_request.answer()
        del busy

    serving(tmp_path / "s", scene)


def test_a_connection_that_is_lost_has_no_clock(tmp_path: Path) -> None:
    async def scene(connect: Any, kind: Any) -> None:
        there, lost, ends = watched(kind), asyncio.Event(), kind.connection_lost

        def connection_lost(self: Any, exc: Any) -> None:
            ends(self, exc)
            lost.set()

        kind.connection_lost = connection_lost
        connection = await connect()
        await connection.say(REQUEST, REQUEST[:9])
        assert b"200 OK" in await connection.answer()
        while there[0]._head_timer is None:
            await asyncio.sleep(0)
        connection.close()
        await lost.wait()
        assert there[0]._head_timer is None

    serving(tmp_path / "s", scene)


def upgrade(*more: bytes) -> bytes:
    fields = (
        b"host: x",
        b"upgrade: websocket",
        b"connection: upgrade",
        b"sec-websocket-version: 13",
    )
    key = b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
    return b"\r\n".join((b"GET / HTTP/1.1", *fields, key, *more, b"", b""))


LONG = tuple(b"x-%d: " % number + b"y" * 980 for number in range(20))


def test_what_follows_the_head_of_a_websocket_is_no_request(tmp_path: Path) -> None:
    async def scene(connect: Any, _kind: Any) -> None:
        for fields, more in (((), b""), (LONG, b""), ((), REQUEST * 1000), (LONG, REQUEST * 1000)):
            connection = await connect()
            await connection.say(upgrade(*fields) + more)
            found = await connection._reader.readuntil(b"\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 101 ")
            await connection.say(b"\x81\x82\0\0\0\0hi")
            assert b"\x81\x02hi" == await connection._reader.readexactly(4)
            await connection.say(b"\x88\x80\0\0\0\0")

    serving(tmp_path / "s", scene)


def test_a_head_that_no_websocket_has_is_refused_and_ends_the_connection(tmp_path: Path) -> None:
    """Unanswered, each such connection would stay for ever, and they are counted."""
    wrong = (b"x: " + b"y" * 9000,), (b"a: b",) * 200, (b"content-length: 5",)

    async def scene(connect: Any, _kind: Any) -> None:
        for fields in wrong:
            connection = await connect()
            await connection.say(upgrade(*fields))
            assert (await connection.answer()).startswith(b"HTTP/1.1 400 ")
            assert await connection.is_closed()

    serving(tmp_path / "s", scene)
