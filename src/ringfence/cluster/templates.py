"""Templates behind a gateway: the node where a client builds, and the nodes that have what it built.

A client's builds and uploads go to one node, its home: layers, quotas and names are there, and files
that were uploaded need no template to be found. A home that drains or is lost is replaced. A build
over a template that another node alone has goes there, and so do the files that it copies.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from dataclasses import replace

from ..api.access.caller import USER
from ..api.routes.templates import TAR
from ..errors import NotFound, SandboxLost, error_from_json
from ..model.base.ids import node_of
from .bindings import HOME, Binding
from .placement import rendezvous

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..api.access.caller import Caller
    from ..model.template import TemplateRequest
    from .directory import Directory
    from .nodes import Known, Nodes
    from .scatter import Scatter

_DEFAULT = "default"
_NAME = re.compile("[a-z0-9_][a-z0-9_.-]{0,62}")


class Templates:
    """Finds nodes for requests about templates. Of one event loop."""

    def __init__(self, directory: Directory, nodes: Nodes, scatter: Scatter) -> None:
        self._directory, self._nodes, self._scatter = directory, nodes, scatter

    async def home(self, client: str) -> Known:
        """The node where a client uploads and builds, chosen if it has none that takes new builds.

        Raises:
            ServerUnreachable: No node answers.
        """
        key = _home_key(client)
        call = asyncio.get_running_loop().run_in_executor
        known = await self._home_of(client)
        found = self._nodes.find(known)
        if found is not None and not found.form["is_draining"]:
            return found
        ready = {each.tag: each for each in self._nodes.ready() if each.form["backends"]}
        usable = [tag for tag, each in ready.items() if not each.form["is_draining"]]
        # Every gateway finds the same one.
        order = rendezvous(client, usable or ready)
        if not order:
            return found or self._nodes.any()
        value = Binding(order[0], time.time()).written()
        if known:
            await call(None, self._directory.put, key, value)
            return ready[order[0]]
        # One that sees other nodes, as these come, must not choose another home at the same time.
        first = Binding.read(await call(None, self._directory.put_first, key, value)).node
        return self._nodes.find(first) or ready[order[0]]

    async def site(self, request: TemplateRequest, caller: Caller) -> Known:
        """The node that builds what a client asks for, with the uploads that the build copies.

        Raises:
            ServerUnreachable: No node answers.
            RingfenceError: The node does not take an upload: the bounds of the client, or its disk.
        """
        home = await self.home(caller.client)
        base = await self.source(request.base.template, caller)
        node = self._nodes.find(base or "") or home
        scope = {"state": {"caller": caller, "request_id": "template"}}
        for digest in sorted({step.copy for step in request.steps if step.copy}):
            target = f"/v1/uploads/{digest}".encode()
            if node is home or (await self._scatter.ask(node, scope, "GET", target))["present"]:
                continue
            if (await self._scatter.ask(home, scope, "GET", target))["present"]:
                await self._scatter.copy(home, node, scope, target, TAR)
        return node

    async def at(self, name: str, caller: Caller) -> Known:
        """The node that answers for a template, by its id or name; where none has it, one that says so.

        Raises:
            SandboxLost: The node that had it is gone.
        """
        having = await self.having(name, caller)
        if having:
            return having[0]
        home = await self._home_of(caller.client)
        for tag in (_node_in(name), home):
            if self._nodes.is_lost(tag):
                raise _lost(name)
        return self._nodes.find(home) or self._nodes.any()

    async def source(self, name: str, caller: Caller, client: str = "") -> str | None:
        """The node that alone can make a sandbox from a template; empty: any can; None: none has it.

        Args:
            client: Whose the sandbox will be; empty: the caller's.
        """
        found = await self._forms(name, caller, client)
        # Where it is not built yet, its node says so; no other one knows it.
        if not found:
            return None
        if self._nodes.shares_snapshots and found[0]["is_ready"]:
            return ""
        return (await self._node_with(found[0])).tag

    async def having(self, name: str, caller: Caller) -> list[Known]:
        """Nodes that have a template of this id or name, the newest first; one's own before public ones."""
        if (known := self._nodes.find(_node_in(name))) is not None:
            return [known]
        return [await self._node_with(each) for each in await self._forms(name, caller, "")]

    async def _node_with(self, form: dict[str, Any]) -> Known:
        # With a shared store others know it, too; one whose node is lost is its owner's home's.
        return self._nodes.find(node_of(form["id"])) or await self.home(form["owner"])

    async def _forms(self, name: str, caller: Caller, client: str) -> list[dict[str, Any]]:
        """Templates of an id or name, or with a build of that id, of one owner: the newest first."""
        if name == _DEFAULT or not _NAME.fullmatch(name):
            return []
        owner = client or caller.client
        asking = replace(caller, client=owner, scope=USER, sandbox="") if client else caller
        scope = {"state": {"caller": asking, "request_id": "template"}}
        # A build's id is in its template alone, and no name of it.
        is_build = name.count("-") == 4
        target = "/v1/templates" if is_build else f"/v1/templates/{name}"
        known = self._nodes.find(_node_in(name))
        nodes = self._nodes.all() if known is None else [known]
        answers = await asyncio.gather(*(self._ask(each, scope, target) for each in nodes))
        every: dict[str, dict[str, Any]] = {}
        for node, forms in zip(nodes, answers, strict=True):
            for form in forms:
                means = (form["id"], form["name"], form["build_id"], *form["tags"].values())
                is_its_own = node_of(form["id"]) == node.tag or form["id"] not in every
                if name in means and is_its_own:
                    every[form["id"]] = form
        found = sorted(
            every.values(),
            key=lambda each: (each["owner"] == owner, each["is_ready"], each["updated_at"]),
            reverse=True,
        )
        return [each for each in found if each["owner"] == found[0]["owner"]]

    async def _ask(self, node: Known, scope: Any, target: str) -> list[dict[str, Any]]:
        try:
            form = await self._scatter.ask(node, scope, "GET", target.encode())
        except NotFound:
            return []
        if "code" in form:  # 503: the node is full
            raise error_from_json(form)
        found: list[dict[str, Any]] = form.get("items", [form])
        return found

    async def _home_of(self, client: str) -> str:
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(None, self._directory.get, _home_key(client))
        return Binding.read(value).node if value else ""


def _home_key(client: str) -> str:
    return f"{HOME}{hashlib.sha256(client.encode()).hexdigest()}"


def _node_in(name: str) -> str:
    return node_of(name) if name.startswith("tpl-") else ""


def _lost(name: str) -> SandboxLost:
    return SandboxLost(
        f"template {name!r} went with the node that built it",
        hint="build it again: another node takes it",
        retryable=False,
    )


__all__ = ["Templates"]
