"""Who comes in by E2B's API, to what, and what each refusal says; all that is counted is given back."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from ringfence import errors
from ringfence.api.access import gateways
from ringfence.api.access.audit import Audit
from ringfence.api.access.caller import ADMIN, METRICS, READ_ONLY, TOKEN, USER, Caller
from ringfence.api.access.origin_policy import OriginPolicy
from ringfence.api.access.peer import PEER, Peer
from ringfence.api.service import Settings
from ringfence.e2b import call as call_module
from ringfence.e2b import lists
from ringfence.e2b.call import ApiError, Route, find_route
from ringfence.e2b.codec import RpcError
from ringfence.e2b.entrance import (
    ENVD_PORT,
    FORWARDED,
    GRANT,
    INTERPRETER_PORT,
    Entrance,
    _error_response,
)
from ringfence.e2b.notes import Notes
from ringfence.model.client_session import SessionState
from ringfence.sessions.live import Live
from ringfence.sessions.maker import EVICTED
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone

SECRET = b"s" * 32
APP = "https://app.test"
ENVS = "/envs"
Make = Callable[..., Here]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **options: Here(stack, **options)


@pytest.fixture
def here(make: Make) -> Here:
    policy = OriginPolicy(frozenset({"ringfence.test"}), frozenset({APP}))
    return make(settings=Settings(origin_policy=policy))


def inside(live: Live, token: str, port: int | None = None) -> dict[str, str]:
    place = {} if port is None else {"e2b-sandbox-port": str(port)}
    return {"e2b-sandbox-id": live.sandbox_id, "x-access-token": token, **place}


# -- which requests are its ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "query", "place"),
    [
        ("/sandboxes", {}, "", ("", 0)),
        ("/sandboxes/x", {}, "", ("", 0)),
        ("/v2/sandboxes", {}, "", ("", 0)),
        ("/v3/templates", {}, "", ("", 0)),
        *((f"/{name}", {}, "", ("", 0)) for name in (
            "templates", "snapshots", "teams", "volumes", "secrets", "nodes", "access-tokens", "api-keys",
        )),
        ("/v1/sandboxes", {}, "", None),
        ("/v4/sandboxes", {}, "", None),
        ("/sandboxesx", {}, "", None),
        ("/x/sandboxes", {}, "", None),
        ("/", {}, "", None),
        ("/files", {}, "", None),
        ("/files", {}, "signature=x", ("", ENVD_PORT)),
        (GRANT, {}, "signature=x", ("", ENVD_PORT)),
        ("/envs", {}, "signature=x", None),
        ("/", {"e2b-sandbox-id": "sbx-1"}, "", ("sbx-1", ENVD_PORT)),
        ("/", {"e2b-sandbox-id": "sbx-1", "e2b-sandbox-port": "80"}, "", ("sbx-1", 80)),
        ("/", {"e2b-sandbox-id": "sbx-1", "e2b-sandbox-port": "99999"}, "", ("sbx-1", 99999)),
        ("/", {"e2b-sandbox-id": "sbx-1", "e2b-sandbox-port": "100000"}, "", ("sbx-1", 65536)),
        ("/", {"e2b-sandbox-id": "sbx-1", "e2b-sandbox-port": "-1"}, "", ("sbx-1", 65536)),
        ("/", {"e2b-sandbox-id": "sbx-1", "e2b-sandbox-port": "x"}, "", ("sbx-1", 65536)),
        ("/", {"host": "3000-sbx-1.sbx.test"}, "", ("sbx-1", 3000)),
        ("/v1/x", {"host": "3000-SBX-1.SBX.TEST:8080"}, "", ("sbx-1", 3000)),
        ("/v1/x", {"host": "api.sbx.test"}, "", ("", 0)),
        ("/v1/x", {"host": "other.sbx.test"}, "", None),
        ("/v1/x", {"host": "3000-sbx-1.other.test"}, "", None),
        ("/v1/x", {"host": "3000-sbx-1sbx.test"}, "", None),
        ("/v1/x", {"host": "3000-a.b.sbx.test"}, "", None),
        ("/v1/x", {"host": "sbx.test"}, "", None),
        ("/", {"host": "3000-sbx-1.sbx.test", "e2b-sandbox-id": "sbx-2"}, "", ("sbx-1", 3000)),
    ],
)  # fmt: skip
def test_a_request_is_e2bs_by_its_host_header_or_path(
    path: str, headers: dict[str, str], query: str, place: tuple[str, int] | None
) -> None:
    nothing: Any = None
    entrance = Entrance(nothing, nothing, "sbx.test", nothing)
    scope = {"path": path, "query_string": query.encode()}
    assert place == entrance._place(scope, headers)


def test_without_a_domain_no_host_name_means_anything() -> None:
    nothing: Any = None
    entrance = Entrance(nothing, nothing, "", nothing)
    for host in ("3000-sbx-1.sbx.test", "3000-sbx-1.", "api.", "api", ""):
        assert "" == entrance.name_in({"host": host})


async def test_the_first_of_two_headers_counts(here: Here) -> None:
    """As elsewhere in the server: a proxy in front may have looked at that one."""
    live = here.live(notes=Notes())
    token = here.shared.tokens.of(live)
    for first, second, status in ((token, "x", 200), ("x", token, 401)):
        headers = [("host", "localhost"), ("e2b-sandbox-id", live.sandbox_id)]
        headers += [("x-access-token", first), ("x-access-token", second)]
        assert status == (await here.ask("GET", ENVS, headers=headers)).status_code


# -- keys ----------------------------------------------------------------------------------------


async def status(here: Here, method: str = "GET", path: str = "/v2/sandboxes", **more: Any) -> int:
    answered = await here.ask(method, path, **more)
    assert here.is_idle(), "what was counted is given back"
    return answered.status_code


async def test_the_api_is_for_keys_of_users_and_for_readers_that_only_read(here: Here) -> None:
    for scope, read, written in (
        (USER, 200, 201),
        (ADMIN, 200, 201),
        (READ_ONLY, 200, 403),
        (METRICS, 403, 403),
    ):
        headers = {"x-api-key": here.key(scope=scope)}
        assert read == await status(here, headers=headers), scope
        assert written == await status(here, "POST", json={}, headers=headers), scope
    live = here.live()
    maker = here.service.authenticator.caller(here.key())
    assert maker is not None
    _, token = here.service.authenticator.make_token(maker, live.sandbox_id, "ann", None)
    assert 403 == await status(here, headers={"x-api-key": token})


async def test_a_key_comes_in_either_header_and_x_api_key_counts(here: Here) -> None:
    key = here.key()
    bearer = {"authorization": f"Bearer {key}"}
    assert 200 == await status(here, headers=bearer)
    assert 200 == await status(here, headers={"authorization": f"bearer  {key} "})
    assert 200 == await status(here, headers={"x-api-key": f" {key} "})
    for wrong in (
        {},
        {"x-api-key": ""},
        {"x-api-key": "e2b_00"},
        {"authorization": key},
        {"authorization": f"Basic {key}"},
        {**bearer, "x-api-key": "e2b_00"},
    ):
        answered = await here.ask("GET", "/v2/sandboxes", headers=wrong)
        assert (401, 401) == (answered.status_code, answered.json()["code"]), wrong


async def test_the_unix_socket_needs_no_key_until_a_gateway_has_used_it(here: Here) -> None:
    peer = Peer(0)
    assert 200 == await status(here, state={PEER: peer}, host="any.name")
    assert 401 == await status(here, state={PEER: peer}, headers={"x-api-key": "e2b_00"})
    peer.is_gateway = True
    assert 401 == await status(here, state={PEER: peer})
    assert 200 == await status(here, state={PEER: peer}, headers={"x-api-key": here.key()})


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("ringfence.test", True),
        ("api.sbx.test", True),
        ("evil.test", False),
        ("sbx.test", False),
        ("api.sbx.test.evil.test", False),
    ],
)
async def test_a_host_name_is_the_servers_or_of_its_domain(
    here: Here, host: str, accepted: bool
) -> None:
    """A page may have pointed a name of its own at the server."""
    headers = {"x-api-key": here.key()}
    assert (200 if accepted else 403) == await status(here, host=host, headers=headers)


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({}, True),
        ({"origin": APP}, True),
        ({"origin": APP.upper()}, True),
        ({"origin": "https://evil.test"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
    ],
)
async def test_a_page_is_one_that_is_accepted_or_has_a_signed_url(
    here: Here, headers: dict[str, str], accepted: bool
) -> None:
    live = here.live(notes=Notes())
    token = here.shared.tokens.of(live)
    wanted = 200 if accepted else 403
    assert wanted == await status(here, headers={"x-api-key": here.key(), **headers})
    for port, path in ((None, ENVS), (INTERPRETER_PORT, "/health")):
        answered = await here.ask("GET", path, headers={**inside(live, token, port), **headers})
        assert wanted == answered.status_code, port
        shown = answered.headers.get("access-control-allow-origin")
        assert headers.get("origin") == shown or not accepted or "origin" not in headers
        assert accepted or shown is None, "a script may not even read the refusal"
    # Of a server inside the origin is its own; the backend of this test has none.
    assert (
        403
        != (await here.ask("GET", "/x", headers={**inside(live, token, 80), **headers})).status_code
    )


@pytest.mark.parametrize(
    ("method", "more", "is_preflight"),
    [
        ("OPTIONS", {}, True),
        ("GET", {}, False),
        ("OPTIONS", {"access-control-request-method": None}, False),
        ("OPTIONS", {"origin": None}, False),
        ("OPTIONS", {"e2b-sandbox-port": "80"}, False),
    ],
)
async def test_only_a_question_of_a_browser_is_answered_without_a_key(
    here: Here, method: str, more: dict[str, Any], is_preflight: bool
) -> None:
    live = here.live()
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-api-key",
        "e2b-sandbox-id": live.sandbox_id,
        **more,
    }
    headers = {name: value for name, value in asked.items() if value is not None}
    answered = await here.ask(method, ENVS, headers=headers)
    assert is_preflight == (204 == answered.status_code)
    if is_preflight:
        assert APP == answered.headers["access-control-allow-origin"]
        assert "x-api-key" == answered.headers["access-control-allow-headers"]
        assert "DELETE" in answered.headers["access-control-allow-methods"]
        refused = await here.ask(method, ENVS, headers={**headers, "origin": "https://evil.test"})
        assert 403 == refused.status_code


# -- tokens --------------------------------------------------------------------------------------


async def test_each_token_opens_what_it_is_for_in_one_sandbox(here: Here) -> None:
    live, other = here.live(notes=Notes()), here.live(notes=Notes())
    tokens = here.shared.tokens
    own, traffic = tokens.of(live), tokens.of_traffic(live)
    for port, path, opening in (
        (None, ENVS, {own}),
        (INTERPRETER_PORT, "/health", {own, traffic}),
    ):
        for shown in (own, traffic, tokens.of(other), tokens.of_traffic(other), "", own[:-1], "é"):
            expected = 200 if shown in opening else 401
            headers = inside(live, shown, port)
            answered = await here.ask(
                "GET", path, headers={k: v.encode("latin-1") for k, v in headers.items()}
            )
            assert expected == answered.status_code, (port, shown)
    assert 204 == await status(here, path="/health", headers=inside(live, ""))
    for path in ("/healthy", "/health/", "/files/health"):
        assert 401 == await status(here, path=path, headers=inside(live, "")), path


@pytest.mark.parametrize("is_public", [False, True])
async def test_ports_are_public_or_need_a_token(here: Here, is_public: bool) -> None:
    live, of_v1 = here.live(notes=Notes(is_public=is_public)), here.live()
    traffic = here.shared.tokens.of_traffic(live)
    for shown in ("", "x", here.shared.tokens.of_traffic(of_v1)):
        answered = await here.ask("GET", "/", headers=inside(live, shown, 80))
        assert is_public == (403 != answered.status_code), shown
        assert here.is_idle()
    for name in ("x-access-token", "e2b-traffic-access-token"):
        headers = {"e2b-sandbox-id": live.sandbox_id, "e2b-sandbox-port": "80", name: traffic}
        assert 403 != await status(here, path="/", headers=headers), name
    assert 403 == await status(here, path="/", headers=inside(of_v1, "", 80)), "not of E2B's API"


async def test_a_sandbox_that_is_over_or_a_port_beyond_all_is_not_there(here: Here) -> None:
    live = here.live(notes=Notes())
    token = here.shared.tokens.of(live)
    for port, expected in ((65535, 400), (65536, 502), (99999, 502)):
        assert expected == await status(here, path="/", headers=inside(live, token, port)), port
    gone = inside(live, token)
    assert 200 == await status(here, path=ENVS, headers=gone)
    live.state = SessionState.TERMINATED  # its end takes a moment
    assert 502 == await status(here, path=ENVS, headers=gone)
    live.state = SessionState.ACTIVE
    here.manager.terminate(live.id)
    answered = await here.ask("GET", ENVS, headers=gone)
    assert (502, live.sandbox_id) == (answered.status_code, answered.json()["sandboxId"])


async def test_a_request_that_its_key_would_end_is_forgotten_with_its_answer(here: Here) -> None:
    record, _text = here.service.authenticator.make(owner="ann", scope="user")
    live = here.live(notes=Notes(key=record.id))
    token = here.shared.tokens.of(live)
    for path, port in ((ENVS, None), ("/none", None), ("/", 65535), ("/health", INTERPRETER_PORT)):
        await here.ask("GET", path, headers=inside(live, token, port))
        assert here.is_idle(), (path, port)


async def test_a_request_waits_for_the_files_that_name_the_sandbox(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written while the client receives its sandbox; of two writers the last one counts."""
    written = [threading.Event(), threading.Event()]
    begun: list[str] = []

    def write(live: Live) -> None:
        begun.append(live.sandbox_id)
        written[len(begun) - 1].wait(30)

    monkeypatch.setattr(call_module, "write_files", write)
    live = here.live(notes=Notes())
    headers, shared = inside(live, here.shared.tokens.of(live)), here.shared
    here.manager.suspend(live.id)
    shared.introduce(live)
    assert {} == shared._introduced, "a paused one has them already"
    here.manager.resume(live.id)
    shared.introduce(live)
    first = shared._introduced[live.sandbox_id]
    while not begun:
        await asyncio.sleep(0.001)
    shared.introduce(live)
    written[0].set()
    await first
    await asyncio.sleep(0)
    assert live.sandbox_id in shared._introduced
    asking = asyncio.ensure_future(status(here, path=ENVS, headers=headers))
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    written[1].set()
    assert 200 == await asking
    assert {} == shared._introduced


