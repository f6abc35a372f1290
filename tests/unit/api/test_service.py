"""Which sandbox a caller gets, what it may keep, and how requests are let in and broken off, in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.unconfined import Unconfined

from ringfence import Limits
from ringfence.api.access.caller import ADMIN, TOKEN, USER, Caller
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.middleware import AccessMiddleware
from ringfence.api.access.origin_policy import OriginPolicy
from ringfence.api.access.peer import PEER, Peer
from ringfence.api.access.permissions import Permissions
from ringfence.api.app import make_app
from ringfence.api.bounds import Bounds
from ringfence.api.service import Service, Settings
from ringfence.errors import (
    Forbidden,
    InvalidRequest,
    LifecycleError,
    QuotaExceeded,
    SandboxLost,
    SandboxNotFound,
)
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.maker import EVICTED
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

ANN, BOB, OPS = Caller("ann", USER), Caller("bob", USER), Caller("ops", ADMIN)
APP = "https://app.test"


@pytest.fixture
def service() -> Iterator[Service]:
    settings = Settings(
        origin_policy=OriginPolicy(frozenset({"ringfence.test"}), frozenset({APP})),
        bounds=Bounds(body_bytes=1000),
    )
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with ExitStack() as stack:
        manager = SessionManager(config, backends=[Unconfined()], background=False)
        made = Service(stack.enter_context(manager), settings)
        stack.callback(made.thread_pools.close)
        yield made


def live_of(service: Service, owner: str = "ann") -> Live:
    found = service.manager.index.find(service.manager.acquire(client_id=owner).id)
    assert found is not None
    return found


# -- finding -------------------------------------------------------------------------------------


async def test_a_sandbox_is_its_clients_and_a_token_is_for_one(service: Service) -> None:
    live, second = live_of(service), live_of(service)
    token = Caller("ann", TOKEN, sandbox=live.sandbox_id)
    for any_id in (live.sandbox_id, live.id):
        for caller in (ANN, OPS, token):
            assert live is service.live(any_id, caller)
            assert live is await service.need(any_id, caller)
        with pytest.raises(SandboxNotFound):
            service.live(any_id, BOB)
    with pytest.raises(SandboxNotFound):
        service.live(second.sandbox_id, token)
    for caller in (BOB, token):
        with pytest.raises((SandboxNotFound, LifecycleError)):
            await service.need(second.sandbox_id, caller)


@pytest.mark.parametrize(
    ("reason", "error"), [("asked for", LifecycleError), (EVICTED, SandboxLost)]
)
async def test_of_one_that_has_ended_its_owner_is_told_why(
    service: Service, reason: str, error: type[Exception]
) -> None:
    live = live_of(service)
    service.manager.end(live, reason)
    for caller in (ANN, OPS, Caller("ann", TOKEN, sandbox=live.sandbox_id)):
        with pytest.raises(error) as ended:
            await service.need(live.sandbox_id, caller)
        assert (error is SandboxLost) == bool(getattr(ended.value, "retryable", False))
    for caller in (BOB, Caller("ann", TOKEN, sandbox="sbx-other")):
        with pytest.raises(SandboxNotFound):
            await service.need(live.sandbox_id, caller)
        with pytest.raises(SandboxNotFound):
            await service.known(live.sandbox_id, caller)
    if error is LifecycleError:
        assert await service.known(live.sandbox_id, ANN) is not None
        other = live_of(service, "bob")
        for caller in (BOB, OPS):
            assert other.sandbox is await service.known(other.sandbox_id, caller)
        with pytest.raises(SandboxNotFound):
            await service.known(other.sandbox_id, ANN)


async def test_one_that_is_restored_in_its_place_is_waited_for(service: Service) -> None:
    live = live_of(service)
    live.moving = Future()
    finding = [asyncio.ensure_future(service.need(live.id, ANN)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in finding)
    finding[0].cancel()
    await asyncio.wait(finding[:1])
    assert not live.moving.cancelled(), "the other waits for the same"
    moving, live.moving = live.moving, None
    moving.set_result(None)
    assert live is await finding[1]


# -- ceilings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "sizes", "refused"),
    [
        ({}, [1] * 50, ""),
        ({"snapshots": 2}, [1], ""),
        ({"snapshots": 2}, [1, 1], "snapshots"),
        ({"snapshots": 0}, [], "snapshots"),
        ({"snapshot_bytes": 10}, [9], ""),
        ({"snapshot_bytes": 10}, [4, 6], "snapshot_bytes"),
        ({"snapshots": 5, "snapshot_bytes": 10}, [11], "snapshot_bytes"),
    ],
)
def test_a_client_keeps_so_many_snapshots_of_so_many_bytes(
    most: dict[str, int], sizes: list[int], refused: str
) -> None:
    every: Any = [SimpleNamespace(size_bytes=size) for size in sizes]
    permissions = Permissions(most=Ceilings(**most))  # type: ignore[arg-type]
    permissions.check_snapshots(OPS, lambda: every)
    if not refused:
        permissions.check_snapshots(ANN, lambda: every)
        return
    with pytest.raises(QuotaExceeded) as quota:
        permissions.check_snapshots(ANN, lambda: every)
    assert refused == quota.value.field


def test_ceilings_are_read_as_they_are_written() -> None:
    form = {"ttl_s": 60.0, "snapshots": 3, "snapshot_bytes": 9, "pids": 50, "memory_bytes": 1 << 25}
    made = Ceilings.from_json(dict(form))
    assert form.items() <= made.to_json().items()
    assert made == Ceilings.from_json(json.loads(json.dumps(made.to_json())))
    for bad in (
        {"ttl_s": 0},
        {"ttl_s": 366 * 86_400 + 1},
        {"snapshots": -1},
        {"other": 1},
        {"pids": "x"},
    ):
        with pytest.raises(InvalidRequest):
            Ceilings.from_json(bad)


def test_a_ceiling_is_reached_and_not_passed() -> None:
    most = Ceilings(Limits(pids=50), ttl_s=60)
    value: float
    for name, value, ceiling in (("a", 50, "pids"), ("b", 60, "ttl_s"), ("c", 10**9, "cpus")):
        most.check(name, value, ceiling)
        most.check(name, None, ceiling)
    for name, value, ceiling in (("a", 51, "pids"), ("b", 60.001, "ttl_s")):
        with pytest.raises(Forbidden) as refused:
            most.check(name, value, ceiling)
        assert name == refused.value.field


# -- letting in ----------------------------------------------------------------------------------


class Asked:
    """Requests to `/v1` of this service, as from a TCP connection."""

    def __init__(self, service: Service) -> None:
        self.service, self.app = service, make_app(service)
        self.app.state.execs = None
        made = service.authenticator.make(owner="ann", scope=USER)
        self.key = {"authorization": f"Bearer {made[1]}"}

    async def __call__(
        self, method: str, path: str, *, state: Any = None, host: str = "localhost", **more: Any
    ) -> httpx.Response:
        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await self.app({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            answered = await client.request(method, path, **more)
        assert (0, 0) == (
            self.service.admission.now,
            self.service.admission._bytes_of.total(),
        ), "what was counted is given back"
        assert {} == self.service.open_requests._requests
        return answered


async def test_a_request_is_let_in_by_its_key_host_page_and_body(service: Service) -> None:
    ask = Asked(service)
    key, path = ask.key, "/v1/sandboxes"
    for method, headers, more, status in (
        ("GET", key, {}, 200),
        ("GET", {}, {}, 401),
        ("GET", {"authorization": "Bearer rf_x.y"}, {}, 401),
        ("GET", {"x-api-key": key["authorization"][7:]}, {}, 200),
        ("GET", {"authorization": f"Basic {key['authorization'][7:]}"}, {}, 401),
        ("GET", {"authorization": "Basic x", "x-api-key": key["authorization"][7:]}, {}, 200),
        ("GET", {"authorization": "bearer" + key["authorization"][6:]}, {}, 200),
        ("GET", {}, {"state": {PEER: Peer(0)}}, 200),
        ("GET", {}, {"state": {PEER: Peer(0, is_gateway=True)}}, 401),
        ("GET", key, {"host": "ringfence.test"}, 200),
        ("GET", key, {"host": "evil.test"}, 403),
        ("GET", key, {"host": "evil.test", "state": {PEER: Peer(0)}}, 200),
        ("GET", {**key, "origin": APP}, {}, 200),
        ("GET", {**key, "origin": "https://evil.test"}, {}, 403),
        ("GET", {**key, "origin": "https://evil.test"}, {"state": {PEER: Peer(0)}}, 403),
        ("GET", {**key, "content-encoding": "gzip"}, {}, 422),
        ("GET", {**key, "content-encoding": "identity"}, {}, 200),
        ("GET", key, {"content": b"x"}, 422),
        ("GET", key, {"content": b"{}"}, 200),
        ("GET", key, {"content": b" { "}, 422),
        ("POST", key, {"content": b" " * 998 + b"{}"}, 201),
        ("POST", key, {"content": b" " * 999 + b"{}"}, 413),
        ("POST", key, {"content": b"["}, 400),
        ("GET", key, {"params": {"limit": "1"}}, 200),
        ("GET", key, {"params": {"limits": "1"}}, 422),
    ):
        kind = {"content-type": "application/json"} if method == "POST" else {}
        answered = await ask(method, path, headers={**kind, **headers}, **more)
        assert status == answered.status_code, (method, headers, more, answered.text)
        assert "nosniff" == answered.headers["x-content-type-options"]
        shown = answered.headers.get("access-control-allow-origin")
        assert (APP if headers.get("origin") == APP else None) == shown


@pytest.mark.parametrize(("announced", "status"), [(1000, 200), (1001, 413)])
async def test_a_body_that_is_announced_as_too_large_is_not_begun(
    service: Service, announced: int, status: int
) -> None:
    _, text = service.authenticator.make(owner="ann", scope=USER)
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError("nothing of it is read")

    async def send(message: Message) -> None:
        sent.append(message)

    fields = {"host": "localhost", "x-api-key": text, "content-length": str(announced)}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sandboxes",
        "raw_path": b"/v1/sandboxes",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        "client": ("127.0.0.1", 1),
    }
    await AccessMiddleware(app, service)(scope, receive, send)
    assert status == sent[0]["status"]


async def test_a_stranger_is_refused_once_to_a_connection(service: Service) -> None:
    """Whoever has a key goes on with it, also after a refusal."""
    ask = Asked(service)
    for path, headers, status, closes in (
        ("/v1/sandboxes", {}, 401, True),
        ("/v1/sandboxes", {"x-api-key": "rf_x.y"}, 401, True),
        ("/v1/sandboxes", {**ask.key, "origin": "https://evil.test"}, 403, True),
        ("/v1/keys", ask.key, 403, False),
        ("/v1/sandboxes", ask.key, 200, False),
    ):
        answered = await ask("GET", path, headers=headers)
        assert status == answered.status_code, (path, headers)
        found = "close" == answered.headers.get("connection")
        assert closes == found, (path, headers)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("a.B-1_2", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("a b", False),
        ("", False),
        ("a\n", False),
    ],
)
async def test_the_id_of_a_request_is_the_clients_where_it_can_be(
    service: Service, given: str, is_kept: bool
) -> None:
    ask = Asked(service)
    answered = await ask("GET", "/v1/info", headers={**ask.key, "x-request-id": given.encode()})
    found = answered.headers["x-request-id"]
    assert is_kept == (found == given)
    assert is_kept or 32 == len(found)


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ({"origin": APP}, "localhost", 204),
        ({"origin": "https://evil.test"}, "localhost", 403),
        ({"origin": APP}, "evil.test", 403),
        ({}, "localhost", 401),
    ],
)
async def test_a_page_asks_first_without_a_key(
    service: Service, headers: dict[str, str], host: str, status: int
) -> None:
    ask = Asked(service)
    asked = {"access-control-request-method": "PUT", **headers}
    answered = await ask("OPTIONS", "/v1/sandboxes", headers=asked, host=host)
    assert status == answered.status_code
    plain = await ask("OPTIONS", "/v1/sandboxes", headers=headers, host=host)
    assert 204 != plain.status_code


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("by", ["server", "key"])
async def test_what_is_under_way_when_the_server_stops_or_its_key_ends_is_told(
    service: Service, has_begun: bool, by: str
) -> None:
    record, text = service.authenticator.make(owner="ann", scope=USER)
    waits, sent = asyncio.Event(), list[Message]()

    async def slow(_scope: Scope, _receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        waits.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {text}".encode())]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/events",
        "raw_path": b"/v1/events",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }
    serving = asyncio.ensure_future(AccessMiddleware(slow, service)(scope, receive, send))
    await waits.wait()
    assert 1 == service.admission.now
    if by == "server":
        serving.cancel()
    else:
        service.authenticator.remove(record.id, OPS, this_key=False)
        service.open_requests.look()
    await asyncio.wait([serving])
    await asyncio.sleep(0)

    statuses = [each["status"] for each in sent if each["type"] == "http.response.start"]
    wanted = 503 if by == "server" else 401
    assert [200 if has_begun else wanted] == statuses
    assert serving.exception() is None, "there is nobody to tell of it"
    assert (0, {}) == (service.admission.now, service.open_requests._requests)
