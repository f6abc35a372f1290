"""Requests to all nodes, and their answers made one.

A node that does not answer fails the whole: a list without its sandboxes would be wrong. Within seconds
the node answers again or is lost, and its sandboxes are on no list any more.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from urllib.parse import parse_qs, urlencode

from starlette.responses import Response

from ..api.models import json_answer
from ..api.routes.health import PlainText
from ..api.schemas import write_cursor
from ..errors import InvalidRequest, RingfenceError, ServerUnreachable, error_from_json
from ..model.base.ids import node_of
from ..model.base.jsonform import json_object, loads
from ..model.event import CONFIG
from .placing import read_whole
from .proxy import target_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Any

    from starlette.types import Receive, Scope, Send

    from ..api.service import Service
    from .directory import Directory
    from .nodes import Known, Nodes
    from .proxy import Proxy
    from .upstream import Headers

    Form = dict[str, Any]

_ANSWER_S = 30.0
_HEARTBEAT_S = 15.0
_MICRO = 1_000_000
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(.*)\})? (.+)")
_MOST_PAGE = 100
_DIGITS = re.compile("[0-9]{1,19}")
_PLACE = re.compile("([0-9a-f]{8})=([0-9a-z-]{1,64})")
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Scatter:
    """ASGI application of the routes in `MERGED`."""

    def __init__(self, directory: Directory, nodes: Nodes, proxy: Proxy, service: Service) -> None:
        self._directory = directory
        self._nodes, self._proxy, self._service = nodes, proxy, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask every node, and answer."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        response = await MERGED[method, scope["state"]["found"].path](self, scope, receive)
        await response(scope, receive, send)

    async def ask(
        self, node: Known, scope: Scope, method: str, target: bytes, body: bytes = b""
    ) -> Form:
        """Ask one node, as the caller of a request.

        Raises:
            RingfenceError: What the node says.
        """
        content, _ = await self._asked(node, scope, method, target, body)
        return json_object(loads(content), "answer") if content else {}

    async def copy(
        self, source: Known, sink: Known, scope: Scope, target: bytes, kind: str
    ) -> None:
        """Send what one node answers to a GET to another by a PUT, as the caller of a request.

        Args:
            kind: Media type of the content.

        Raises:
            RingfenceError: What one of the nodes says.
            ServerUnreachable: One of them does not answer, or went away.
        """
        pool, state = self._proxy.pool, scope["state"]

        def headers(method: str, *more: tuple[bytes, bytes]) -> Headers:
            own = self._proxy.headers(
                state["caller"], method, target, state.get("request_id", ""), []
            )
            return [*own, *more]

        accept = headers("GET", (b"accept", kind.encode()))
        content = await pool.exchange(source.address, b"GET", target, accept, b"")
        answer = None
        try:
            if content.status != 200:
                raise error_from_json(json.loads(await content.whole()))
            chunked = headers("PUT", (b"transfer-encoding", b"chunked"))
            answer = await pool.open(sink.address, b"PUT", target, chunked, None)
            answer.is_sent = False
            answer.connection.hold_open()
            async for piece in content.pieces():
                await answer.connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await answer.connection.send(b"0\r\n\r\n")
            answer.is_sent = True
            answer.connection.sent()
            await answer.head()
            said = await answer.whole()
            if answer.status >= 400:
                raise error_from_json(json.loads(said))
        finally:
            content.abort()
            if answer is not None:
                answer.abort()

    async def ask_all(
        self, scope: Scope, method: str, target: bytes, body: bytes = b""
    ) -> list[Form]:
        """Ask every node, at once.

        Raises:
            RingfenceError: What the first says that refuses.
        """
        return [*(await self.ask_each(scope, method, target, body)).values()]

    async def ask_each(
        self, scope: Scope, method: str, target: bytes, body: bytes = b""
    ) -> dict[str, Form]:
        """Ask every node, as `ask_all`; the answers by node."""
        nodes = self._all()
        asked = (self.ask(node, scope, method, target, body) for node in nodes)
        answers = await asyncio.gather(*asked)
        return {node.tag: each for node, each in zip(nodes, answers, strict=True)}

    def _all(self) -> list[Known]:
        nodes = self._nodes.all()
        if not nodes:
            self._nodes.any()  # which says so
        return nodes

    async def _asked(
        self, node: Known, scope: Scope, method: str, target: bytes, body: bytes = b""
    ) -> tuple[bytes, int]:
        state = scope["state"]
        kind = [(b"content-type", b"application/json")] if body else []
        headers = self._proxy.headers(
            state["caller"], method, target, state.get("request_id", ""), kind
        )
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._proxy.pool.exchange(
                    node.address, method.encode(), target, headers, body
                )
                content = await answer.whole()
        except (ServerUnreachable, TimeoutError) as exc:
            hint = "try again: within seconds the node is back, or lost"
            raise ServerUnreachable(f"node {node.tag} does not answer: {exc}", hint=hint) from exc
        if answer.status >= 400 and answer.status != 503:
            raise error_from_json(json.loads(content))
        return content, answer.status

    # -- lists ----------------------------------------------------------------------------------

    async def page(self, scope: Scope, key: str) -> Response:
        """Merge one page of a list that every node keeps in the order of `key`.

        Ids begin with the time, whatever node made them: so one cursor fits all.
        """
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = query.get("limit", [str(_MOST_PAGE)])[-1]
        # The nodes say what is wrong with another one.
        most = int(given) if _DIGITS.fullmatch(given) else _MOST_PAGE
        pages = await self.ask_all(scope, "GET", target_of(scope))
        items = sorted((item for page in pages for item in page["items"]), key=lambda it: it[key])
        more = len(items) > most or any(page["next_cursor"] for page in pages)
        found = items[:most]
        cursor = write_cursor(found[-1][key]) if more and found else None
        return json_answer({"items": found, "next_cursor": cursor})

    async def sandboxes(self, scope: Scope, _receive: Receive) -> Response:
        return await self.page(scope, "session_id")

    async def snapshots(self, scope: Scope, _receive: Receive) -> Response:
        return await self.page(scope, "id")

    async def templates(self, scope: Scope, _receive: Receive) -> Response:
        """List each template as its own node does: with a shared store, others know it, too."""
        found: dict[str, Form] = {}
        for tag, page in (await self.ask_each(scope, "GET", target_of(scope))).items():
            for each in page["items"]:
                if node_of(each["id"]) == tag or each["id"] not in found:
                    found[each["id"]] = each
        return json_answer({"items": [found[each] for each in sorted(found)], "next_cursor": None})

    async def sessions(self, scope: Scope, _receive: Receive) -> Response:
        pages = await self.ask_all(scope, "GET", target_of(scope))
        items = [item for page in pages for item in page["items"]]
        items.sort(key=lambda item: (item["created_at"], item["session_id"]))
        return json_answer({"items": items, "next_cursor": None})

    # -- counts ---------------------------------------------------------------------------------

    async def stats(self, scope: Scope, _receive: Receive) -> Response:
        return json_answer(total(await self.ask_all(scope, "GET", target_of(scope))))

    async def info(self, scope: Scope, _receive: Receive) -> Response:
        """The first node's, with every backend that any node has, and room for all."""
        forms = await self.ask_all(scope, "GET", target_of(scope))
        backends: dict[str, Form] = {}
        for form in forms:
            for each in form["backends"]:
                known = backends.get(each["backend"])
                if known is None or (each["available"] and not known["available"]):
                    backends[each["backend"]] = each
        most = sum(form["max_sandboxes"] for form in forms)
        if (own := self._nodes.bounded(scope["state"]["caller"]).max_sandboxes) is not None:
            most = min(most, own)
        return json_answer({**forms[0], "max_sandboxes": most, "backends": [*backends.values()]})

    async def health(self, scope: Scope, _receive: Receive) -> Response:
        """Well while any node is; a check holds where it holds on every node."""
        checks: dict[str, Form] = {}
        is_ok = False
        for node in self._nodes.all():
            try:
                content, _ = await self._asked(node, scope, "GET", target_of(scope))
            except ServerUnreachable as exc:
                name = f"node {node.tag}"
                checks[name] = {"name": name, "ok": False, "detail": exc.message}
                continue
            form = json.loads(content)
            is_ok |= form["ok"]
            for each in form["checks"]:
                known = checks.get(each["name"])
                if known is None or (known["ok"] and not each["ok"]):
                    detail = f"node {node.tag}: {each['detail']}" if each["detail"] else ""
                    checks[each["name"]] = {**each, "detail": detail}
        return json_answer({"ok": is_ok, "checks": [*checks.values()]}, 200 if is_ok else 503)

    async def metrics(self, scope: Scope, _receive: Receive) -> Response:
        """Every sample of every node, with its name; then the gateway's own."""
        nodes = self._all()
        found = await asyncio.gather(
            *(self._asked(node, scope, "GET", target_of(scope)) for node in nodes)
        )
        texts = [
            (node.tag, content.decode()) for node, (content, _) in zip(nodes, found, strict=True)
        ]
        own = self._service.requests.render(self._service.admission.now)
        return PlainText(joined([*texts, ("", own)]))

    # -- one for all ----------------------------------------------------------------------------

    async def pools(self, scope: Scope, _receive: Receive) -> Response:
        return json_answer(_pools(await self.ask_all(scope, "GET", target_of(scope))))

    async def change_pools(self, scope: Scope, receive: Receive) -> Response:
        return json_answer(_pools(await self._change(scope, receive, "PUT")))

    async def change_config(self, scope: Scope, receive: Receive) -> Response:
        return json_answer((await self._change(scope, receive, "PATCH"))[0])

    async def _change(self, scope: Scope, receive: Receive, method: str) -> list[Form]:
        """Change every node; nodes that come later take it from the store."""
        body, target = await read_whole(receive), target_of(scope)
        forms = await self.ask_all(scope, method, target, body)
        path = scope["state"]["found"].path

        def note() -> None:
            before = json.loads(self._directory.get(f"changed/{method} {path}") or b"{}")
            after = loads(body) if method == "PUT" else {**before, **json_object(loads(body), "")}
            self._directory.put(f"changed/{method} {path}", json.dumps(after).encode())

        await asyncio.get_running_loop().run_in_executor(None, note)
        return forms

    async def execution_info(self, scope: Scope, _receive: Receive) -> Response:
        """The first node's, with every tier and executor that any node has."""
        forms = await self.ask_all(scope, "GET", target_of(scope))
        merged = {**forms[0]}
        for name, field, holds in (
            ("tiers", "tier", "supported"),
            ("executors", "name", "available"),
        ):
            best: dict[str, Form] = {}
            for form in forms:
                for each in form[name]:
                    known = best.get(each[field])
                    if known is None or (each.get(holds) and not known.get(holds)):
                        best[each[field]] = each
            merged[name] = [*best.values()]
        for name in ("running", "pending"):
            merged[name] = sum(form[name] for form in forms)
        holds = "supports_network_enabled"
        merged[holds] = any(form[holds] for form in forms)
        return json_answer(merged)

    # -- the default sandbox --------------------------------------------------------------------

    async def default(self, scope: Scope, _receive: Receive) -> Response:
        return await self._default(scope)

    async def _default(self, scope: Scope) -> Response:
        forms = await self.ask_all(scope, "GET", target_of(scope))
        found = next((form["session"] for form in forms if form["session"]), None)
        return json_answer({"session": found})

    async def set_default(self, scope: Scope, receive: Receive) -> Response:
        """Choose it on its node, and none on the others."""
        body = await read_whole(receive)
        try:
            chosen = json_object(loads(body), "body").get("sandbox_id")
            tag = node_of(chosen) if isinstance(chosen, str) else ""
        except RingfenceError:
            tag = ""
        target = target_of(scope)
        at = self._nodes.find(tag) or self._nodes.any()
        await self.ask(at, scope, "PUT", target, body)
        for node in self._all():
            if node.tag != at.tag:
                await self.ask(node, scope, "PUT", target, b'{"sandbox_id":null}')
        return await self._default(scope)

    # -- events ---------------------------------------------------------------------------------

    async def events(self, scope: Scope, _receive: Receive) -> Response:
        """Events of all nodes in the order of their times; `seq` is the time in microseconds.

        A stream's ids say how far each node was read.
        """
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        since = query.get("since", ["0"])[-1]
        if set(query) - {"since", "follow"} or not _DIGITS.fullmatch(since):
            # The node says what is wrong with it.
            await self.ask(self._nodes.any(), scope, "GET", target_of(scope))
            raise InvalidRequest("is not a number", field="since")
        follow = query.get("follow", ["false"])[-1].lower()
        if follow not in (*_YES, *_NO):
            await self.ask(self._nodes.any(), scope, "GET", target_of(scope))
        if follow not in _YES:
            forms = await self.ask_all(scope, "GET", b"/v1/events")
            items = [
                _stamped(item)
                for i, form in enumerate(forms)
                for item in form["items"]
                if not i or item["kind"] != CONFIG
            ]
            items = [item for item in items if item["seq"] > int(since)]
            items.sort(key=lambda item: (item["time"], item["seq"]))
            return json_answer({"items": items, "next_cursor": None})
        last = next((v for k, v in scope["headers"] if k == b"last-event-id"), b"")
        return EventStream(self, scope, int(since), _places(last))

    async def places_since(self, node: Known, scope: Scope, since: int) -> int:
        """The node's own number of the last event up to a moment."""
        if not since:
            return 0
        form = await self.ask(node, scope, "GET", b"/v1/events")
        return max((item["seq"] for item in form["items"] if _micro(item) <= since), default=0)

    async def lines(
        self, node: Known, scope: Scope, since: int, last_id: str
    ) -> AsyncIterator[list[bytes]]:
        """A node's stream of events, a block of lines at a time."""
        target = b"/v1/events?" + urlencode({"follow": "true", "since": since}).encode()
        state = scope["state"]
        given = [(b"last-event-id", last_id.encode())] if last_id else []
        headers = self._proxy.headers(
            state["caller"], "GET", target, state.get("request_id", ""), given
        )
        answer = await self._proxy.pool.exchange(node.address, b"GET", target, headers, b"")
        try:
            left = b""
            async for piece in answer.pieces():
                *blocks, left = (left + piece).split(b"\n\n")
                for block in blocks:
                    yield block.split(b"\n")
        finally:
            answer.abort()

    def nodes(self) -> list[Known]:
        return self._nodes.all()


