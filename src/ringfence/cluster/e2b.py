"""E2B's API at a gateway: the same keys, tokens and answers, with the sandboxes on the nodes."""

from __future__ import annotations

import base64
import json
import re
from collections import OrderedDict
from urllib.parse import parse_qsl, quote, urlencode

from starlette.responses import JSONResponse

from ..api.access.caller import ADMIN, TOKEN, Caller
from ..e2b import templates
from ..e2b.call import ApiError, unauthorized
from ..e2b.entrance import FORWARDED, GRANT, Entrance, Passing
from ..e2b.lists import MOST_PAGE, ORDER
from ..errors import BadJson, InvalidRequest
from ..model.base.ids import node_of
from ..model.base.jsonform import json_object, loads
from .gateway import need_of
from .placement import Need
from .placing import Placing, key_name, read_whole
from .proxy import Inbound, send_whole, target_of
from .upstream import HOP_BY_HOP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from starlette.types import ASGIApp, Receive

    from ..e2b.settings import E2BSettings
    from .gateway import Behind
    from .nodes import Known

    Form = dict[str, Any]

_SANDBOX = re.compile(r"/(?:v2/)?sandboxes/([^/]+)(/snapshots\Z)?")
_LISTS = ("/sandboxes", "/v2/sandboxes", "/snapshots")
_TEMPLATES = re.compile(r"/(?:v\d/)?templates(?:/aliases/(.+)|/([^/]+)(?:/.*)?)?\Z")
_STARTS = re.compile(r"/(?:v\d/)?templates/([^/]+)/builds/[^/]+\Z")
_TAGS = "/templates/tags"
_CREATES = ("/sandboxes", "/v2/sandboxes")
_TEMPLATE = "/templates/"
_MOST_GRANTS = 10_000
_STALE = (401, 403, 404, 502)
# Nodes get what was sent: a server inside wants its `Origin`, and `Authorization` if it is its own.
_NOT_FORWARDED = HOP_BY_HOP | {b"x-ringfence-caller", b"content-length", b"expect"}
_NOT_RETURNED = HOP_BY_HOP | {b"date", b"x-ringfence-made", ORDER.encode()}
_KEYS = frozenset((b"authorization", b"x-api-key"))


class Front(Entrance):
    def __init__(self, app: ASGIApp, behind: Behind, settings: E2BSettings) -> None:
        super().__init__(app, behind.service, settings.domain, _Passing)
        self.behind, self.settings = behind, settings
        self._grants: OrderedDict[str, Form] = OrderedDict()

    def grant(self, sandbox_id: str) -> Form | None:
        return self._grants.get(sandbox_id)

    def keep(self, sandbox_id: str, grant: Form) -> None:
        """Keep it; the oldest is forgotten."""
        self._grants[sandbox_id] = grant
        if len(self._grants) > _MOST_GRANTS:
            self._grants.popitem(last=False)

    def forget(self, sandbox_id: str) -> None:
        """Forget it: another sandbox may have its id now."""
        self._grants.pop(sandbox_id, None)


