"""Answers of all nodes made one: lists, counts, checks, and who is asked for what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from tests.unit.cluster.nodes_there import SECRET, Asked, Reply, Scene, scene_of

from ringfence.api.access import gateways
from ringfence.api.access.caller import USER, Caller
from ringfence.cluster.scatter import MERGED, joined, total
from ringfence.errors import (
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ServerUnreachable,
)
from ringfence.model.execution.execution import TierSupport

pytestmark = pytest.mark.anyone
A, B = "0000000a", "0000000b"


def saying(form: object, status: int = 200) -> Any:
    return lambda _asked: (status, {}, form)


async def merged(
    scene: Scene, path: str, method: str = "GET", query: bytes = b"", body: bytes = b""
) -> Any:
    scope = scene.scope(path, query)
    scope["state"]["found"] = SimpleNamespace(path=path)
    scope["method"] = method

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    response = await MERGED[method, path](scene.scatter, scope, receive)
    return response.status_code, json.loads(response.body)


def page(key: str, *ids: str, more: str | None = None) -> Any:
    return saying({"items": [{key: each} for each in ids], "next_cursor": more})


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/sandboxes", "session_id"), ("/v1/snapshots", "id")]
)
@pytest.mark.parametrize(
    ("query", "more", "expected", "has_next"),
    [
        (b"", None, "abcdef", False),
        (b"limit=6", None, "abcdef", False),
        (b"limit=5", None, "abcde", True),
        (b"limit=6", "c", "abcdef", True),
        (b"limit=bad", None, "abcdef", False),
        (b"limit=2&limit=3", None, "abc", True),
    ],
)
async def test_pages_are_merged_in_the_order_of_their_ids(
    path: str,
    key: str,
    query: bytes,
    more: str | None,
    expected: str,
    has_next: bool,
    tmp_path: Path,
) -> None:
    answers = {A: page(key, "a", "c", "e", more=more), B: page(key, "b", "d", "f")}
    async with scene_of(tmp_path, **answers) as scene:
        _, found = await merged(scene, path, query=query)
        assert expected == "".join(each[key] for each in found["items"])
        assert has_next == (found["next_cursor"] is not None)
        target = f"{path}?{query.decode()}" if query else path
        assert [target, target] == [node.asked[0].target for node in scene.there.values()]


async def test_sessions_are_merged_by_their_time(tmp_path: Path) -> None:
    def items(*pairs: tuple[float, str]) -> Any:
        return saying({"items": [{"created_at": at, "session_id": name} for at, name in pairs]})

    answers = {A: items((2.0, "a"), (5.0, "b")), B: items((1.0, "d"), (5.0, "a"))}
    async with scene_of(tmp_path, **answers) as scene:
        _, found = await merged(scene, "/v1/sessions")
        assert ["d", "a", "a", "b"] == [each["session_id"] for each in found["items"]]
        assert found["next_cursor"] is None


async def test_a_template_is_listed_as_its_own_node_does(tmp_path: Path) -> None:
    mine = {"id": f"tpl-0190b5a4-0000-7000-8000-{B}0000"}
    other = {"id": "tpl-x", "at": A}
    answers = {
        A: saying({"items": [{**mine, "at": A}, other]}),
        B: saying({"items": [{**mine, "at": B}, {**other, "at": B}]}),
    }
    async with scene_of(tmp_path, **answers) as scene:
        _, found = await merged(scene, "/v1/templates")
        assert [{**mine, "at": B}, other] == found["items"]


async def test_a_node_that_does_not_answer_fails_a_list_and_is_named(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: page("id"), B: saying(b"not asked")}) as scene:
        server = scene.there[B].server
        assert server is not None
        server.close()
        (tmp_path / B).unlink(missing_ok=True)
        with pytest.raises(ServerUnreachable, match=f"node {B} does not answer"):
            await merged(scene, "/v1/snapshots")


@pytest.mark.parametrize(
    ("status", "is_raised"), [(400, True), (403, True), (503, False), (200, False)]
)
async def test_what_a_node_refuses_is_the_callers_answer(
    status: int, is_raised: bool, tmp_path: Path
) -> None:
    form: Any = {
        "code": "permission_denied",
        "message": "not yours",
        "items": [],
        "next_cursor": None,
    }
    async with scene_of(tmp_path, **{A: saying(form, status)}) as scene:
        if is_raised:
            with pytest.raises(PermissionDenied, match="not yours"):
                await merged(scene, "/v1/snapshots")
        else:
            await merged(scene, "/v1/snapshots")


async def test_each_node_is_asked_as_the_caller(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: page("id")}) as scene:
        caller = Caller("ann", USER, sandbox="sbx-1", max_sandboxes=3)
        scope = scene.scope("/v1/x", caller=caller)
        await scene.scatter.ask_all(scope, "PUT", b"/v1/x?y=1", b'{"a": 1}')
        [asked] = scene.there[A].asked
        assert ("PUT", "/v1/x?y=1", b'{"a": 1}') == (asked.method, asked.target, asked.body)
        assert "application/json" == asked.headers["content-type"]
        assert "req-1" == asked.headers["x-request-id"]
        found = gateways.unseal(SECRET, asked.headers[gateways.HEADER], "PUT", b"/v1/x?y=1")
        assert found is not None
        assert ("ann", USER, "sbx-1", 3) == (
            found.client,
            found.scope,
            found.sandbox,
            found.max_sandboxes,
        )


@pytest.mark.parametrize(
    ("first", "second", "status"), [(True, True, 200), (True, False, 200), (False, False, 503)]
)
async def test_a_cluster_is_well_while_any_node_is(
    first: bool, second: bool, status: int, tmp_path: Path
) -> None:
    def health(ok: bool) -> Any:
        checks = [{"name": "disk", "ok": ok, "detail": "" if ok else "full"}]
        return saying({"ok": ok, "checks": checks}, 200 if ok else 503)

    async with scene_of(tmp_path, **{A: health(first), B: health(second)}) as scene:
        found, form = await merged(scene, "/v1/health")
        assert (status, status == 200) == (found, form["ok"])
        [check] = form["checks"]
        assert (first and second) == check["ok"]
        failing = B if first else A
        assert ("" if second else f"node {failing}: full") == check["detail"]


async def test_health_names_a_node_that_does_not_answer(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: saying({"ok": True, "checks": []})}) as scene:
        scene.put({**scene.there[A].form, "node": B, "ray_id": "r", "socket": "/none"})
        status, form = await merged(scene, "/v1/health")
        assert 200 == status
        assert [(f"node {B}", False)] == [(each["name"], each["ok"]) for each in form["checks"]]


async def test_info_has_each_backend_where_it_works_and_room_for_all(tmp_path: Path) -> None:
    def info(most: int, **backends: bool) -> Any:
        forms = [{"backend": name, "available": ok} for name, ok in backends.items()]
        return saying({"max_sandboxes": most, "backends": forms})

    answers = {
        A: info(3, native=False, gvisor=True),
        B: info(4, native=True, gvisor=False, docker=False),
    }
    async with scene_of(tmp_path, **answers) as scene:
        _, form = await merged(scene, "/v1/info")
        assert 7 == form["max_sandboxes"]
        shown = {each["backend"]: each["available"] for each in form["backends"]}
        assert {"native": True, "gvisor": True, "docker": False} == shown
        scene.nodes._most_of_client = 5
        assert 5 == (await merged(scene, "/v1/info"))[1]["max_sandboxes"]


async def test_execution_info_has_each_tier_where_it_works(tmp_path: Path) -> None:
    def info(native: bool, running: int) -> Any:
        tiers = [TierSupport("light", supported=native).to_json()]
        executors = [{"name": "python", "available": not native}]
        counts = {"running": running, "pending": 1, "supports_network_enabled": native}
        return saying({"tiers": tiers, "executors": executors, **counts})

    async with scene_of(tmp_path, **{A: info(False, 2), B: info(True, 3)}) as scene:
        _, form = await merged(scene, "/api/v1/sandbox/info")
        assert (5, 2, True) == tuple(
            form[name] for name in ("running", "pending", "supports_network_enabled")
        )
        assert [True] == [each["supported"] for each in form["tiers"]]
        assert [True] == [each["available"] for each in form["executors"]]


async def test_a_change_reaches_every_node_and_those_that_come_later(tmp_path: Path) -> None:
    pools = {"warm": 2, "given_up": {}, "last_error": ""}
    async with scene_of(tmp_path, **{A: saying(pools), B: saying(pools)}) as scene:
        _, form = await merged(scene, "/v1/pools", "PUT", body=b'{"size": 1}')
        assert 4 == form["warm"]
        for text in (b'{"size": 1}', b'{"other": 2}'):
            await merged(scene, "/v1/pools", "PUT", body=text)
            await merged(scene, "/api/v1/sandbox/config", "PATCH", body=text)
        assert [
            b'{"size": 1}',
            b'{"size": 1}',
            b'{"size": 1}',
            b'{"other": 2}',
            b'{"other": 2}',
        ] == [each.body for each in scene.there[B].asked]
        put = scene.store.values["changed/PUT /v1/pools"]
        patch = scene.store.values["changed/PATCH /api/v1/sandbox/config"]
        assert {"other": 2} == json.loads(put)
        assert {"size": 1, "other": 2} == json.loads(patch)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/pools", "PUT"),
        ("/api/v1/sandbox/config", "PATCH"),
        ("/v1/sessions/default", "PUT"),
    ],
)
async def test_a_client_that_leaves_within_a_change_has_changed_nothing(
    path: str, method: str, tmp_path: Path
) -> None:
    messages = [
        {"type": "http.request", "body": b"{}", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async with scene_of(tmp_path, **{A: saying({}), B: saying({})}) as scene:
        scope = scene.scope(path)
        scope["state"]["found"] = SimpleNamespace(path=path)
        scope["method"] = method
        with pytest.raises(ClientDisconnect):
            await MERGED[method, path](scene.scatter, scope, receive)
        assert [] == [*scene.there[A].asked, *scene.there[B].asked]
        assert [] == scene.store.list("changed/")


async def test_the_default_sandbox_is_on_its_node_alone(tmp_path: Path) -> None:
    chosen = f"sbx-0190b5a4-0000-7000-8000-{B}0000"
    answers = {A: saying({"session": None}), B: saying({"session": {"id": chosen}})}
    async with scene_of(tmp_path, **answers) as scene:
        text = json.dumps({"sandbox_id": chosen}).encode()
        _, form = await merged(scene, "/v1/sessions/default", "PUT", body=text)
        assert {"session": {"id": chosen}} == form
        assert [b'{"sandbox_id":null}', b""] == [each.body for each in scene.there[A].asked]
        assert [text, b""] == [each.body for each in scene.there[B].asked]


@pytest.mark.parametrize("text", [b'{"sandbox_id": null}', b'{"sandbox_id": 1}', b"no json"])
async def test_what_chooses_no_default_sandbox_is_judged_by_a_node(
    text: bytes, tmp_path: Path
) -> None:
    answers = {A: saying({"session": None}), B: saying({"session": None})}
    async with scene_of(tmp_path, **answers) as scene:
        await merged(scene, "/v1/sessions/default", "PUT", body=text)
        bodies = {each.body for node in scene.there.values() for each in node.asked}
        assert {text, b'{"sandbox_id":null}', b""} == bodies


async def test_a_default_sandbox_that_its_node_refuses_changes_no_other(tmp_path: Path) -> None:
    refusal = saying({"code": "not_found", "message": "none"}, 404)
    async with scene_of(tmp_path, **{A: saying({"session": None}), B: refusal}) as scene:
        text = json.dumps({"sandbox_id": f"sbx-0190b5a4-0000-7000-8000-{B}0000"}).encode()
        with pytest.raises(NotFound):
            await merged(scene, "/v1/sessions/default", "PUT", body=text)
        assert [] == scene.there[A].asked


@pytest.mark.parametrize("query", [b"since=x", b"since=-1", b"other=1", b"since=" + b"1" * 20])
async def test_a_query_for_events_that_is_none_is_refused(query: bytes, tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: saying({"items": []})}) as scene:
        with pytest.raises(InvalidRequest):
            await merged(scene, "/v1/events", query=query)
        assert [f"/v1/events?{query.decode()}"] == [e.target for e in scene.there[A].asked]
        assert 200 == (await merged(scene, "/v1/events", query=b"since=1&follow=no"))[0]


async def test_pools_tell_every_nodes_trouble(tmp_path: Path) -> None:
    def pools(warm: int, error: str, **given_up: str) -> Any:
        return saying({"size": 2, "warm": warm, "given_up": given_up, "last_error": error})

    answers = {A: pools(1, "", x="one"), B: pools(2, "no room", y="two")}
    async with scene_of(tmp_path, **answers) as scene:
        _, form = await merged(scene, "/v1/pools")
        assert {"x": "one", "y": "two"} == form["given_up"]
        assert (2, 3, "no room") == (form["size"], form["warm"], form["last_error"])


async def test_a_change_that_a_node_refuses_is_not_kept_for_later_ones(tmp_path: Path) -> None:
    refusal = saying({"code": "permission_denied", "message": "no"}, 403)
    async with scene_of(tmp_path, **{A: refusal}) as scene:
        with pytest.raises(PermissionDenied):
            await merged(scene, "/v1/pools", "PUT", body=b'{"size": 1}')
        assert [] == scene.store.list("changed/")


async def test_events_are_in_the_order_of_their_times_and_changes_told_once(
    tmp_path: Path,
) -> None:
    def events(*pairs: tuple[float, str]) -> Any:
        items = [{"time": at, "kind": kind, "seq": i} for i, (at, kind) in enumerate(pairs)]
        return saying({"items": items})

    answers = {
        A: events((1.0, "made"), (3.0, "config")),
        B: events((2.0, "ended"), (3.0, "config")),
    }
    async with scene_of(tmp_path, **answers) as scene:
        for since, expected in ((b"", [1.0, 2.0, 3.0]), (b"since=2000000", [3.0])):
            _, form = await merged(scene, "/v1/events", query=since)
            assert expected == [each["time"] for each in form["items"]]
            assert [int(at * 1e6) for at in expected] == [each["seq"] for each in form["items"]]
        assert 1 == await scene.scatter.places_since(scene.nodes.all()[1], scene.scope(), 3_000_000)
        assert 0 == await scene.scatter.places_since(scene.nodes.all()[1], scene.scope(), 2_999_999)
        assert 0 == await scene.scatter.places_since(scene.nodes.all()[1], scene.scope(), 0)


def test_counts_are_added_and_averages_are_the_highest() -> None:
    one: dict[str, Any] = {
        "active": 1,
        "uptime_s": 5.0,
        "average_creation_ms": None,
        "pool_hits": 3,
    }
    one |= {"pool_misses": 1, "pool_hit_rate": 0.75, "creation_ms": {"p50": 1.0, "p99": None}}
    two = {**one, "active": 2, "uptime_s": 7.0, "average_creation_ms": 2.0, "pool_hits": 0}
    two |= {"pool_misses": 4, "pool_hit_rate": 0.0, "creation_ms": {"p50": 2.0, "p99": None}}

    found = total([one, two])

    assert {
        "active": 3,
        "uptime_s": 7.0,
        "average_creation_ms": 2.0,
        "pool_hits": 3,
        "pool_misses": 5,
        "pool_hit_rate": 0.375,
        "creation_ms": {"p50": 2.0, "p99": None},
    } == found
    assert list(one) == list(found)
    none = total([{"pool_hits": 0, "pool_misses": 0, "pool_hit_rate": None}])
    assert none["pool_hit_rate"] is None


def test_samples_carry_the_name_of_their_node_and_families_are_told_once() -> None:
    text = '# HELP x_total Of x.\n# TYPE x_total counter\nx_total{a="b"} 1\nx_total 2\n'
    found = joined([(A, text), (B, text), ("", "# TYPE y gauge\ny 3\n")])

    assert [
        "# HELP x_total Of x.",
        "# TYPE x_total counter",
        f'x_total{{node="{A}",a="b"}} 1',
        f'x_total{{node="{A}"}} 2',
        f'x_total{{node="{B}",a="b"}} 1',
        f'x_total{{node="{B}"}} 2',
        "# TYPE y gauge",
        "y 3",
    ] == found.splitlines()


class TestCopies:
    async def copy(self, scene: Scene) -> None:
        one, two = scene.nodes.find(A), scene.nodes.find(B)
        assert one is not None
        assert two is not None
        await scene.scatter.copy(one, two, scene.scope(), b"/v1/uploads/x", "application/x-tar")

    async def test_a_source_that_refuses_is_told_and_nothing_is_sent(self, tmp_path: Path) -> None:
        refusal = saying({"code": "not_found", "message": "none"}, 404)
        async with scene_of(tmp_path, **{A: refusal, B: saying({})}) as scene:
            with pytest.raises(NotFound):
                await self.copy(scene)
            assert [] == scene.there[B].asked

    async def test_a_source_is_left_where_the_sink_is_away(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: saying(b"x" * (1 << 21)), B: saying({})}) as scene:
            (tmp_path / B).unlink()
            with pytest.raises(ServerUnreachable):
                await self.copy(scene)
            async with asyncio.timeout(30.0):
                await scene.there[A].has_left.wait()

    async def test_what_the_sink_refuses_is_told(self, tmp_path: Path) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head.decode().lower())
            bodies.append(await reader.readuntil(b"\r\n0\r\n\r\n"))
            status, form = answers.pop(0)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(form)))
            writer.write(form)
            await writer.drain()
            writer.close()

        heads: list[str] = []
        bodies: list[bytes] = []
        answers = [(201, b"{}"), (403, b'{"code": "permission_denied", "message": "no"}')]
        async with scene_of(tmp_path, **{A: saying(b"content"), B: saying({})}) as scene:
            (tmp_path / B).unlink()
            server = await asyncio.start_unix_server(serve, tmp_path / B)
            async with server:
                await self.copy(scene)
                with pytest.raises(PermissionDenied):
                    await self.copy(scene)
            assert [b"7\r\ncontent\r\n0\r\n\r\n"] * 2 == bodies
            assert "application/x-tar" == scene.there[A].asked[0].headers["accept"]
            seal = heads[0].partition(f"{gateways.HEADER}: ")[2].partition("\r\n")[0]
            assert seal, "as the caller"
            assert heads[0].startswith("put /v1/uploads/x ")


class TestEventStreams:
    """A stream of all nodes, over real connections."""

    def node(self, tag: str, **events: Any) -> Any:
        def answer(asked: Asked) -> Reply:
            if "follow" not in asked.target:
                return 200, {}, {"items": [{"seq": 7, "time": 1.0, "kind": "made"}]}
            lines = b"".join(
                b"id: 1-%d\nevent: %b\ndata: %b\n\n"
                % (seq, kind.encode(), json.dumps(form).encode())
                for seq, (kind, form) in enumerate(events.items())
            )
            return 200, {}, b": nothing happened\n\n" + lines

        return answer

    async def stream(self, scene: Scene, query: bytes, count: int, last: bytes = b"") -> list[str]:
        """Read so many blocks of a stream, and leave."""
        blocks: list[str] = []
        is_read = asyncio.Event()

        async def receive() -> Any:
            await is_read.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if body := message.get("body"):
                blocks.append(body.decode())
                if len(blocks) == count:
                    is_read.set()

        scope = scene.scope("/v1/events", query)
        scope["state"]["found"] = SimpleNamespace(path="/v1/events")
        scope["headers"] = [(b"last-event-id", last)] if last else []
        await asyncio.wait_for(scene.scatter(scope, receive, send), 30.0)
        return blocks

    async def test_events_of_all_nodes_come_and_a_change_is_told_once(self, tmp_path: Path) -> None:
        made, config = {"seq": 1, "time": 2.0}, {"seq": 2, "time": 3.0}
        answers = {A: self.node(A, made=made, config=config), B: self.node(B, config=config)}
        async with scene_of(tmp_path, **answers) as scene:
            blocks = await self.stream(scene, b"follow=true&since=1000000", 2)
            assert 2 == len(blocks), "what keeps a node's stream alive is not passed on"
            ids, kinds, data = zip(*(each.splitlines()[:3] for each in blocks), strict=True)
            assert ("event: made", "event: config") == kinds
            assert [2_000_000, 3_000_000] == [json.loads(each[6:])["seq"] for each in data]
            asked = [each.target for each in scene.there[B].asked][:2]
            assert ["/v1/events", "/v1/events?follow=true&since=7"] == asked

            for node in scene.there.values():
                node.asked.clear()
            last = ids[1].removeprefix("id: ").encode()
            await self.stream(scene, b"follow=true&since=1000000", 1, last)
            [asked_a] = [each for each in scene.there[A].asked if "follow" in each.target][:1]
            assert ("1-1", "/v1/events?follow=true&since=0") == (
                asked_a.headers["last-event-id"],
                asked_a.target,
            )

    def hanging(self, asked: Asked) -> Reply | None:
        return None if "follow" in asked.target else self.node("")(asked)

    async def test_nodes_that_come_are_read_whole_and_those_that_go_no_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0.001))
        answers = {A: self.hanging, B: self.node(B, made={"seq": 1, "time": 2.0})}
        async with scene_of(tmp_path, **answers) as scene:
            known = scene.nodes._known
            later = known.pop(B)
            first, second = scene.there[A], scene.there[B]
            reading = asyncio.ensure_future(self.stream(scene, b"follow=true&since=1000000", 1))
            async with asyncio.timeout(30.0):
                while not any("follow" in each.target for each in first.asked):
                    await sleep(0)
                assert not second.asked
                del known[A]
                await first.has_left.wait()
                known[B] = later
                assert 1 == len(await reading)
            assert "/v1/events?follow=true&since=0" == second.asked[0].target, "all of it is news"

    async def test_nodes_are_left_by_who_leaves(self, tmp_path: Path) -> None:
        """One that has said nothing yet, and one within its answer."""
        is_left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            block = b'id: 1-1\nevent: made\ndata: {"seq": 1, "time": 2.0}\n\n'
            head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(b"%b%x\r\n%b\r\n" % (head, len(block), block))
            await reader.read()
            is_left.set()
            writer.close()

        async with scene_of(tmp_path, **{A: self.hanging, B: self.hanging}) as scene:
            scene.nodes._known[B].form["socket"] = str(tmp_path / "own")
            async with await asyncio.start_unix_server(serve, tmp_path / "own"):
                await self.stream(scene, b"follow=true", 1)
                async with asyncio.timeout(30.0):
                    await is_left.wait()
                    await scene.there[A].has_left.wait()

    async def test_an_id_that_no_stream_has_told_begins_with_a_gap(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: self.node(A)}) as scene:
            [gap] = await self.stream(scene, b"follow=true", 1, b"nonsense!")
            assert gap.startswith("event: gap\n")