class EventStream(Response):
    """Events of every node, also of those that come later, as server-sent events."""

    def __init__(
        self, scatter: Scatter, scope: Scope, since: int, places: dict[str, str] | None
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]
        self._scatter, self._asked, self._since = scatter, scope, since
        self._is_anew = places is None
        self._places = places or {}
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(256)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        tasks = [asyncio.ensure_future(each) for each in (self._gather(), self._write(send))]
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((*tasks, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        if self._is_anew:
            gap = b'event: gap\ndata: {"reason": "the server was started anew"}\n\n'
            await send({"type": "http.response.body", "body": gap, "more_body": True})
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    text = await self._queue.get()
            except TimeoutError:
                text = b": nothing happened\n\n"
            await send({"type": "http.response.body", "body": text, "more_body": True})

    async def _gather(self) -> None:
        readers: dict[str, asyncio.Task[None]] = {}
        begun = {node.tag for node in self._scatter.nodes()}
        try:
            while True:
                there = {node.tag: node for node in self._scatter.nodes()}
                for tag, node in there.items():
                    if tag not in readers or readers[tag].done():
                        # Of a node that has come since, all its events are news.
                        since = self._since if tag in begun else 0
                        readers[tag] = asyncio.ensure_future(self._read(node, since))
                for tag in readers.keys() - there.keys():
                    readers.pop(tag).cancel()
                await asyncio.sleep(0.5)
        finally:
            for task in readers.values():
                task.cancel()

    async def _read(self, node: Known, since: int) -> None:
        try:
            last = self._places.get(node.tag, "")
            after = 0 if last else await self._scatter.places_since(node, self._asked, since)
            async for lines in self._scatter.lines(node, self._asked, after, last):
                await self._take(node.tag, lines)
        except RingfenceError:
            return  # it is read again once it is back

    async def _take(self, tag: str, lines: Sequence[bytes]) -> None:
        told = []
        for line in lines:
            name, _, value = line.partition(b": ")
            if name == b"id":
                self._places[tag] = value.decode()
                told.append(b"id: " + _written(self._places))
            elif name == b"data" and value.startswith(b'{"seq"'):
                if lines[1:2] == [b"event: config"] and tag != self._scatter.nodes()[0].tag:
                    return  # a change of all nodes is told once
                event = json.dumps(_stamped(json.loads(value)), separators=(",", ":"))
                told.append(b"data: " + event.encode())
            else:
                told.append(line)
        if told and not told[0].startswith(b":"):
            await self._queue.put(b"\n".join(told) + b"\n\n")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _written(places: dict[str, str]) -> bytes:
    text = ",".join(f"{tag}={place}" for tag, place in places.items())
    return base64.urlsafe_b64encode(text.encode())


def _places(last_id: bytes) -> dict[str, str] | None:
    """How far each node was read; None where that cannot be told."""
    try:
        text = base64.b64decode(last_id, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    # Places are sent to nodes as header fields: only what a stream can have told is.
    found = [_PLACE.fullmatch(each) for each in text.split(",")] if text else []
    return {each[1]: each[2] for each in found if each} if all(found) else None


def _micro(event: Form) -> int:
    return int(event["time"] * _MICRO)


def _stamped(event: Form) -> Form:
    return {**event, "seq": _micro(event)}


def total(forms: Sequence[Form]) -> Form:
    """Counts of all nodes together. Percentiles and averages are the highest: no better is known."""
    found: Form = {}
    for name, first in forms[0].items():
        values = [form[name] for form in forms if form[name] is not None]
        if isinstance(first, dict):
            found[name] = {
                key: max((value[key] for value in values if value[key] is not None), default=None)
                for key in first
            }
        elif name in ("uptime_s", "average_creation_ms"):
            found[name] = max(values, default=None)
        elif name != "pool_hit_rate":
            found[name] = sum(values)
    if "pool_hit_rate" in forms[0]:
        asked = found["pool_hits"] + found["pool_misses"]
        found["pool_hit_rate"] = found["pool_hits"] / asked if asked else None
    return {name: found[name] for name in forms[0]}


def joined(texts: Sequence[tuple[str, str]]) -> str:
    """Pages of Prometheus as one: each family once, each sample with the node's name."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for tag, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, family, _ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in known):
                    known.append(line)
            elif match := _SAMPLE.fullmatch(line):
                name, _, labels, value = match.groups()
                every = ",".join(filter(None, (f'node="{tag}"' if tag else "", labels)))
                shown = f"{name}{{{every}}} {value}" if every else line
                samples.setdefault(family, []).append(shown)
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join(lines) + "\n"


def _pools(forms: Sequence[Form]) -> Form:
    return {
        **forms[0],
        "warm": sum(form["warm"] for form in forms),
        "given_up": {key: value for form in forms for key, value in form["given_up"].items()},
        "last_error": next((form["last_error"] for form in forms if form["last_error"]), ""),
    }


MERGED: dict[tuple[str, str], Callable[[Scatter, Scope, Receive], Any]] = {
    ("GET", "/v1/sandboxes"): Scatter.sandboxes,
    ("GET", "/v1/sessions"): Scatter.sessions,
    ("GET", "/v1/snapshots"): Scatter.snapshots,
    ("GET", "/v1/templates"): Scatter.templates,
    ("GET", "/v1/stats"): Scatter.stats,
    ("GET", "/v1/info"): Scatter.info,
    ("GET", "/v1/health"): Scatter.health,
    ("GET", "/metrics"): Scatter.metrics,
    ("GET", "/v1/pools"): Scatter.pools,
    ("PUT", "/v1/pools"): Scatter.change_pools,
    ("GET", "/v1/events"): Scatter.events,
    ("GET", "/api/v1/sandbox/info"): Scatter.execution_info,
    ("PATCH", "/api/v1/sandbox/config"): Scatter.change_config,
    ("GET", "/v1/sessions/default"): Scatter.default,
    ("PUT", "/v1/sessions/default"): Scatter.set_default,
}
"""Routes that all nodes answer together."""
