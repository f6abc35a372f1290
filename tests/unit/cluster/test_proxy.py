"""Clients that leave a gateway: the node is not at fault, and hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ringfence.api.access.caller import USER, Caller
from ringfence.cluster.placing import read_whole
from ringfence.cluster.proxy import Inbound, Proxy
from ringfence.cluster.upstream import Pool
from ringfence.errors import ServerUnreachable

pytestmark = pytest.mark.anyone

_BEGUN = {"type": "http.request", "body": b"half", "more_body": True}
_LEFT = {"type": "http.disconnect"}


def _receive_of(*messages: dict[str, Any]) -> Any:
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    return receive


async def _pass_on(place: Path, receive: Any, *, node_leaves: bool) -> None:
    """Pass an upload on to a node that reads its head, and then hangs up or waits for the end."""
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"half")
        if not node_leaves:
            assert b"" == await reader.read()
        heard.set()
        writer.close()

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody is there for {message}")

    scope = {
        "type": "http",
        "method": "PUT",
        "query_string": b"",
        "raw_path": b"/v1/files",
        "headers": [(b"content-length", b"100")],
        "state": {"caller": Caller("ann", USER)},
    }
    server = await asyncio.start_unix_server(serve, place / "s")
    async with server:
        try:
            proxy = Proxy(Pool(), b"secret")
            await proxy.pass_on(f"unix:{place / 's'}", Inbound(scope, receive, send))
        finally:
            await asyncio.wait_for(heard.wait(), 30)


async def test_a_client_that_leaves_within_an_upload_is_told_from_a_lost_node(
    tmp_path: Path,
) -> None:
    with pytest.raises(ClientDisconnect):
        await _pass_on(tmp_path, _receive_of(_BEGUN, _LEFT), node_leaves=False)

    (tmp_path / "s").unlink(missing_ok=True)
    with pytest.raises(ServerUnreachable, match="the node went away"):  # the control
        await _pass_on(tmp_path, _receive_of(_BEGUN), node_leaves=True)


async def test_a_body_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(ClientDisconnect):
        await read_whole(_receive_of(_BEGUN, _LEFT))
    whole = {**_BEGUN, "more_body": False}
    assert b"halfhalf" == await read_whole(_receive_of(_BEGUN, whole))
