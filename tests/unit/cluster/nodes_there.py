"""Nodes of a cluster that answer over real sockets, and a gateway's parts in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.unit.cluster.stored import Stored

from ringfence.api.access.caller import USER, Caller
from ringfence.cluster.directory import Directory
from ringfence.cluster.nodes import Nodes, machine
from ringfence.cluster.placing import Placer
from ringfence.cluster.proxy import Inbound, Proxy
from ringfence.cluster.scatter import Scatter
from ringfence.cluster.turns import Turns
from ringfence.cluster.upstream import Pool

SECRET = b"s" * 32
Reply = tuple[int, dict[str, str], object]


@dataclass
class Asked:
    """A request as a node got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class NodeThere:
    """A node: what it was asked, and how it answers.

    Attributes:
        answer: Gives status, header fields and body, as JSON or bytes; None: it never answers.
    """

    tag: str
    path: Path
    answer: Callable[[Asked], Reply | None]
    form: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Server | None = None
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        note_task(self.serving)
        self.connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.has_left.set()
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers: dict[str, str] = {}
        for name, value in (line.split(": ", 1) for line in head[1:-2]):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Asked(method, target, headers, body)
        self.asked.append(request)
        self.is_asked.set()
        if (reply := self.answer(request)) is None:
            await reader.read()
            return False
        status, more, content = reply
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in more.items())]
        writer.write("\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data)
        await writer.drain()
        return True


def note_task(tasks: set[asyncio.Task[None]]) -> None:
    """Note the current task, for `end`."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)


async def end(server: asyncio.Server, tasks: set[asyncio.Task[None]]) -> None:
    """Close a server and its connections, and let clients notice."""
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(10):
        await asyncio.sleep(0)


def form_of(tag: str, socket: Path, **changes: Any) -> dict[str, Any]:
    """Return a node's report, of this machine."""
    form: dict[str, Any] = {
        "node": tag,
        "ray_id": f"ray-{tag}",
        "beat": "1-1",
        "socket": str(socket),
    }
    form |= {"machine": machine(), "address": "https://127.0.0.1:1", "tiers": [], "load": 0.0}
    form |= {"backends": ["native"], "free_memory_bytes": 1 << 30, "cpus": 1, "active": 0}
    form |= {"max_sandboxes": 100, "warm": {}, "images": [], "labels": {}, "is_draining": False}
    return {**form, **changes}


class Scene:
    """A store, nodes, and what a gateway has."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.store = Stored()
        self.store.config = lambda: config  # type: ignore[method-assign]
        self.there: dict[str, NodeThere] = {}
        directory = cast("Directory", self.store)
        self.nodes = Nodes(directory, lambda _: None)
        self.pool = Pool()
        self.proxy = Proxy(self.pool, SECRET)
        service = cast("Any", None)
        self.scatter = Scatter(directory, self.nodes, self.proxy, service)
        turns = Turns(directory, self.nodes)
        self.placer = Placer(directory, self.nodes, self.proxy, self.scatter, turns)
        self.sent: list[Any] = []

    def put(self, form: dict[str, Any]) -> None:
        """Have a node say how it is, and look."""
        self.store.put(f"node/{form['node']}", json.dumps(form).encode())
        self.store.living[form["ray_id"]] = ("127.0.0.1", 1)
        self.nodes.look()

    def lose(self, tag: str, *sandboxes: dict[str, Any]) -> None:
        """Let a node be gone, with its sandboxes."""
        self.store.put(f"list/{tag}", json.dumps(sandboxes).encode())
        self.store.living.pop(f"ray-{tag}")
        self.nodes.look()

    def inbound(
        self,
        method: str = "POST",
        path: bytes = b"/v1/sandboxes",
        *,
        query: bytes = b"",
        body: bytes | None = b"{}",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        caller: Caller | None = None,
    ) -> Inbound:
        """Make a request of a client that waits for its answer; what it gets is in `sent`."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "raw_path": path,
            "query_string": query,
        }
        caller = caller or Caller("ann", USER)
        scope |= {"headers": [*headers], "state": {"caller": caller, "request_id": "req-1"}}

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            self.sent.append(message)

        return Inbound(scope, receive, send, body)

    def scope(self, path: str = "/v1/x", query: bytes = b"", **state: Any) -> dict[str, Any]:
        """Make the scope of a request that all nodes answer together."""
        whose = {"caller": Caller("ann", USER), "request_id": "req-1", **state}
        return {
            "type": "http",
            "method": "GET",
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [],
            "state": whose,
        }


@asynccontextmanager
async def scene_of(place: Path, config: Any = None, **answers: Any) -> AsyncIterator[Scene]:
    """Start a node for each answer, by its tag."""
    scene = Scene(config or {})
    try:
        for tag, answer in answers.items():
            path = place / tag
            node = NodeThere(tag, path, answer, form_of(tag, path))
            node.server = await asyncio.start_unix_server(node.serve, path)
            scene.there[tag] = node
            scene.put(node.form)
        yield scene
    finally:
        scene.pool.close()
        for node in scene.there.values():
            assert node.server is not None
            await end(node.server, node.serving)
