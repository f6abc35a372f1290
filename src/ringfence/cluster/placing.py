"""Have a node make a sandbox: the choice of the node, other nodes after a refusal, bindings of names."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field, replace

from starlette.requests import ClientDisconnect

from ..api.access import gateways
from ..api.access.caller import USER
from ..errors import ResourceExhausted, RingfenceError
from ..model.base.ids import node_of
from .bindings import Binding, id_name
from .moved import MOVED, Moved
from .nodes import LOOK_S, NoNodes
from .placement import Need
from .proxy import note_made, send_whole
from .upstream import NotSent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..api.access.caller import Caller
    from .directory import Directory
    from .nodes import Known, Nodes
    from .proxy import Inbound, Proxy
    from .scatter import Scatter
    from .turns import Turns
    from .upstream import Headers

    Whole = tuple[int, Headers, bytes]

WAIT_S = 10.0
"""For a node whose daemon is being started again."""
AGAIN_S = 0.1
_TRIES = 3
_MOST_WAITING = 1000
"""Creates that wait at a gateway for a node; the next one is refused."""
_MADE = gateways.MADE.encode()
_FULL = (422, 503)
"""Answers to a create that another node may answer otherwise: no backend, no room."""
_ELSEWHERE = ("resource_exhausted", "backend_unavailable", "image_not_found", "unsupported", 503)
"""Codes of such answers, in our form and in E2B's."""


@dataclass
class Placing:
    """A request for a new sandbox.

    Attributes:
        names: What the request is known by: asked for again, it goes to the same node.
        near: An id whose node alone will do.
        node: The node that alone will do, where `near` names none.
        has: What a bounded caller has on each node.
        tried: Nodes that have refused it.
        refused: Answer of the last of them.
    """

    inbound: Inbound
    need: Need
    names: list[str] = field(default_factory=list)
    near: str = ""
    node: str = ""
    has: dict[str, int] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    refused: Whole | None = None