class _Passing(Passing[Front]):
    @property
    def _behind(self) -> Behind:
        return self._entrance.behind

    async def _answer(self) -> None:
        is_control = not self._port and not self._sandbox
        self._check_origin()
        if is_control and templates.is_upload(self._method, self._path, self._headers):
            # The node that has made the URL looks at its signature.
            caller, method = Caller("", TOKEN), self._method
            await self._serve(caller, "e2b", self._templates, streamed=True, method=method)
            return
        if is_control:
            caller = self._with_key()
            if caller.key:
                self._behind.nodes.check_fresh()
            await self._serve(caller, "e2b", self._control, method=self._method)
            return
        grant = await self._grant()
        caller = self._entrance.caller_of(grant["client"], grant["sandbox"], grant["key"])
        self._behind.nodes.check_fresh()
        await self._serve(caller, "e2b:inside", self._inside, streamed=True)

    async def _serve(
        self, caller: Caller, route: str, serve: Any, *, streamed: bool = False, method: str = "GET"
    ) -> None:
        with self._let_in(caller, route, streamed=streamed, method=method) as body:
            receive = self._receive if self._scope["type"] == "websocket" else body
            self._state["caller"] = caller
            await serve(self._inbound(receive))

    def _inbound(self, receive: Receive) -> Inbound:
        withheld = _NOT_FORWARDED if self._port or self._sandbox else _NOT_FORWARDED | _KEYS
        return Inbound(self._scope, receive, self.send, withheld=withheld, dropped=_NOT_RETURNED)

    # -- inside a sandbox -----------------------------------------------------------------------

    async def _grant(self) -> Form:
        """Ask the node of a sandbox with which key it was made.

        Raises:
            ApiError: There is no such sandbox.
        """
        if not self._sandbox:
            return await self._signer()
        if (known := self._entrance.grant(self._sandbox)) is not None:
            return known
        node = await self._behind.node_of(self._sandbox, _OURSELVES)
        form: Form
        status, form, _ = await self._ask(
            node, GRANT, [(b"e2b-sandbox-id", self._sandbox.encode())]
        )
        if status != 200:
            raise ApiError(form.pop("code"), form.pop("message"), **form)
        self._entrance.keep(self._sandbox, form)
        return form

    async def _signer(self) -> Form:
        """Ask every node which sandbox's token has signed a URL."""
        operation = "read" if self._method in ("GET", "HEAD") else "write"
        query = self._scope["query_string"].decode("latin-1")
        form: Form
        for node in self._behind.nodes.all():
            more = urlencode({"operation": operation})
            status, form, _ = await self._ask(node, f"{GRANT}?{query}&{more}")
            if status == 200:
                self._sandbox = form["sandbox"]
                return form
        raise unauthorized()

    async def _inside(self, inbound: Inbound) -> None:
        if self._scope["type"] == "websocket":
            node = await self._behind.node_of(self._sandbox, inbound.caller)
            await self._behind.proxy.pass_socket(node.address, inbound)
        else:
            await self._behind.by_id(self._sandbox, inbound)
        if self._status in _STALE:
            self._entrance.forget(self._sandbox)

    # -- the API --------------------------------------------------------------------------------

    async def _control(self, inbound: Inbound) -> None:
        if self._scope["type"] == "websocket":
            raise ApiError(501, "there are no WebSockets here")
        method, path = self._method, self._path
        if method == "GET" and path in _LISTS:
            await self._list(inbound)
        elif method == "POST" and path in _CREATES:
            await self._create(inbound)
        elif match := _SANDBOX.match(path):
            if method == "POST" and match[2]:
                await self._snapshot(inbound, match[1])
            elif path.endswith(("/connect", "/resume")):
                await self._behind.resume(match[1], inbound)
                self._entrance.forget(match[1])
            else:
                await self._behind.by_id(match[1], inbound)
        elif _TEMPLATES.match(path):
            await self._templates(inbound)
        else:
            await self._behind.proxy.pass_on(self._behind.nodes.any().address, inbound)

    async def _templates(self, inbound: Inbound) -> None:
        """Pass a request about a template on to the node that has it; a new one, to its owner's home."""
        behind, path, caller = self._behind, self._path, inbound.caller
        scheme = (FORWARDED.encode(), self._scope.get("scheme", "http").encode())
        kept = [each for each in self._scope["headers"] if each[0] != scheme[0]]
        # A node answers a URL for files.
        self._scope["headers"] = [*kept, scheme]
        match = _TEMPLATES.match(path)
        text = (match[1] or match[2] or "") if match else ""
        if path == _TAGS:
            inbound.body = await read_whole(inbound.receive)
            name = "target" if self._method == "POST" else "name"
            text = _text(inbound.body, name)
        if not text and self._method == "GET":
            await self._list_templates(inbound)
        elif not text:
            await behind.pass_on(lambda: behind.templates.home(caller.client), inbound)
        elif self._entrance.settings.spec_of(text) is not None:
            await behind.proxy.pass_on(behind.nodes.any().address, inbound)
        else:
            name = _name_in(text)
            is_deletion = self._method == "DELETE" and path != _TAGS
            if is_deletion and not await behind.templates.having(name, caller):
                node = await self._node_of_snapshot(text)
                await behind.proxy.pass_on((node or behind.nodes.any()).address, inbound)
            else:
                if self._method == "POST" and (begun := _STARTS.match(path)):
                    inbound.body = await read_whole(inbound.receive)
                    await self._check_base(begun[1], _text(inbound.body, "fromTemplate"), caller)
                await behind.by_template(name, inbound, is_deletion=is_deletion)

    async def _check_base(self, template_id: str, base: str, caller: Caller) -> None:
        """Refuse a build over a template that another node alone has: its id names the node already.

        Raises:
            ApiError: It is such a one.
        """
        if not base or self._entrance.settings.spec_of(base) is not None:
            return
        at = await self._behind.templates.source(_name_in(base), caller)
        if at and at != node_of(template_id):
            raise ApiError(
                400,
                f"template '{base[:200]}' is on another node than this build: the cluster has no"
                " snapshot_store; build with POST /v1/templates, or both under one key",
            )

    async def _list_templates(self, inbound: Inbound) -> None:
        """Merge the lists of all nodes; what the operator has configured is on each."""
        found: dict[str, Form] = {}
        for node in self._behind.nodes.all() or [self._behind.nodes.any()]:
            status, forms, _ = await self._ask(node, target_of(self._scope).decode("latin-1"))
            if status != 200:
                raise ApiError(status, str(forms.get("message")))
            for each in forms:
                if node_of(each["templateID"]) == node.tag or each["templateID"] not in found:
                    found[each["templateID"]] = each
        await JSONResponse([*found.values()])(self._scope, inbound.receive, self.send)

    async def _list(self, inbound: Inbound) -> None:
        """Merge the pages of all nodes: each is in the order of ids, which begin with the time."""
        found: list[tuple[str, Form]] = []
        more = False
        target = target_of(self._scope).decode("latin-1")
        for node in self._behind.nodes.all() or [self._behind.nodes.any()]:
            status, forms, headers = await self._ask(node, target)
            if status != 200:
                raise ApiError(status, str(forms.get("message")))
            keys = headers.get(ORDER, "")
            found += zip(keys.split(",") if keys else (), forms, strict=True)
            more |= "x-next-token" in headers
        query = dict(_query(self._scope))
        limit = int(query.get("limit", MOST_PAGE))
        oldest_first = self._path != "/snapshots" and query.get("order") == "asc"
        found.sort(key=lambda each: each[0], reverse=not oldest_first)
        page = found[:limit]
        fields = {}
        if page and (more or len(found) > limit):
            fields["x-next-token"] = base64.urlsafe_b64encode(page[-1][0].encode()).decode()
        response = JSONResponse([form for _, form in page], headers=fields)
        await response(self._scope, inbound.receive, self.send)

    async def _create(self, inbound: Inbound) -> None:
        """Have a node create a sandbox; from a snapshot, the node that has it."""
        inbound.body = await read_whole(inbound.receive)
        need, near, source = Need(), "", self._behind.templates.source
        if template := _text(inbound.body, "templateID"):
            spec = self._entrance.settings.spec_of(template)
            if spec is not None:
                need = need_of(spec)
            elif (found := await source(_name_in(template), inbound.caller)) is not None:
                near = found
            elif node := await self._node_of_snapshot(template):
                near = node.tag
        key = inbound.header(b"idempotency-key")[:255]
        names = [key_name(inbound.caller.client, "e2b", key)]
        await self._behind.placer.place(Placing(inbound, need, names, node=near))

    async def _snapshot(self, inbound: Inbound, sandbox_id: str) -> None:
        """Save a sandbox; snapshots of the same name on other nodes are replaced by it."""
        inbound.body = await read_whole(inbound.receive)
        name = _text(inbound.body, "name").rpartition("/")[2].removesuffix(":default")
        # Answered only then, in turn: the next one of this name must not be taken for one before.
        async with self._behind.turns.here(f"snapshot {inbound.caller.client} {name}"):
            own = await self._behind.node_of(sandbox_id, inbound.caller)
            answer = await self._behind.proxy.begin(own.address, inbound, inbound.caller)
            await answer.head()
            content = await answer.whole()
            if answer.status == 201 and name:
                for node in self._behind.nodes.all():
                    if node.tag != own.tag:
                        await self._ask(node, _TEMPLATE + quote(name, safe=""), method="DELETE")
        await send_whole(inbound, answer.status, answer.headers, content)

    async def _node_of_snapshot(self, name: str) -> Known | None:
        """The node that has a snapshot; None: no node has one of this id or name."""
        if (found := self._behind.nodes.find(node_of(name))) is not None:
            return found
        target = f"/snapshots?{urlencode({'name': name})}"
        for node in self._behind.nodes.all():
            status, forms, _ = await self._ask(node, target)
            if status == 200 and forms:
                return node
        return None

    async def _ask(
        self, node: Known, target: str, more: Any = (), *, method: str = "GET"
    ) -> tuple[int, Any, dict[str, str]]:
        """Ask one node, as the caller: status, JSON and headers."""
        proxy, caller = self._behind.proxy, self._caller or _OURSELVES
        raw = target.encode("latin-1")
        headers = proxy.headers(caller, method, raw, "e2b", [*more])
        answer = await proxy.pool.exchange(node.address, method.encode(), raw, headers, b"")
        content = await answer.whole()
        fields = {k.decode("latin-1"): v.decode("latin-1") for k, v in answer.headers}
        return answer.status, json.loads(content or b"{}"), fields


_OURSELVES = Caller("gateway", ADMIN)


def _query(scope: Any) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _name_in(text: str) -> str:
    """The name or id in `TEAM/NAME:TAG`."""
    return text.rpartition("/")[2].partition(":")[0].lower()


def _text(body: bytes, name: str) -> str:
    """A text of the body; empty where there is none: the node says what is wrong with it."""
    try:
        found = json_object(loads(body), "body").get(name)
    except (BadJson, InvalidRequest):
        return ""
    return found if isinstance(found, str) else ""


__all__ = ["Front"]
