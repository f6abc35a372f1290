"""The gateway: the API's own front door, with nodes behind it in place of sandboxes.

Keys, permissions, origins, bounds, the audit log and metrics are those of every server (`api.access`).
What comes through goes to the node that its ids name, to one that `placement` chooses, or to all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

from ..api.access.caller import USER
from ..api.service import Service
from ..errors import (
    LifecycleError,
    RingfenceError,
    ServerUnreachable,
)
from ..images.reference import Reference
from ..model.acquire import AcquireOptions, AttachRequest
from ..model.base.ids import node_of
from ..model.base.jsonform import json_object, loads
from ..model.create import CreateRequest
from ..model.execution.execution import ExecutionRequest
from ..model.spec import SandboxSpec
from .nodes import KEYS_S
from .placement import Need
from .proxy import Proxy, note_made, returned
from .scatter import MERGED, Scatter
from .upstream import NotSent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..api.access.caller import Caller
    from .directory import Directory
    from .nodes import Known, Nodes

_TRIES = 3
_WAIT_S = 10.0
"""For a node whose daemon is being started again."""
_AGAIN_S = 0.1
_MIB = 1 << 20
_OWN = ("/v1/keys", "/v1/openapi.json")
_FULL = (422, 503)
"""Answers to a create that another node may answer otherwise: no backend, no room."""
_IDS = ("sandbox_id", "session_id", "snapshot_id", "execution_id")

logger = logging.getLogger("ringfence.cluster")


class GatewayService(Service):
    """State of the API's own routes at a gateway: those of keys and tokens."""

    gateway: Gateway

    async def need(self, any_id: str, caller: Caller) -> Any:
        """See `Service.need`; only what the route of tokens asks of it."""
        sandbox_id, client_id = await self.gateway.owner_of(any_id, caller)
        return SimpleNamespace(sandbox_id=sandbox_id, client_id=client_id)