class Placer:
    """Sends requests for new sandboxes to nodes. Of one event loop."""

    def __init__(
        self, directory: Directory, nodes: Nodes, proxy: Proxy, scatter: Scatter, turns: Turns
    ) -> None:
        self._directory, self._nodes, self._proxy = directory, nodes, proxy
        self._scatter, self._turns = scatter, turns

    async def place(self, placing: Placing) -> Whole | None:
        """Have a node make what is asked for, and send its answer; the answer, too.

        Raises:
            RingfenceError: No node can.
        """
        inbound = placing.inbound
        inbound.caller = self._nodes.bounded(inbound.caller)
        placing.names = [each for each in placing.names if each]
        async with self._turns.of(inbound.caller, placing.names):
            answer = await self._placed(placing)
        note_made(inbound.scope, answer[1])
        await send_whole(inbound, *answer)
        return answer

    async def _placed(self, placing: Placing) -> Whole:
        """Ask nodes until one answers; where none has room, wait for one that Ray is asked for."""
        began, waits = time.monotonic(), 0
        try:
            while (answer := await self._ask(placing, began)) is None:
                self._nodes.waiting += 1 - waits
                waits = 1
                await self._free(placing)
                await self._pause(placing.inbound)
            return answer
        finally:
            self._nodes.waiting -= waits

    async def _ask(self, placing: Placing, began: float) -> Whole | None:
        """Ask nodes until one answers; None: none has room, and another one may come."""
        placing.has = await self._counts(placing.inbound)
        until = time.monotonic() + WAIT_S
        try:
            while (answer := await self._try(placing, until)) is None:
                pass
        except (ResourceExhausted, NoNodes):
            if self._may_wait(placing, began):
                return None
            raise
        return None if _is_full(answer) and self._may_wait(placing, began) else answer

    def _may_wait(self, placing: Placing, began: float) -> bool:
        is_over = time.monotonic() - began > self._nodes.wait_s
        return not (is_over or placing.near or placing.node or self._nodes.waiting >= _MOST_WAITING)

    async def _free(self, placing: Placing) -> None:
        """Forget what has refused: a named request would go there for ever."""
        for name in placing.names:
            if await self.bound(name) in placing.tried:
                await self._call(self._directory.remove, f"bind/{name}")
        placing.tried, placing.refused = set(), None

    async def _pause(self, inbound: Inbound) -> None:
        """Wait until another try is worth it.

        Raises:
            ClientDisconnect: The client went away.
        """
        leaving = asyncio.ensure_future(inbound.receive())
        try:
            if (await asyncio.wait((leaving,), timeout=LOOK_S))[0]:
                raise ClientDisconnect
        finally:
            leaving.cancel()

    async def _try(self, placing: Placing, until: float) -> Whole | None:
        """Ask one node; None: to be tried again, there or elsewhere."""
        fixed = self._fixed(placing)
        if (chosen := fixed or self._choose(placing)) is None:
            return placing.refused
        node = await self.bind(placing.names, chosen)
        inbound = placing.inbound
        try:
            bounded = _bounded(inbound.caller, placing.has, node.tag)
            answer = await self._proxy.begin(node.address, inbound, bounded)
        except NotSent:
            node.unreached_at = time.monotonic()
            if time.monotonic() > until:
                raise
            if node is fixed or node.tag in placing.tried or placing.names:
                await asyncio.sleep(AGAIN_S)
            else:
                placing.tried.add(node.tag)
            return None
        whole = await _answered(answer, inbound.receive)
        again = fixed is None and whole[0] in _FULL and len(placing.tried) < _TRIES - 1
        if again and _is_elsewhere(whole[2]):
            placing.refused = whole
            placing.tried.add(node.tag)
            if await self.unbind(placing.names, node):
                return None
        placing.tried.add(node.tag)
        await self._note(placing.names, node, whole[1])
        return whole

    def _fixed(self, placing: Placing) -> Known | None:
        tag = node_of(placing.near)
        found = self._nodes.find(tag) or self._nodes.heir(placing.near, tag)
        if found is None and placing.near:
            self._nodes.check_lost(placing.near, tag, placing.inbound.caller.sees)
        return found or self._nodes.find(placing.node)

    def _choose(self, placing: Placing) -> Known | None:
        """Choose a node; None: the last refusal is the answer."""
        try:
            avoid = frozenset(placing.tried | self._nodes.unreached())
            return self._nodes.choose(replace(placing.need, avoid=avoid))
        except RingfenceError:
            if placing.refused is not None:
                return None
            if placing.tried or not self._nodes.ready():
                raise
            # A node says it better: which backend lacks what, and what would help.
            return self._nodes.any()

    async def _counts(self, inbound: Inbound) -> dict[str, int]:
        """Count a bounded client's sandboxes on each node: a node knows only its own."""
        caller = inbound.caller
        if caller.max_sandboxes is None:
            return {}
        # An admin's counts are of everybody.
        state = {**inbound.scope["state"], "caller": replace(caller, scope=USER, sandbox="")}
        forms = await self._scatter.ask_each({"state": state}, "GET", b"/v1/stats")
        return {tag: form["active_sandboxes"] for tag, form in forms.items()}

    # -- bindings -------------------------------------------------------------------------------

    async def bound(self, name: str) -> str:
        """The node that a name is bound to; empty for none."""
        value = await self._call(self._directory.get, f"bind/{name}")
        return Binding.read(value).node if value else ""

    async def moved(self, sandbox_id: str) -> Moved | None:
        """Read the record of an evicted sandbox."""
        value = await self._call(self._directory.get, f"{MOVED}{sandbox_id}")
        return Moved.read(value) if value else None

    async def note_moved(self, sandbox_id: str, moved: Moved) -> None:
        """Write where an evicted sandbox was restored, for every gateway."""
        await self._call(self._directory.put, f"{MOVED}{sandbox_id}", moved.written())

    async def free(self, name: str, tag: str) -> None:
        """Forget a name that is bound to a node which has it no longer."""
        if await self.bound(name) == tag:
            await self._call(self._directory.remove, f"bind/{name}")

    async def bind(self, names: list[str], node: Known) -> Known:
        """Bind names to a node, unless they are bound to one that lives; the node they are bound to."""
        for name in names:
            key, value = f"bind/{name}", Binding(node.tag, time.time()).written()
            found = Binding.read(await self._call(self._directory.put_first, key, value))
            known = node if found.node == node.tag else self._nodes.find(found.node)
            if known is None:  # what was made there is lost
                await self._call(self._directory.put, key, value)
            else:
                node = known
        return node

    async def _note(self, names: list[str], node: Known, headers: Headers) -> None:
        """Write down what names stand for, so that they are not forgotten while it lives."""
        made = next((value for name, value in headers if name == _MADE), b"").decode("latin-1")
        for name in names if made else ():
            value = Binding(node.tag, time.time(), made).written()
            await self._call(self._directory.put, f"bind/{name}", value)

    async def unbind(self, names: list[str], node: Known) -> bool:
        """Free names that a node has refused; False where another gateway has bound them anew."""
        for name in names:
            if await self.bound(name) != node.tag:
                return False
            await self._call(self._directory.remove, f"bind/{name}")
        return True

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)


def key_name(client: str, kind: str, key: str) -> str:
    """The binding of an idempotency key; none for an empty one."""
    whole = "\n".join((kind, client, key))
    return f"key/{hashlib.sha256(whole.encode()).hexdigest()}" if key else ""


def _bounded(caller: Caller, has: dict[str, int], tag: str) -> Caller:
    """The caller with what the other nodes leave of its bound, for this one to enforce."""
    if caller.max_sandboxes is None:
        return caller
    elsewhere = sum(has.values()) - has.get(tag, 0)
    return replace(caller, max_sandboxes=max(0, caller.max_sandboxes - elsewhere))


async def _answered(answer: Any, receive: Any) -> Whole:
    """The whole answer, unless the client leaves before it comes."""

    async def whole() -> bytes:
        await answer.head()
        content: bytes = await answer.whole()
        return content

    waiting = asyncio.ensure_future(whole())
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            answer.abort()  # the node undoes what nobody waits for
            raise ClientDisconnect
        content = await waiting
    finally:
        for task in (waiting, leaving):
            task.cancel()
    return answer.status, answer.headers, content


async def read_whole(receive: Any) -> bytes:
    """The whole body, which `receive` bounds.

    Raises:
        ClientDisconnect: The client went away.
    """
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _is_full(answer: Whole) -> bool:
    """Return whether a node has refused for want of room."""
    return answer[0] == 503 and _code(answer[2]) in ("resource_exhausted", 503)


def _code(content: bytes) -> object:
    try:
        return json.loads(content).get("code")
    except (ValueError, AttributeError):
        return None


def _is_elsewhere(content: bytes) -> bool:
    """Return whether another node may do what this one has refused."""
    return _code(content) in _ELSEWHERE


__all__ = ["Placer", "Placing", "id_name", "key_name", "read_whole"]