@pytest.mark.parametrize("ends", [False, True])
async def test_a_sandbox_that_is_restored_in_its_place_is_waited_for(
    here: Here, ends: bool
) -> None:
    """Or it is saved for another node, and has ended when the wait is over."""
    live = here.live(notes=Notes())
    headers = inside(live, here.shared.tokens.of(live))
    moving: Future[None] = Future()
    live.moving = moving
    asking = asyncio.ensure_future(status(here, path=ENVS, headers=headers))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    if ends:
        here.manager.end(live, EVICTED)
    live.moving = None
    moving.set_result(None)
    assert (502 if ends else 200) == await asking
    assert here.is_idle()


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_stranger_wakes_nothing(here: Here, wakes: bool) -> None:
    live = here.live(notes=Notes(auto_resume=wakes, is_public=False))
    tokens = here.shared.tokens
    own, traffic = tokens.of(live), tokens.of_traffic(live)
    here.manager.suspend(live.id)
    suspended = SessionState.SUSPENDED
    for path, port, shown, refused in (
        (ENVS, None, "", 401),
        (ENVS, None, traffic, 401),
        ("/", 80, "", 403),
        ("/health", INTERPRETER_PORT, "", 401),
    ):
        answered = await here.ask("GET", path, headers=inside(live, shown, port))
        assert (refused if wakes else 502, suspended) == (answered.status_code, live.state), path
    assert 502 == await status(here, path="/health", headers=inside(live, own))
    assert suspended == live.state, "its health is that of a sandbox that does not run"
    for path, port, shown in (
        (ENVS, None, own),
        ("/", 80, traffic),
        ("/health", INTERPRETER_PORT, own),
    ):
        await here.ask("GET", path, headers=inside(live, shown, port))
        assert (SessionState.ACTIVE if wakes else suspended) == live.state, path
        if wakes:
            here.manager.suspend(live.id)


