"""Bodies, answers and WebSockets on their way through a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.nodes_there import SECRET, Asked, Reply, scene_of
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from ringfence.api.access import gateways
from ringfence.api.access.caller import USER, Caller
from ringfence.api.access.permissions import NOTHING, STREAM
from ringfence.cluster.proxy import Inbound, Proxy
from ringfence.cluster.upstream import Pool
from ringfence.errors import ServerUnreachable, TooLarge

pytestmark = pytest.mark.anyone
A = "0000000a"
PATIENCE_S = 30.0
Fields = tuple[tuple[bytes, bytes], ...]


class Client:
    """A client of the gateway: what it sends, and what it got."""

    def __init__(self, *messages: Any) -> None:
        self.messages = [*messages]
        self.more: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        message = self.messages.pop(0) if self.messages else await self.more.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def inbound(
        self, method: str, *fields: tuple[bytes, bytes], kind: str = "http", **state: Any
    ) -> Inbound:
        whose = {"caller": Caller("ann", USER, key="key-1"), "request_id": "r", **state}
        scope: dict[str, Any] = {"type": kind, "method": method, "raw_path": b"/v1/x%20y"}
        scope |= {"query_string": b"a=1", "headers": [*fields], "state": whose}
        return Inbound(scope, self.receive, self.send)

    def content(self) -> bytes:
        return b"".join(each["body"] for each in self.sent[1:])


def piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@asynccontextmanager
async def listening(
    place: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[tuple[str, Proxy]]:
    """A node that serves as it likes; its address, and the proxy."""
    tasks: list[asyncio.Task[None]] = []

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    pool = Pool()
    server = await asyncio.start_unix_server(noted, place / "s")
    try:
        yield f"unix:{place / 's'}", Proxy(pool, SECRET)
    finally:
        pool.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)


async def until_left(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        assert b"" == await reader.read()


async def pass_on(proxy: Proxy, address: str, inbound: Inbound) -> None:
    await asyncio.wait_for(proxy.pass_on(address, inbound), PATIENCE_S)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ((b"content-length", b"8"), b"halfhalf"),
        ((b"transfer-encoding", b"chunked"), b"4\r\nhalf\r\n4\r\nhalf\r\n0\r\n\r\n"),
    ],
)
async def test_a_body_goes_through_as_it_comes_and_the_connection_serves_the_next(
    field: tuple[bytes, bytes], expected: bytes, tmp_path: Path
) -> None:
    heads: list[bytes] = []
    client = Client(piece(b"half", more=True))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            found = await reader.readuntil(b"half")
            client.messages += [piece(b"", more=True), piece(b"half")]
            client.more.put_nowait(client.messages.pop(0))
            found += await reader.readexactly(len(expected) - len(found))
            assert expected == found
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with listening(tmp_path, serve) as (address, proxy):
        for _ in range(2):
            await pass_on(proxy, address, client.inbound("PUT", field))
            assert (200, b"ok") == (client.sent[0]["status"], client.content())
            client.sent.clear()
            client.messages = [piece(b"half", more=True)]
        for head in heads:
            assert head.startswith(b"PUT /v1/x%20y?a=1 HTTP/1.1\r\n")
            assert b"\r\n%b: %b\r\n" % field in head
        assert 2 == len(heads)


async def test_what_the_gateway_has_read_is_not_waited_for(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        return 200, {}, [asked.headers.get("content-length", ""), asked.body.decode()]

    async with scene_of(tmp_path, **{A: answer}) as scene:
        node = scene.nodes.find(A)
        assert node is not None
        for body, shown in ((NOTHING, b'["0", ""]'), (STREAM, b'["2", "{}"]')):
            found = SimpleNamespace(rule=SimpleNamespace(body=body))
            client = Client(*([] if body == NOTHING else [piece(b"{}")]))
            inbound = client.inbound("POST", (b"content-length", b"2"), found=found)
            await pass_on(scene.proxy, node.address, inbound)
            assert shown == client.content()


async def test_a_client_gets_what_the_node_says_of_it_and_nothing_of_the_nodes_own(
    tmp_path: Path,
) -> None:
    fields = {gateways.MADE: "sbx-1", "x-request-id": "other", "date": "today", "x-kept": "1"}
    fields |= {"connection": "x-named", "x-named": "1"}
    async with scene_of(tmp_path, **{A: lambda _asked: (201, fields, {})}) as scene:
        node = scene.nodes.find(A)
        assert node is not None
        client = Client()
        withheld = [(b"authorization", b"x"), (b"x-api-key", b"x"), (b"origin", b"https://x")]
        withheld += [(b"sec-fetch-site", b"x"), (b"expect", b"100-continue"), (b"te", b"x")]
        withheld += [(gateways.HEADER.encode(), b"forged"), (b"x-request-id", b"forged")]
        inbound = client.inbound("POST", *withheld, (b"host", b"front"), (b"accept", b"x"))
        await pass_on(scene.proxy, node.address, inbound)
        assert ["x-kept", "content-length"] == [k.decode() for k, _ in client.sent[0]["headers"]]
        assert "sbx-1" == inbound.scope["state"]["made"]
        got = scene.there[A].asked[0].headers
        assert {gateways.HEADER, "x-request-id", "host", "accept", "content-length"} == got.keys()
        assert ("r", "front", "x") == (got["x-request-id"], got["host"], got["accept"])
        target = b"/v1/x%20y?a=1"
        found = gateways.unseal(SECRET, got[gateways.HEADER], "POST", target)
        assert found is not None
        assert ("ann", "key-1") == (found.client, found.gateway_key)


async def test_half_an_answer_is_told_from_a_whole_one(tmp_path: Path) -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhalf",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        await writer.drain()

    async with listening(tmp_path, serve) as (address, proxy):
        for is_whole in (False, True):
            client = Client()
            await pass_on(proxy, address, client.inbound("POST"))
            assert b"half" == client.content()
            assert is_whole == (not client.sent[-1].get("more_body", False))


async def test_a_node_hears_that_a_client_leaves_within_its_answer(tmp_path: Path) -> None:
    has_left = asyncio.Event()

    class Leaving(Client):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if message.get("body"):
                self.more.put_nowait({"type": "http.disconnect"})

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
        await writer.drain()
        await until_left(reader)
        has_left.set()

    async with listening(tmp_path, serve) as (address, proxy):
        client = Leaving()
        await pass_on(proxy, address, client.inbound("GET"))
        await asyncio.wait_for(has_left.wait(), PATIENCE_S)
        assert not [each for each in client.sent[1:] if not each.get("more_body")]


async def test_what_is_wrong_with_a_body_is_told_and_the_node_gets_no_more(tmp_path: Path) -> None:
    has_left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"half")
        await until_left(reader)
        has_left.set()

    async with listening(tmp_path, serve) as (address, proxy):
        client = Client(piece(b"half", more=True), TooLarge("too large"))
        with pytest.raises(TooLarge):
            await pass_on(proxy, address, client.inbound("PUT", (b"content-length", b"100")))
        await asyncio.wait_for(has_left.wait(), PATIENCE_S)


async def test_a_connection_is_kept_for_others_only_once_the_whole_body_was_sent(
    tmp_path: Path,
) -> None:
    """A node that refuses an upload at once reads the next request as the rest of it."""
    connections: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(b"")
        while more := await reader.read(1 << 16):
            connections[number] += more
            if b"\r\n\r\n" in more:
                writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")

    async with listening(tmp_path, serve) as (address, proxy):
        client = Client(piece(b"half", more=True))
        await pass_on(proxy, address, client.inbound("PUT", (b"content-length", b"100")))
        for _ in range(2):
            client = Client()
            await pass_on(proxy, address, client.inbound("GET"))
            assert (413, b"no") == (client.sent[0]["status"], client.content())
        upload, others = connections
        assert (1, 0) == (upload.count(b"PUT "), upload.count(b"GET "))
        assert 2 == others.count(b"GET "), "without a body it is kept"


class TestSockets:
    @asynccontextmanager
    async def node(
        self, place: Path, serve: Callable[[ServerConnection], Awaitable[None]], **options: Any
    ) -> AsyncIterator[tuple[str, Proxy]]:
        pool = Pool()
        path = str(place / "s")
        try:
            async with unix_serve(serve, path, close_timeout=1, **options):
                yield f"unix:{path}", Proxy(pool, SECRET)
        finally:
            pool.close()

    def inbound(self, client: Client, *fields: tuple[bytes, bytes], **more: Any) -> Inbound:
        client.messages.insert(0, {"type": "websocket.connect"})
        inbound = client.inbound("", *fields, kind="websocket")
        del inbound.scope["method"]
        inbound.scope.update(more)
        return inbound

    async def through(self, proxy: Proxy, address: str, inbound: Inbound) -> None:
        await asyncio.wait_for(proxy.pass_socket(address, inbound), PATIENCE_S)

    async def test_messages_go_both_ways_and_each_closes_for_the_other(
        self, tmp_path: Path
    ) -> None:
        seen: list[Any] = []
        closes: asyncio.Queue[tuple[int | None, str | None]] = asyncio.Queue()

        async def serve(channel: ServerConnection) -> None:
            seen.append(channel.request)
            with contextlib.suppress(ConnectionClosed):
                while True:
                    message = await channel.recv()
                    await channel.send(message)
                    if message == "end":
                        await channel.close(4001, "the end")
            closes.put_nowait((channel.close_code, channel.close_reason))

        async with self.node(tmp_path, serve, subprotocols=["two"]) as (address, proxy):
            client = Client(
                {"type": "websocket.receive", "text": "hello"},
                {"type": "websocket.receive", "bytes": b"\x00\xff", "text": None},
                {"type": "websocket.receive", "bytes": b""},
                {"type": "websocket.receive", "text": "end"},
            )
            fields: Fields = (
                (b"host", b"front"),
                (b"authorization", b"x"),
                (b"x-of-client", b"1"),
            )
            fields += ((b"sec-websocket-protocol", b"one, two"), (b"sec-websocket-key", b"k"))
            inbound = self.inbound(client, *fields, subprotocols=["one", "two"])
            await self.through(proxy, address, inbound)
            accepted, *messages, closed = client.sent
            assert ("websocket.accept", "two") == (accepted["type"], accepted["subprotocol"])
            names = {name for name, _ in accepted["headers"]}
            assert not {n for n in names if n.startswith((b"sec-", b"upgrade", b"connection"))}
            told = [each.get("text", each.get("bytes")) for each in messages]
            assert ["hello", b"\x00\xff", b"", "end"] == told
            assert ("websocket.close", 4001, "the end") == tuple(closed.values())
            request = seen[0]
            assert "/v1/x%20y?a=1" == request.path
            assert ("front", "1") == (request.headers["host"], request.headers["x-of-client"])
            assert "authorization" not in request.headers
            seal = request.headers[gateways.HEADER]
            assert gateways.unseal(SECRET, seal, "WS", request.path.encode()) is not None

            await closes.get()
            for code, reason, expected in (
                (4002, "bye", (4002, "bye")),
                (1005, "", (1000, "")),
                (1006, "", (1000, "")),
            ):
                leaving = {"type": "websocket.disconnect", "code": code, "reason": reason}
                client = Client({"type": "websocket.receive", "text": "x"}, leaving)
                await self.through(proxy, address, self.inbound(client, subprotocols=["two"]))
                assert expected == await asyncio.wait_for(closes.get(), PATIENCE_S)

    async def test_a_node_that_goes_away_is_told_from_one_that_closes(self, tmp_path: Path) -> None:
        async def serve(channel: ServerConnection) -> None:
            if "gone" == await channel.recv():
                channel.transport.abort()

        async with self.node(tmp_path, serve) as (address, proxy):
            for text, expected in (("gone", 1011), ("done", 1000)):
                client = Client({"type": "websocket.receive", "text": text})
                await self.through(proxy, address, self.inbound(client))
                assert expected == client.sent[-1]["code"]
        with pytest.raises(ServerUnreachable):
            await self.through(proxy, address, self.inbound(Client()))

    async def test_a_close_without_a_code_is_an_ordinary_one(self, tmp_path: Path) -> None:
        async def serve(channel: ServerConnection) -> None:
            channel.protocol.send_close()
            channel.transport.writelines(channel.protocol.data_to_send())
            await channel.wait_closed()

        async with self.node(tmp_path, serve) as (address, proxy):
            client = Client()
            await self.through(proxy, address, self.inbound(client))
            assert ("websocket.close", 1000, "") == tuple(client.sent[-1].values())

    async def test_a_refusal_of_the_node_is_the_clients(self, tmp_path: Path) -> None:
        def refuse(channel: ServerConnection, _request: Any) -> Any:
            answer = channel.respond(HTTPStatus.FORBIDDEN, "not yours")
            answer.headers["x-request-id"] = "other"
            return answer

        async def serve(_channel: ServerConnection) -> None:
            raise AssertionError("it was refused")

        async with self.node(tmp_path, serve, process_request=refuse) as (address, proxy):
            client = Client()
            await self.through(proxy, address, self.inbound(client))
            start, body = client.sent
            assert ("websocket.http.response.start", 403) == (start["type"], start["status"])
            assert b"not yours" == body["body"]
            names = {name for name, _ in start["headers"]}
            assert b"content-type" in names
            assert not {b"x-request-id", b"content-length", b"connection"} & names
