"""The gateway: the API's own front door, with nodes behind it in place of sandboxes.

Keys, permissions, origins, bounds, the audit log and metrics are those of every server (`api.access`).
What comes through goes to the node that its ids name, to one that `placement` chooses, or to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import SimpleNamespace
from urllib.parse import quote

from ..api.service import Service
from ..errors import InvalidRequest, LifecycleError, NotFound, RingfenceError, Unsupported
from ..images.reference import Reference
from ..model.acquire import AcquireOptions, AttachRequest
from ..model.base import checks
from ..model.base.ids import node_of
from ..model.base.jsonform import json_object, loads
from ..model.create import CreateRequest
from ..model.execution.execution import ExecutionRequest
from ..model.spec import SandboxSpec
from ..model.template import TemplateRequest
from .nodes import KEYS_S
from .placement import Need
from .placing import AGAIN_S, WAIT_S, Placer, Placing, id_name, key_name, read_whole
from .proxy import Inbound, Proxy
from .reviving import bring_back, revive
from .scatter import MERGED, Scatter
from .templates import Templates
from .turns import Turns
from .upstream import NotSent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..api.access.caller import Caller
    from .directory import Directory
    from .nodes import Known, Nodes

_MIB = 1 << 20
_OWN = ("/v1/keys", "/v1/openapi.json")
_TEMPLATES, _UPLOADS = "/v1/templates", "/v1/uploads"
_EVICT = "/v1/sandboxes/{sandbox_id}/evict"
_RESUME = "/v1/sandboxes/{sandbox_id}/resume"
_IDS = ("sandbox_id", "session_id", "snapshot_id", "execution_id")

logger = logging.getLogger("ringfence.cluster")


class GatewayService(Service):
    """State of the API's own routes at a gateway: those of keys and tokens."""

    behind: Behind

    async def need(self, any_id: str, caller: Caller) -> Any:
        """See `Service.need`; only what the route of tokens asks of it."""
        sandbox_id, client_id = await self.behind.owner_of(any_id, caller)
        return SimpleNamespace(sandbox_id=sandbox_id, client_id=client_id)


class Behind:
    """Nodes behind a gateway, by id, by choice, and all of them."""

    def __init__(
        self, service: GatewayService, directory: Directory, nodes: Nodes, proxy: Proxy
    ) -> None:
        self.service, self.directory = service, directory
        self.nodes, self.proxy = nodes, proxy
        self.scatter = Scatter(directory, nodes, proxy, service)
        self.templates = Templates(directory, nodes, self.scatter)
        self.turns = Turns(directory, nodes)
        self.placer = Placer(directory, nodes, proxy, self.scatter, self.turns)
        service.behind = self

    async def by_id(self, any_id: str, inbound: Inbound) -> None:
        """Pass a request on to the node that an id names."""
        await self.pass_on(lambda: self.node_of(any_id, inbound.caller), inbound)

    async def resume(self, sandbox_id: str, inbound: Inbound) -> None:
        """Pass on what resumes a sandbox; one that was saved before its node went is made again."""
        async with self.turns.here(f"revive {sandbox_id}"):
            await revive(sandbox_id, inbound.caller, self.nodes, self.placer)
        await self.by_id(sandbox_id, inbound)

    async def pass_on(self, find: Callable[[], Awaitable[Known]], inbound: Inbound) -> None:
        """Pass a request on to a node, which is looked for again while it does not answer."""
        until = time.monotonic() + WAIT_S
        while True:
            node = await find()
            try:
                await self.proxy.pass_on(node.address, inbound)
                return
            except NotSent:
                node.unreached_at = time.monotonic()
                # Its actor starts the daemon again, or the node is lost: known in seconds.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def node_of(self, any_id: str, caller: Caller) -> Known:
        """The node that an id names; for an id that a client chose, the one it is bound to.

        An evicted sandbox is restored first.

        Raises:
            SandboxLost: That node is gone.
            RingfenceError: No node can restore it.
        """
        if self.nodes.is_moved(any_id):
            async with self.turns.here(f"revive {any_id}"):
                moved = await bring_back(any_id, caller, self.nodes, self.placer)
            if moved is not None:
                return moved
        tag = node_of(any_id)
        if (found := self.nodes.find(tag) or self.nodes.heir(any_id, tag)) is not None:
            return found
        bound = await self.placer.bound(id_name(any_id)) if any_id else ""
        if (found := self.nodes.find(bound)) is not None:  # also of a sandbox that was revived
            return found
        self.nodes.check_lost(any_id, tag, caller.sees)
        self.nodes.check_lost(any_id, bound, caller.sees)
        return self.nodes.any()  # which says that there is none

    async def by_template(self, name: str, inbound: Inbound, *, is_deletion: bool) -> None:
        """Pass a request on to the node that has a template; a deletion of it, to every node that has it."""
        caller = inbound.caller
        if is_deletion:
            for node in (await self.templates.having(name, caller))[1:]:
                target = f"/v1/templates/{quote(name, safe='')}".encode()
                with contextlib.suppress(NotFound):
                    await self.scatter.ask(node, inbound.scope, "DELETE", target)
        await self.pass_on(lambda: self.templates.at(name, caller), inbound)

    async def owner_of(self, any_id: str, caller: Caller) -> tuple[str, str]:
        """Ask the node for a live sandbox: its id, and the client whose it is.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
            LifecycleError: It has ended.
        """
        node = await self.node_of(any_id, caller)
        scope = {"state": {"caller": caller, "request_id": "owner"}}
        view = await self.scatter.ask(node, scope, "GET", f"/v1/sandboxes/{any_id}".encode())
        if view["state"] == "terminated":
            why = view["reason"] or view["state"]
            raise LifecycleError(f"sandbox {any_id} has ended: {why}", hint="create a new one")
        return view["id"], view["owner"]