async def test_a_token_is_good_for_as_long_as_the_key_that_made_the_sandbox(here: Here) -> None:
    """Of its own owner: a client of `/v1` writes its metadata itself, and may name another's key."""
    record, _ = here.service.authenticator.make(owner="ann", scope=USER)
    strangers, _ = here.service.authenticator.make(owner="bob", scope=USER)
    live = here.live(notes=Notes(key=record.id))
    stolen = here.live(notes=Notes(key=strangers.id))
    keyless = here.live(notes=Notes())
    tokens = here.shared.tokens

    def opens(each: Live) -> Any:
        return status(here, path=ENVS, headers=inside(each, tokens.of(each)))

    assert [200, 401, 200] == [await opens(each) for each in (live, stolen, keyless)]
    here.service.authenticator.remove(record.id, Caller("ops", ADMIN), this_key=True)
    assert [401, 401, 200] == [await opens(each) for each in (live, stolen, keyless)]


async def test_a_signed_url_opens_one_file_for_one_operation(here: Here) -> None:
    live, other = here.live(notes=Notes()), here.live(notes=Notes())
    at = f"{here.root(live)}/home/user"
    for name in "ab":
        Path(f"{at}/{name}").write_text(name)

    def signed(path: str, operation: str = "read", until: str = "") -> str:
        import base64
        import hashlib

        token = here.shared.tokens.of(live)
        text = ":".join([path, operation, "", token, *([until] if until else [])])
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        more = f"&signature_expiration={until}" if until else ""
        return f"/files?path={path}&signature={quote(f'v1_{digest}')}{more}"

    def named(each: Live) -> dict[str, str]:
        return {"e2b-sandbox-id": each.sandbox_id}

    now = int(time.time())
    late, early = str(now - 10), str(now + 1000)
    for url, method, headers, expected in (
        (signed("/home/user/a"), "GET", named(live), 200),
        (signed("/home/user/a"), "HEAD", {}, 405),  # E2B has no such route; it is let in as reading
        (signed("/home/user/a"), "GET", {}, 200),
        (signed("/home/user/a"), "GET", named(other), 401),
        (signed("/home/user/a"), "POST", named(live), 401),
        (signed("/home/user/a", "write"), "GET", named(live), 401),
        (signed("/home/user/c", "write"), "POST", named(live), 200),
        (signed("/home/user/c", "write"), "POST", {}, 200),
        (signed("/home/user/a", "read", early), "GET", named(live), 200),
        (signed("/home/user/a", "read", late), "GET", named(live), 401),
        (signed("/home/user/a", "read", late), "GET", {}, 401),
        (signed("/home/user/a").replace("user/a", "user/b"), "GET", {}, 401),
        (signed("/home/user/a").replace("/files", "/envs"), "GET", named(live), 401),
        (signed("/home/user/a")[:-1], "GET", {}, 401),
    ):
        answered = await here.ask(method, url, headers=headers)
        assert expected == answered.status_code, (url, method, headers)
    words = (await here.ask("GET", signed("/home/user/a", "read", late))).json()["message"]
    assert "signature is already expired" == words


