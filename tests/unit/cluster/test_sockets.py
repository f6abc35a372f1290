"""WebSockets through a gateway: what a node and a client see of each other, and how either end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cluster.nodes_there import SECRET
from websockets.asyncio.server import unix_serve
from websockets.http11 import Response

from ringfence.api.access import gateways
from ringfence.api.access.caller import USER, Caller
from ringfence.cluster import proxy as module
from ringfence.cluster.proxy import Inbound, Proxy
from ringfence.cluster.upstream import Pool

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0
TARGET = b"/v1/sandboxes/sbx-1/execs/e/attach?from=0"


class Client:
    """A client of the gateway: what it says, and what it got."""

    def __init__(self, *says: dict[str, Any], subprotocols: tuple[str, ...] = ()) -> None:
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for each in ({"type": "websocket.connect"}, *says):
            self.says.put_nowait(each)
        self.got: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        path, _, query = TARGET.partition(b"?")
        self.scope: dict[str, Any] = {"type": "websocket", "raw_path": path, "query_string": query}
        fields = [(b"host", b"web.test"), (b"authorization", b"Bearer x"), (b"cookie", b"c=1")]
        fields += [(b"sec-websocket-key", b"x"), (b"sec-websocket-version", b"13")]
        caller = Caller("ann", USER)
        self.scope |= {"headers": fields, "state": {"caller": caller, "request_id": "req-1"}}
        self.scope["subprotocols"] = [*subprotocols]

    async def send(self, message: Any) -> None:
        self.got.append(message)
        self.news.set()

    async def until(self, kind: str) -> dict[str, Any]:
        """Wait for a message of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [each for each in self.got if each["type"] == kind]):
                self.news.clear()
                await self.news.wait()
        return found[0]

    def inbound(self) -> Inbound:
        return Inbound(self.scope, self.says.get, self.send)


@asynccontextmanager
async def passing(
    place: Path, client: Client, serve: Callable[[Any], Any], **options: Any
) -> AsyncIterator[asyncio.Future[None]]:
    """Pass a client on to a node that serves it so."""
    path, pool = str(place / "node"), Pool()
    async with unix_serve(serve, path, **options):
        proxy = Proxy(pool, SECRET)
        task = asyncio.ensure_future(proxy.pass_socket(f"unix:{path}", client.inbound()))
        try:
            yield task
            await asyncio.wait_for(task, PATIENCE_S)
        finally:
            task.cancel()
            pool.close()


async def test_messages_go_both_ways_and_a_node_knows_whose_they_are(tmp_path: Path) -> None:
    requests: list[Any] = []

    async def serve(channel: Any) -> None:
        requests.append(channel.request)
        async for each in channel:
            await channel.send(each + each)

    def add(_channel: Any, _request: Any, response: Response) -> None:
        response.headers["x-request-id"] = "the node's"
        response.headers["x-kept"] = "k"

    says = (
        {"type": "websocket.receive", "text": "t"},
        {"type": "websocket.receive", "bytes": b"b"},
    )
    client = Client(*says, subprotocols=("other", "exec.v1"))
    options: dict[str, Any] = {"subprotocols": ["exec.v1"], "process_response": add}
    async with passing(tmp_path, client, serve, **options):
        accepted = await client.until("websocket.accept")
        assert "exec.v1" == accepted["subprotocol"]
        names = dict(accepted["headers"])
        assert b"k" == names[b"x-kept"]
        assert not names.keys() & {b"x-request-id", b"date", b"upgrade", b"sec-websocket-accept"}
        async with asyncio.timeout(PATIENCE_S):
            while 3 > len(client.got):
                await asyncio.sleep(0.001)
        assert ["tt", b"bb"] == [each.get("text", each.get("bytes")) for each in client.got[1:]]
        client.says.put_nowait({"type": "websocket.disconnect", "code": 1001})
    [request] = requests
    assert TARGET.decode() == request.path
    fields = request.headers
    assert ("web.test", "c=1", "req-1") == (
        fields["host"],
        fields["cookie"],
        fields["x-request-id"],
    )
    assert "authorization" not in fields
    whose = gateways.unseal(SECRET, fields[gateways.HEADER], "WS", TARGET)
    assert whose is not None
    assert "ann" == whose.client


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (4001, "bye", (4001, "bye")),
        (1005, None, (1000, "")),
        (1006, None, (1000, "")),
        (None, None, (1000, "")),
    ],
)
async def test_a_node_hears_how_its_client_ended(
    code: int | None, reason: str | None, expected: tuple[int, str], tmp_path: Path
) -> None:
    heard: list[tuple[int | None, str | None]] = []

    async def serve(channel: Any) -> None:
        await channel.wait_closed()
        heard.append((channel.close_code, channel.close_reason))

    bye = {"type": "websocket.disconnect", "code": code, "reason": reason}
    async with passing(tmp_path, Client(bye), serve):
        pass
    assert [expected] == heard


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ((4002, "over"), (4002, "over")),
        ((1000, ""), (1000, "")),
        (None, (1011, "the node went away")),
    ],
)
async def test_a_client_hears_how_its_node_ended(
    how: tuple[int, str] | None, expected: tuple[int, str], tmp_path: Path
) -> None:
    async def serve(channel: Any) -> None:
        if how is None:
            channel.transport.abort()
        else:
            await channel.close(*how)

    client = Client()
    async with passing(tmp_path, client, serve):
        closed = await client.until("websocket.close")
    assert expected == (closed["code"], closed["reason"])


async def test_a_message_may_be_long_and_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(channel: Any) -> None:
        for size in sizes:
            await channel.send(bytes(size))
        await channel.wait_closed()

    sizes, client = [2 << 20], Client()
    async with passing(tmp_path, client, serve, compression=None):
        assert sizes[0] == len((await client.until("websocket.send"))["bytes"])
        client.says.put_nowait({"type": "websocket.disconnect", "code": 1000})
    monkeypatch.setattr(module, "_MOST_MESSAGE", 1000)
    sizes, client = [1000, 1001], Client()
    async with passing(tmp_path, client, serve, compression=None):
        await client.until("websocket.close")
    assert [1000] == [len(each["bytes"]) for each in client.got if "bytes" in each]