class Gateway:
    """ASGI application in the place of `FastPath`: the caller is known, and the route is open to it."""

    def __init__(self, app: ASGIApp, behind: Behind) -> None:
        self._app, self._behind = app, behind
        self._special: dict[tuple[str, str], Callable[[Inbound], Any]] = {
            ("POST", "/v1/sandboxes"): self._create,
            ("POST", "/v1/sessions"): self._acquire,
            ("POST", "/v1/sessions/attach"): self._attach,
            ("POST", "/api/v1/sandbox/execute"): self._execute,
            ("POST", _TEMPLATES): self._build,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = scope["state"]["found"]
        if scope["state"]["caller"].key:
            self._behind.nodes.check_fresh()
        if found is not None and "keys" in found.rule.changes:
            send = _after(KEYS_S * 2, send)
        # Tokens are keys, and keys are the gateways' own: `GatewayService` asks the node for the sandbox.
        if found is None or "keys" in found.rule.changes or found.path in _OWN:
            await self._app(scope, receive, send)
            return
        if found.path == _EVICT:  # no gateway would find the sandbox again
            hint = "`ringfence nodes drain NODE` moves its sandboxes"
            raise Unsupported("evicting one sandbox", operation="evict", hint=hint)
        scope["route"] = found  # for the metrics
        inbound = Inbound(scope, receive, send)
        if scope["type"] == "websocket":
            await self._socket(inbound)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if special := self._special.get((method, found.path)):
            inbound.body = await read_whole(receive)
            await special(inbound)
        elif (method, found.path) in MERGED:
            await self._behind.scatter(scope, receive, send)
        elif found.path == _RESUME:
            await self._behind.resume(_part_in(scope, _IDS), inbound)
        elif found.path.startswith(f"{_TEMPLATES}/"):
            name, is_deletion = _part_in(scope, ("template",)), method == "DELETE"
            await self._behind.by_template(name, inbound, is_deletion=is_deletion)
        elif found.path.startswith((_TEMPLATES, _UPLOADS)):
            home, client = self._behind.templates.home, inbound.caller.client
            await self._behind.pass_on(lambda: home(client), inbound)
        else:
            await self._behind.by_id(_part_in(scope, _IDS), inbound)

    async def _socket(self, inbound: Inbound) -> None:
        from ..api.problems import problem

        try:
            node = await self._behind.node_of(_part_in(inbound.scope, _IDS), inbound.caller)
            await self._behind.proxy.pass_socket(node.address, inbound)
        except RingfenceError as exc:
            await problem(exc)(inbound.scope, inbound.receive, inbound.send)

    async def _refused(self, inbound: Inbound) -> None:
        """Let a node say what is wrong with a body."""
        await self._behind.proxy.pass_on(self._behind.nodes.any().address, inbound)

    async def _create(self, inbound: Inbound) -> None:
        try:
            asked = CreateRequest.from_json(loads(inbound.body or b""))
        except RingfenceError:
            await self._refused(inbound)
            return
        key = inbound.header(b"idempotency-key")
        names = [key_name(inbound.caller.client, "sandbox", key), id_name(asked.spec.id or "")]
        need = need_of(asked.spec, asked.backend)
        self._check_unused(asked.spec.id)
        near, template = asked.snapshot_id or "", asked.spec.template
        await self._place(inbound, need, names, near, template, named=asked.spec.id or "")

    async def _acquire(self, inbound: Inbound) -> None:
        try:
            form = json_object(loads(inbound.body or b""), "body")
            spec = SandboxSpec.from_json(form.get("spec", {}))
            options = AcquireOptions.from_json(form.get("options", {}))
            asked = form.get("client_id")
            client = checks.text(asked, "client_id") if asked else inbound.caller.client
        except RingfenceError:
            await self._refused(inbound)
            return
        preferred = options.preferred_id or spec.id or ""
        names = [key_name(client, "session", options.key), id_name(preferred)]
        need = need_of(spec, options.preferred_backend)
        near = options.snapshot_id or preferred
        if preferred and self._behind.nodes.is_moved(preferred) and not options.snapshot_id:
            await self._behind.by_id(preferred, inbound)  # its own sandbox, or refused there
            return
        self._check_unused(preferred)
        await self._place(inbound, need, names, near, spec.template, client, preferred)

    async def _place(
        self,
        inbound: Inbound,
        need: Need,
        names: list[str],
        near: str,
        template: str,
        client: str = "",
        named: str = "",
    ) -> None:
        """Have a node make a sandbox: the one that `near` names, or one that has its template.

        Args:
            named: The id that the client chose. One that names a node is looked for on that node alone.

        Raises:
            InvalidRequest: The id names another node than the one that can make it.
        """
        node = await self._behind.templates.source(template, inbound.caller, client) or ""
        at = self._named(named)
        if at and (node_of(near) or node or at) != at:
            hint = "leave the id out, or choose one that does not look like the server's own"
            why = "names another node than the snapshot or template"
            raise InvalidRequest(why, field="id", hint=hint)
        node = at or node
        await self._behind.placer.place(Placing(inbound, need, names, near, node))

    def _named(self, any_id: str) -> str:
        """The node that an id of a client's choice names; empty where no such node is there."""
        found = self._behind.nodes.find(node_of(any_id))
        return "" if found is None else found.tag

    def _check_unused(self, any_id: str | None) -> None:
        """Raise for the id of a lost sandbox that its owner can resume, as a server does for one that lives."""
        nodes = self._behind.nodes
        if any_id and (nodes.saved_by(any_id) is not None or nodes.is_moved(any_id)):
            raise InvalidRequest("is already used by a sandbox, live or ended", field="id")

    async def _attach(self, inbound: Inbound) -> None:
        try:
            asked = AttachRequest.from_json(loads(inbound.body or b""))
        except RingfenceError:
            await self._refused(inbound)
            return
        owner = self._behind.nodes.saved_by(asked.sandbox_id)
        if self._behind.nodes.is_moved(asked.sandbox_id):
            await self._behind.by_id(asked.sandbox_id, inbound)
            return
        if inbound.caller.sees not in (None, owner):
            self._check_unused(asked.sandbox_id)
        if owner is not None or not asked.create_if_missing:
            await self._behind.resume(asked.sandbox_id, inbound)
            return
        spec, names = asked.create_spec or SandboxSpec(), [id_name(asked.sandbox_id)]
        await self._place(inbound, need_of(spec), names, asked.sandbox_id, spec.template)

    async def _execute(self, inbound: Inbound) -> None:
        try:
            asked = ExecutionRequest.from_json(loads(inbound.body or b""))
        except RingfenceError:
            await self._refused(inbound)
            return
        need = Need(tier=asked.tier, memory_bytes=(asked.memory_mb or 0) * _MIB)
        any_id = asked.id or ""
        placing = Placing(inbound, need, [id_name(any_id)], node=self._named(any_id))
        await self._behind.placer.place(placing)

    async def _build(self, inbound: Inbound) -> None:
        try:
            asked = TemplateRequest.from_json(loads(inbound.body or b""))
        except RingfenceError:
            await self._refused(inbound)
            return
        site = self._behind.templates.site
        await self._behind.pass_on(lambda: site(asked, inbound.caller), inbound)


def _part_in(scope: Scope, names: Collection[str]) -> str:
    """Return the part of a path that its route calls so; empty for none."""
    parts: list[str] = scope["path"].split("/")
    for template, part in zip(scope["state"]["found"].path.split("/"), parts, strict=False):
        if template[1:-1] in names:
            return part
    return ""


def need_of(spec: SandboxSpec, backend: str = "") -> Need:
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


__all__ = ["Behind", "Gateway", "GatewayService", "need_of"]