async def test_a_page_is_let_in_by_a_signature_for_files_alone(here: Here) -> None:
    """Anybody can write the word into a query: what is not a file needs a page that is accepted."""
    live = here.live(notes=Notes())
    own = inside(live, here.shared.tokens.of(live))
    for path, origin, expected in (
        (f"{ENVS}?signature=x", APP, 200),
        (f"{ENVS}?signature=x", "https://evil.test", 403),
        ("/files/x?signature=x", "https://evil.test", 403),
        ("/files?path=/none&signature=x", "https://evil.test", 404),
    ):
        answered = await here.ask("GET", path, headers={**own, "origin": origin})
        assert expected == answered.status_code, (path, origin)
        shown = answered.headers.get("access-control-allow-origin")
        assert (origin if expected != 403 else None) == shown


# -- gateways ------------------------------------------------------------------------------------


@pytest.fixture
def node(make: Make) -> Here:
    """A node of a cluster."""
    return make(settings=Settings(gateway_secret=SECRET))


def sealed(caller: Caller, method: str, target: str, secret: bytes = SECRET) -> dict[str, str]:
    return {gateways.HEADER: gateways.seal(secret, caller, method, target.encode()).decode()}


async def test_a_gateways_word_opens_a_node_for_the_request_that_it_sealed(node: Here) -> None:
    path = "/v2/sandboxes?limit=5"
    good = sealed(Caller("ann", USER), "GET", path)
    assert 200 == await status(node, path=path, headers=good, host="any.name")
    assert 200 == await status(node, path=path, headers={**good, "origin": "https://page.test"})
    for wrong in (
        sealed(Caller("ann", USER), "POST", path),
        sealed(Caller("ann", USER), "GET", "/v2/sandboxes"),
        sealed(Caller("ann", USER), "GET", path, b"x" * 32),
        {gateways.HEADER: "x"},
    ):
        peer = Peer(0)
        assert 401 == await status(node, path=path, headers=wrong)
        assert 401 == await status(node, path=path, headers=wrong, state={PEER: peer})
        assert peer.is_gateway, "from now on nothing counts on it that has no seal or key"