class Gateway:
    """ASGI application in the place of `FastPath`: the caller is known, and the route is open to it."""

    def __init__(
        self,
        app: ASGIApp,
        service: GatewayService,
        directory: Directory,
        nodes: Nodes,
        proxy: Proxy,
    ) -> None:
        self._app = app
        self._directory, self._nodes, self._proxy = directory, nodes, proxy
        self._scatter = Scatter(nodes, proxy, service)
        service.gateway = self
        self._locks: dict[str, tuple[asyncio.Lock, list[int]]] = {}
        self._special: dict[tuple[str, str], Callable[..., Any]] = {
            ("POST", "/v1/sandboxes"): self._create,
            ("POST", "/v1/sessions"): self._acquire,
            ("POST", "/v1/sessions/attach"): self._attach,
            ("POST", "/api/v1/sandbox/execute"): self._execute,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request or WebSocket."""
        found = scope["state"]["found"]
        if scope["state"]["caller"].key:
            self._nodes.check_fresh()
        if found is not None and "keys" in found.rule.changes:
            send = _after(KEYS_S * 2, send)
        # Tokens are keys, and keys are the gateways' own: `GatewayService` asks the node for the sandbox.
        if found is None or "keys" in found.rule.changes or found.path in _OWN:
            await self._app(scope, receive, send)
            return
        scope["route"] = found  # for the metrics
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if special := self._special.get((method, found.path)):
            await special(scope, receive, send)
        elif (method, found.path) in MERGED:
            await self._scatter(scope, receive, send)
        else:
            await self._by_id(scope, receive, send)

    # -- a node by an id ------------------------------------------------------------------------

    async def _by_id(self, scope: Scope, receive: Receive, send: Send) -> None:
        any_id = _id_in(scope)
        until = time.monotonic() + _WAIT_S
        while True:
            node = await self._node_of(any_id, scope["state"]["caller"])
            try:
                await self._proxy.pass_on(node.address, scope, receive, send)
                return
            except NotSent:
                # Its actor starts the daemon again, or the node is lost: known in seconds.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ..api.problems import problem

        try:
            node = await self._node_of(_id_in(scope), scope["state"]["caller"])
            await self._proxy.pass_socket(node.address, scope, receive, send)
        except RingfenceError as exc:
            await problem(exc)(scope, receive, send)

    async def _node_of(self, any_id: str, caller: Caller) -> Known:
        """The node that an id names; for an id that a client chose, the one it is bound to.

        Raises:
            SandboxLost: That node is gone.
        """
        tag = node_of(any_id)
        if (found := self._nodes.find(tag)) is not None:
            return found
        self._nodes.check_lost(any_id, tag, caller.sees)
        bound = await self._bound(_id_key(any_id)) if any_id else ""
        if bound:
            if (found := self._nodes.find(bound)) is not None:
                return found
            self._nodes.check_lost(any_id, bound, caller.sees)
        return self._nodes.any()  # which says that there is none

    # -- a node by choice -----------------------------------------------------------------------

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole(receive)
        try:
            asked = CreateRequest.from_json(loads(body))
        except RingfenceError:
            await self._proxy.pass_on(self._nodes.any().address, scope, receive, send, body)
            return
        names = [_key(scope, "sandbox", _header(scope, b"idempotency-key"))]
        if asked.spec.id is not None:
            names.append(_id_key(asked.spec.id))
        need = _need(asked.spec, asked.backend)
        await self._place(scope, receive, send, body, need, names, asked.snapshot_id or "")

    async def _acquire(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole(receive)
        try:
            form = json_object(loads(body), "body")
            spec = SandboxSpec.from_json(form.get("spec", {}))
            options = AcquireOptions.from_json(form.get("options", {}))
            client = form.get("client_id")
        except RingfenceError:
            await self._proxy.pass_on(self._nodes.any().address, scope, receive, send, body)
            return
        names = [_key(scope, "session", options.key, client)]
        preferred = options.preferred_id or spec.id or ""
        if preferred:
            names.append(_id_key(preferred))
        need = _need(spec, options.preferred_backend)
        at = options.snapshot_id or preferred
        await self._place(scope, receive, send, body, need, names, at)

    async def _attach(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole(receive)
        try:
            asked = AttachRequest.from_json(loads(body))
        except RingfenceError:
            await self._proxy.pass_on(self._nodes.any().address, scope, receive, send, body)
            return
        if not asked.create_if_missing:
            node = await self._node_of(asked.sandbox_id, scope["state"]["caller"])
            await self._proxy.pass_on(node.address, scope, receive, send, body)
            return
        need = _need(asked.create_spec or SandboxSpec(), "")
        names = [_id_key(asked.sandbox_id)]
        await self._place(scope, receive, send, body, need, names, asked.sandbox_id)

    async def _execute(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole(receive)
        try:
            asked = ExecutionRequest.from_json(loads(body))
        except RingfenceError:
            await self._proxy.pass_on(self._nodes.any().address, scope, receive, send, body)
            return
        need = Need(tier=asked.tier, memory_bytes=(asked.memory_mb or 0) * _MIB)
        names = [_id_key(asked.id or "")]
        await self._place(scope, receive, send, body, need, names, "")

    async def _place(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
        need: Need,
        names: list[str],
        near: str,
    ) -> None:
        """Have a node make what is asked for.

        Args:
            names: What the request is known by: asked for again, it goes to the same node.
            near: An id whose node alone will do.
        """
        caller: Caller = self._nodes.bounded(scope["state"]["caller"])
        names = [each for each in names if each]
        lock_of = names[0] if names else ""
        if caller.max_sandboxes is not None:
            lock_of = f"owner {caller.client}"
        lock = _Turn(self._locks, lock_of)
        async with lock:
            has = await self._counts(caller, scope)
            await self._try(scope, receive, send, body, need, names, near, has, caller)

    async def _try(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
        need: Need,
        names: list[str],
        near: str,
        has: dict[str, int],
        caller: Caller,
    ) -> None:
        tried: set[str] = set()
        refused: tuple[int, Any, bytes] | None = None
        until = time.monotonic() + _WAIT_S
        while True:
            fixed = self._nodes.find(node_of(near)) if near else None
            if near and fixed is None:
                self._nodes.check_lost(near, node_of(near), caller.sees)
            if fixed is None:
                try:
                    fixed_or_chosen = self._nodes.choose(replace(need, avoid=frozenset(tried)))
                except RingfenceError:
                    if refused is None:
                        if tried or not self._nodes.ready():
                            raise
                        # A node says it better: which backend lacks what, and what would help.
                        fixed_or_chosen = self._nodes.any()
                    else:
                        await _send_whole(send, *refused)
                        return
            else:
                fixed_or_chosen = fixed
            node = await self._bind(names, fixed_or_chosen)
            try:
                bounded = _bounded(caller, has, node.tag)
                answer = await self._proxy.begin(node.address, scope, body, bounded)
            except NotSent:
                if time.monotonic() > until:
                    raise
                if node.tag in (fixed.tag if fixed else "", *tried) or names:
                    await asyncio.sleep(_AGAIN_S)
                else:
                    tried.add(node.tag)
                continue
            status, headers, content = await _answered(answer, receive)
            again = status in _FULL and fixed is None and len(tried) < _TRIES - 1
            if again and _is_elsewhere(content):
                refused = status, headers, content
                tried.add(node.tag)
                if await self._unbind(names, node):
                    continue
            note_made(scope, headers)
            await _send_whole(send, status, headers, content)
            return

    async def _counts(self, caller: Caller, scope: Scope) -> dict[str, int]:
        """Count a bounded client's sandboxes on each node: a node knows only its own."""
        if caller.max_sandboxes is None:
            return {}
        # An admin's counts are of everybody.
        state = {**scope["state"], "caller": replace(caller, scope=USER, sandbox="")}
        forms = await self._scatter.ask_each({"state": state}, "GET", b"/v1/stats")
        return {tag: form["active_sandboxes"] for tag, form in forms.items()}

    # -- bindings -------------------------------------------------------------------------------

    async def _bound(self, name: str) -> str:
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(None, self._directory.get, f"bind/{name}")
        return (value or b"").decode().partition(" ")[0]

    async def _bind(self, names: list[str], node: Known) -> Known:
        """Bind names to a node, unless they are bound to one that lives; the node they are bound to."""
        loop = asyncio.get_running_loop()
        for name in names:
            key = f"bind/{name}"
            value = f"{node.tag} {time.time():.0f}".encode()
            found = await loop.run_in_executor(None, self._directory.put_first, key, value)
            tag = found.decode().partition(" ")[0]
            if tag == node.tag:
                continue
            known = self._nodes.find(tag)
            if known is None:  # what was made there is lost
                await loop.run_in_executor(None, self._directory.put, key, value)
            else:
                node = known
        return node

    async def _unbind(self, names: list[str], node: Known) -> bool:
        """Free names that a node has refused; False where another gateway has bound them anew."""
        loop = asyncio.get_running_loop()
        for name in names:
            if await self._bound(name) != node.tag:
                return False
            await loop.run_in_executor(None, self._directory.remove, f"bind/{name}")
        return True

    async def owner_of(self, any_id: str, caller: Caller) -> tuple[str, str]:
        """Ask the node for a live sandbox: its id, and the client whose it is.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
            LifecycleError: It has ended.
        """
        node = await self._node_of(any_id, caller)
        scope = {"state": {"caller": caller, "request_id": "owner"}}
        view = await self._scatter.ask(node, scope, "GET", f"/v1/sandboxes/{any_id}".encode())
        if view["state"] == "terminated":
            why = view["reason"] or view["state"]
            raise LifecycleError(f"sandbox {any_id} has ended: {why}", hint="create a new one")
        return view["id"], view["owner"]


class _Turn:
    """Requests of one name take turns; without a name, none waits."""

    def __init__(self, locks: dict[str, tuple[asyncio.Lock, list[int]]], name: str) -> None:
        self._locks, self._name = locks, name

    async def __aenter__(self) -> None:
        if self._name:
            lock, users = self._locks.setdefault(self._name, (asyncio.Lock(), [0]))
            users[0] += 1
            try:
                await lock.acquire()
            except BaseException:
                self._leave(users)
                raise

    async def __aexit__(self, *_: object) -> None:
        if self._name:
            lock, users = self._locks[self._name]
            lock.release()
            self._leave(users)

    def _leave(self, users: list[int]) -> None:
        users[0] -= 1
        if not users[0]:
            del self._locks[self._name]


def _bounded(caller: Caller, has: dict[str, int], tag: str) -> Caller:
    """The caller with what the other nodes leave of its bound, for this one to enforce."""
    if caller.max_sandboxes is None:
        return caller
    elsewhere = sum(has.values()) - has.get(tag, 0)
    return replace(caller, max_sandboxes=max(0, caller.max_sandboxes - elsewhere))


def _id_in(scope: Scope) -> str:
    """The id in the path that names the node."""
    parts: list[str] = scope["path"].split("/")
    for template, part in zip(scope["state"]["found"].path.split("/"), parts, strict=False):
        if template[1:-1] in _IDS:
            return part
    return ""


def _id_key(any_id: str) -> str:
    """The binding of an id that a client chose; none for one that names its node."""
    return f"id/{hashlib.sha256(any_id.encode()).hexdigest()}" if any_id else ""


def _key(scope: Scope, kind: str, key: str, client: str | None = None) -> str:
    if not key:
        return ""
    whole = "\n".join((kind, client or scope["state"]["caller"].client, key))
    return f"key/{hashlib.sha256(whole.encode()).hexdigest()}"


def _header(scope: Scope, name: bytes) -> str:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found.decode("latin-1")


def _need(spec: SandboxSpec, backend: str) -> Need:
    return Need(
        tier=spec.tier,
        backend=backend,
        image=_reference(spec.image),
        # Not a hard need: only a node knows all names of an image. One that has it not is asked last.
        pulls_image=True,
        memory_bytes=spec.limits.memory_bytes or 0,
        pool_key="default" if spec.template == "default" and spec.image is None else "",
    )


def _reference(image: str | None) -> str | None:
    """The full form of an image's name, as nodes list it."""
    try:
        return image and str(Reference.parse(image))
    except RingfenceError:
        return image


def _after(seconds: float, send: Send) -> Send:
    """Answer later: what is said of a key must hold at every gateway by then."""

    async def later(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            await asyncio.sleep(seconds)
        await send(message)

    return later


async def _whole(receive: Receive) -> bytes:
    """The whole body; the middleware bounds it."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ServerUnreachable("the client went away")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _answered(answer: Any, receive: Receive) -> tuple[int, Any, bytes]:
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
        content = await waiting
    finally:
        for task in (waiting, leaving):
            task.cancel()
    return answer.status, answer.headers, content


async def _send_whole(send: Send, status: int, headers: Any, content: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": returned(headers)})
    await send({"type": "http.response.body", "body": content})


def _is_elsewhere(content: bytes) -> bool:
    """Return whether another node may do what this one has refused."""
    try:
        code = json.loads(content).get("code")
    except (ValueError, AttributeError):
        return False
    return code in ("resource_exhausted", "backend_unavailable", "image_not_found", "unsupported")