async def test_only_a_gateway_is_told_the_order_and_says_by_which_scheme_it_was_reached(
    node: Here,
) -> None:
    """A client could else have its users upload to a URL that nobody encrypts, or that is not there."""
    key, name = node.key(), "0" * 64
    made = await node.ask("POST", "/v3/templates", json={"name": "app"}, headers={"x-api-key": key})
    assert 202 == made.status_code, made.text
    path = f"/templates/{made.json()['templateID']}/files/{name}"
    for headers, scheme in (
        ({"x-api-key": key}, "http"),
        ({"x-api-key": key, FORWARDED: "https"}, "http"),
        (sealed(Caller("ann", USER), "GET", path), "http"),
        ({**sealed(Caller("ann", USER), "GET", path), FORWARDED: "https"}, "https"),
    ):
        found = await node.ask("GET", path, headers=headers)
        assert found.json()["url"].startswith(f"{scheme}://localhost/"), headers
    live, listed = node.live(notes=Notes()), "/v2/sandboxes"
    by_gateway = await node.ask("GET", listed, headers=sealed(Caller("ann", USER), "GET", listed))
    assert live.id == by_gateway.headers[lists.ORDER]
    assert lists.ORDER not in (await node.ask("GET", listed, headers={"x-api-key": key})).headers


@pytest.mark.parametrize("scope", [USER, ADMIN, READ_ONLY])
async def test_who_has_a_sandboxes_token_may_not_do_more_than_a_token_whatever_made_it(
    here: Here, scope: str
) -> None:
    record, _text = here.service.authenticator.make(owner="ann", scope=scope, max_requests=7)
    for key in (record.id, ""):
        caller = here.door.caller_of("ann", "sbx-1", key)
        assert (TOKEN, "sbx-1", "ann", key) == (
            caller.scope,
            caller.sandbox,
            caller.client,
            caller.key,
        )
        assert not caller.is_admin
        assert "ann" == caller.sees
    assert 7 == here.door.caller_of("ann", "sbx-1", record.id).max_requests


async def test_a_server_of_no_cluster_takes_nobodys_word(here: Here) -> None:
    for secret in (b"", SECRET):
        headers = sealed(Caller("ann", USER), "GET", "/v2/sandboxes", secret)
        assert 401 == await status(here, headers=headers)
        peer = Peer(0)
        assert 200 == await status(here, headers={**headers, "x-api-key": here.key()})
        assert 200 == await status(here, headers=headers, state={PEER: peer})
        assert not peer.is_gateway


async def test_scripts_of_pages_are_told_by_the_gateway_what_they_may_read(make: Make) -> None:
    """Two fields of one name would make browsers refuse the answer."""
    policy = OriginPolicy(frozenset(), frozenset({APP}))
    node = make(settings=Settings(gateway_secret=SECRET, origin_policy=policy))
    page = {"origin": APP}
    of_gateway = {**sealed(Caller("ann", USER), "GET", "/v2/sandboxes"), **page}
    for headers, shown in (
        (of_gateway, None),
        ({"x-api-key": node.key(), **page}, APP),
    ):
        answered = await node.ask("GET", "/v2/sandboxes", headers=headers)
        assert (200, shown) == (
            answered.status_code,
            answered.headers.get("access-control-allow-origin"),
        )


async def test_a_gateway_is_told_with_which_key_a_sandbox_was_made(node: Here) -> None:
    live = node.live(notes=Notes(key="key-1"))
    place = {"e2b-sandbox-id": live.sandbox_id}
    headers = {**sealed(Caller("ops", ADMIN), "GET", GRANT), **place}
    told = await node.ask("GET", GRANT, headers=headers)
    assert {"sandbox": live.sandbox_id, "client": "ann", "key": "key-1"} == told.json()
    unsealed = await node.ask("GET", GRANT, headers=place)
    assert 401 == unsealed.status_code
    of_token = sealed(Caller("ann", TOKEN, sandbox=live.sandbox_id), "GET", GRANT)
    assert "key" not in (await node.ask("GET", GRANT, headers={**of_token, **place})).text


@pytest.mark.parametrize(
    ("client", "key", "opens"),
    [("ann", "key-1", True), ("bob", "key-1", False), ("ann", "key-2", False), ("ann", "", False)],
)
async def test_a_token_behind_a_gateway_is_of_the_client_and_key_that_it_looked_at(
    node: Here, client: str, key: str, opens: bool
) -> None:
    """Another sandbox may have had this id when the gateway asked."""
    live = node.live(notes=Notes(key="key-1"))
    seal = sealed(Caller(client, TOKEN, sandbox=live.sandbox_id, gateway_key=key), "GET", ENVS)
    for token in (node.shared.tokens.of(live), "wrong"):
        headers = {**inside(live, token), **seal}
        expected = 200 if opens and token != "wrong" else 401
        assert expected == await status(node, path=ENVS, headers=headers)


# -- counts, logs and answers --------------------------------------------------------------------


async def test_whatever_becomes_of_a_request_it_is_counted_no_longer(here: Here) -> None:
    live = here.live(notes=Notes(is_public=True))
    token = here.shared.tokens.of(live)
    key = {"x-api-key": here.key()}
    for method, path, more, expected in (
        ("GET", "/v2/sandboxes", {"headers": key}, 200),
        ("POST", "/v2/sandboxes", {"headers": key, "content": b"{"}, 400),
        ("POST", "/v2/sandboxes", {"headers": key, "content": b"[]"}, 400),
        ("GET", "/sandboxes/none", {"headers": key}, 404),
        ("PUT", "/v2/sandboxes", {"headers": key}, 405),
        ("GET", "/nodes", {"headers": key}, 501),
        ("GET", "/files?path=/none", {"headers": inside(live, token)}, 404),
        ("POST", "/files", {"headers": inside(live, token), "content": b"1"}, 400),
        ("POST", "/process.Process/List", {"headers": inside(live, token), "content": b"{"}, 400),
        ("GET", "/", {"headers": inside(live, token, 80)}, 400),
        ("POST", "/", {"headers": inside(live, token, 80), "content": b"1" * 9000}, 400),
    ):
        answered = await here.ask(method, path, **more)
        assert expected == answered.status_code, (method, path, answered.text)
        assert here.is_idle(), (method, path)


@pytest.mark.parametrize(
    ("path", "query", "port", "token", "expected"),
    [
        (ENVS, "", None, True, 501),
        (ENVS, "", None, False, 401),
        ("/files", "path=a&signature=x", None, False, 401),
        ("/health", "", INTERPRETER_PORT, True, 501),
        ("/", "", 80, True, 400),
    ],
)
async def test_a_websocket_is_for_ports_alone(
    here: Here, path: str, query: str, port: int | None, token: bool, expected: int
) -> None:
    """Elsewhere it is refused as a request would be, and is no fault of the server's."""
    live = here.live(notes=Notes())
    headers = inside(live, here.shared.tokens.of(live) if token else "", port)
    sent = await here.raw("GET", path, [], headers, query=query, kind="websocket")
    assert expected == sent[0]["status"]
    assert here.is_idle()
    counted = here.service.requests.render(0)
    assert f'status="{expected}"' in counted
    assert 'status="499"' not in counted


async def test_a_websocket_by_a_signed_url_alone_is_refused(here: Here) -> None:
    sent = await here.raw("GET", "/files", [], {}, query="signature=x", kind="websocket")
    assert 401 == sent[0]["status"]


async def test_a_bug_is_the_servers_fault_and_tells_nothing(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = here.live(notes=Notes())
    key = {"x-api-key": here.key()}

    def fail(*_args: Any, **_more: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(here.manager.index, "find", fail)
    for path, headers in (
        (f"/sandboxes/{live.sandbox_id}", key),
        ("/process.Process/List", inside(live, here.shared.tokens.of(live))),
    ):
        answered = await here.ask("GET", path, headers=headers)
        assert 500 == answered.status_code, path
        assert "a bug" not in answered.text
        assert here.is_idle()


async def test_an_answer_that_breaks_off_is_not_followed_by_another(here: Here) -> None:
    live = here.live(notes=Notes())
    sent: list[str] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            raise OSError("the client is gone")

    scope = {
        "type": "http",
        "method": "GET",
        "path": ENVS,
        "raw_path": ENVS.encode(),
        "query_string": b"",
        "headers": [
            (name.encode(), value.encode())
            for name, value in {
                "host": "localhost",
                **inside(live, here.shared.tokens.of(live)),
            }.items()
        ],
    }
    with pytest.raises(OSError, match="gone"):
        await here.door(scope, receive, send)
    assert ["http.response.start", "http.response.body"] == sent
    assert here.is_idle()


@pytest.mark.parametrize(
    ("error", "is_rpc", "is_inside", "expected", "code"),
    [
        (ApiError(418, "x"), False, False, 418, 418),
        (ApiError(401, "x"), False, True, 401, 401),
        (ApiError(401, "x"), True, True, 401, "unauthenticated"),
        (ApiError(404, "x"), True, True, 404, 404),
        (RpcError("not_found", "x"), True, True, 404, "not_found"),
        (RpcError("not_found", "x"), False, True, 404, 404),
        (RpcError("resource_exhausted", "x"), False, False, 429, 429),
        (errors.FileNotFound("x"), True, True, 404, "not_found"),
        (errors.FileNotFound("x"), False, True, 404, 404),
        (errors.SandboxLost("x"), False, True, 502, 502),
        (errors.SandboxLost("x"), False, False, 404, 404),
        (errors.InvalidRequest("x", field="f"), False, False, 400, 400),
        (errors.Unsupported("x", backend="b", operation="o"), False, False, 400, 400),
        (errors.StorageFull("x"), False, False, 507, 507),
        (errors.ResourceExhausted("x"), False, False, 503, 503),
        (errors.TooManyRequests("x"), False, False, 429, 429),
        (errors.Unauthenticated("x"), False, False, 401, 401),
        (errors.Forbidden("x"), False, False, 403, 403),
        (errors.LifecycleError("x"), False, False, 409, 409),
        (errors.TooLarge("x"), False, False, 413, 413),
        (errors.IoError("x"), False, False, 500, 500),
        (ValueError("secret"), False, False, 500, 500),
        (ValueError("secret"), True, True, 500, "internal"),
    ],
)  # fmt: skip
def test_each_error_has_its_status_in_each_form(
    error: Exception, is_rpc: bool, is_inside: bool, expected: int, code: object
) -> None:
    answered = _error_response(error, is_rpc=is_rpc, is_inside=is_inside)
    form = json.loads(bytes(answered.body))

    assert (expected, code) == (answered.status_code, form["code"])
    assert "secret" not in form["message"]
    if isinstance(error, errors.InvalidRequest):
        assert "f: x" in form["message"], "the field is named"


async def test_a_request_is_written_down_with_its_caller_and_no_token(
    make: Make, tmp_path: Path
) -> None:
    audit = Audit(str(tmp_path))
    here = make(audit=audit)
    key, live = here.key(), here.live(notes=Notes())
    token = here.shared.tokens.of(live)
    await here.ask("POST", "/v2/sandboxes", headers={"x-api-key": key}, json={})
    await here.ask("GET", "/v2/sandboxes", headers={"x-api-key": key})
    await here.ask("POST", "/files?path=a", headers=inside(live, token), content=b"1")
    await here.ask("GET", ENVS, headers=inside(live, "wrong"))
    audit.close()

    done = [json.loads(each) for each in (tmp_path / "audit.log").read_text().splitlines()]
    (refused,) = [json.loads(each) for each in (tmp_path / "refused.log").read_text().splitlines()]
    made, wrote = done
    assert ("ann", "POST", "/v2/sandboxes", 201) == tuple(
        made[name] for name in ("client", "method", "path", "status")
    )
    assert made["key"].startswith("key-")
    assert ("ann", live.sandbox_id, "/files", 200) == tuple(
        wrote[name] for name in ("client", "sandbox", "path", "status")
    )
    assert (None, 401, live.sandbox_id, "127.0.0.1:5000") == tuple(
        refused[name] for name in ("client", "status", "sandbox", "peer")
    )
    assert refused["code"]
    assert token not in json.dumps([*done, refused])


async def test_what_a_stranger_writes_into_the_log_is_bounded(make: Make) -> None:
    audit = Audit(None)
    facts: list[dict[str, Any]] = []
    audit.write = lambda **given: facts.append(given)  # type: ignore[method-assign]
    here = make(audit=audit)
    for method in ("POST", "GET"):
        headers = {"e2b-sandbox-id": "s" * 100}
        await here.ask(method, "/" + "x" * 300, headers=headers)
        await here.ask(method, "/sandboxes/" + "y" * 300)
    assert facts
    assert {256} == {len(each["path"]) for each in facts}
    assert {63} == {len(each["sandbox"]) for each in facts if "sandbox" in each}


async def test_a_task_goes_on_after_the_key_of_its_request_has_ended(here: Here) -> None:
    """A connection serves the next request in the same task: that one must not be cancelled with it."""
    record, _text = here.service.authenticator.make(owner="ann", scope=USER)
    live = here.live(notes=Notes(key=record.id))
    headers = inside(live, here.shared.tokens.of(live))

    async def end_key() -> None:
        here.service.authenticator.remove(record.id, Caller("ops", ADMIN), this_key=False)
        here.service.open_requests.look()
        await asyncio.Event().wait()

    async def serve() -> tuple[int, int]:
        query = "path=/home/user/a"
        sent = await here.raw("POST", "/files", [b"x"], headers, query=query, before_end=end_key)
        task = asyncio.current_task()
        assert task is not None
        return sent[0]["status"], task.cancelling()

    assert (401, 0) == await asyncio.wait_for(asyncio.ensure_future(serve()), 30)
    assert here.is_idle()


async def test_an_address_that_is_refused_often_is_slowed_and_a_key_of_it_is_not(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.api.access import audit as audits

    monkeypatch.setattr(audits, "MOST_REFUSED", 3)
    audit = Audit(None)
    here = make(audit=audit)
    key = here.key()
    found = [await status(here) for _ in range(5)]
    assert [401, 401, 401, 429, 429] == found
    assert 200 == await status(here, headers={"x-api-key": key})
    assert 404 == await status(here, path="/sandboxes/none", headers={"x-api-key": key})
    assert 401 == await status(here, peer=("127.0.0.2", 1)), "another address"
    audit.close()


async def test_refusals_of_a_gateways_clients_are_the_gateways_to_count(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.api.access import audit as audits

    monkeypatch.setattr(audits, "MOST_REFUSED", 1)
    audit = Audit(None)
    node = make(audit=audit, settings=Settings(gateway_secret=SECRET))
    assert [401, 429] == [await status(node) for _ in range(2)]
    headers = {**sealed(Caller("", TOKEN), "GET", ENVS), "e2b-sandbox-id": "sbx-none"}
    assert 502 == await status(node, path=ENVS, headers=headers)
    audit.close()


def test_what_there_is_no_route_for() -> None:
    handler: Any = SimpleNamespace()
    routes = [
        Route("GET", "/a/{x}", handler),
        Route("POST", "/a/{x}", handler),
        Route("GET", "/b", handler),
    ]
    route, params = find_route(routes, "POST", "/a/1")
    assert ("POST", {"x": "1"}) == (route.method, params)
    for method, path, expected in (
        ("PUT", "/a/1", 405),
        ("GET", "/a/1/2", 501),
        ("GET", "/c", 501),
    ):
        with pytest.raises(ApiError) as refused:
            find_route(routes, method, path)
        assert expected == refused.value.status


async def test_a_body_is_compressed_by_gzip_or_not_at_all_and_whole(here: Here) -> None:
    live, packed = here.live(notes=Notes()), gzip.compress(b"{}")
    own = inside(live, here.shared.tokens.of(live))
    for encoding, body, expected in (
        (None, b"{}", 200),
        ("identity", b"{}", 200),
        ("gzip", packed, 200),
        ("gzip", packed[:-1], 400),
        ("gzip", packed[:-8], 400),
        ("gzip", b"{}", 400),
        ("br", b"{}", 415),
        ("deflate", b"{}", 415),
        ("gzip, gzip", packed, 415),
    ):
        headers = own if encoding is None else {**own, "content-encoding": encoding}
        answered = await here.ask("POST", "/process.Process/List", headers=headers, content=body)
        assert expected == answered.status_code, (encoding, body, answered.text)
        assert here.is_idle()
