"""Keys, requests under way and the audit log: what is looked at again, and what is kept."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from ringfence.api.access import audit as audit_module
from ringfence.api.access import gateways, keys, middleware, open_requests
from ringfence.api.access.audit import Audit, LogFile
from ringfence.api.access.caller import ADMIN, TOKEN, USER, Caller
from ringfence.api.access.keys import Authenticator
from ringfence.api.access.middleware import AccessMiddleware
from ringfence.api.access.open_requests import OpenRequests
from ringfence.api.access.peer import PEER, Peer
from ringfence.api.access.permissions import JSON, STREAM, WEBSOCKET, Found, Rule
from ringfence.api.service import Service, Settings
from ringfence.errors import InvalidRequest
from ringfence.store.records import LIVE, SandboxRecord
from ringfence.store.store import Store

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0
SECRET = b"s" * 32
OPS = Caller("ops", ADMIN)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(None)
    made.add_sandbox(SandboxRecord("sbx-1", "ann", "unconfined", LIVE, "{}", 1.0, "b"))
    yield made
    made.close()


@pytest.fixture
def authenticator(store: Store) -> Authenticator:
    return Authenticator(store)


def opened(authenticator: Authenticator, **more: Any) -> Caller:
    _, text = authenticator.make(owner="ann", scope=USER, **more)
    caller = authenticator.caller(text)
    assert caller is not None
    return caller


# -- requests under way --------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.now


class Waiting:
    """Requests that wait for ever, each in a task of its own."""

    def __init__(self, authenticator: Authenticator) -> None:
        self.requests = OpenRequests(authenticator)
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, caller: Caller, *, swallows: bool = False) -> asyncio.Task[None]:
        begun = asyncio.Event()

        async def serve() -> None:
            request = self.requests.begin(caller, "GET", None)
            begun.set()
            try:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if not swallows:
                        raise
                    await asyncio.Event().wait()
            finally:
                self.requests.end(request)

        task = asyncio.create_task(serve())
        self.tasks.append(task)
        await begun.wait()
        return task

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.requests.look()
        assert self.requests._timer is None


async def test_a_request_that_swallows_its_cut_is_cut_again(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "_AGAIN_S", 0.01)
    waiting = Waiting(authenticator)
    caller, other = opened(authenticator), opened(authenticator)
    cut, kept = await waiting.begin(caller, swallows=True), await waiting.begin(other)
    authenticator.remove(caller.key, OPS, this_key=False)
    waiting.requests.look()
    await asyncio.wait([cut], timeout=PATIENCE_S)
    assert (True, False) == (cut.done(), kept.done())
    await waiting.end()


async def test_a_request_that_was_cut_has_seconds_to_end_before_it_is_cut_again(
    authenticator: Authenticator,
) -> None:
    waiting = Waiting(authenticator)
    caller = opened(authenticator)
    cut = await waiting.begin(caller, swallows=True)
    authenticator.remove(caller.key, OPS, this_key=False)
    waiting.requests.look()
    for _ in range(50):
        await asyncio.sleep(0)
    assert 1 == cut.cancelling()
    assert waiting.requests._due - asyncio.get_running_loop().time() > 1.0
    await waiting.end()


@pytest.mark.parametrize("is_near_first", [True, False])
async def test_the_key_that_ends_first_is_looked_at_first(
    is_near_first: bool, authenticator: Authenticator
) -> None:
    now = time.time()
    waiting = Waiting(authenticator)
    callers = [opened(authenticator, expires_at=now + after) for after in (0.05, 3600.0)]
    for caller in callers if is_near_first else reversed(callers):
        await waiting.begin(caller)
    near, far = waiting.tasks if is_near_first else reversed(waiting.tasks)
    await asyncio.wait([near], timeout=5.0)
    assert (True, False) == (near.done(), far.done())
    await waiting.end()


async def test_a_key_that_ends_late_is_looked_at_before_should_the_clock_be_set(
    authenticator: Authenticator,
) -> None:
    waiting = Waiting(authenticator)
    await waiting.begin(opened(authenticator, expires_at=time.time() + 3600.0))
    assert 50.0 < waiting.requests._due - asyncio.get_running_loop().time() <= 60.0
    await waiting.end()


async def test_what_reads_or_streams_ends_with_its_key_and_what_changes_does_not(
    authenticator: Authenticator,
) -> None:
    requests, caller = OpenRequests(authenticator), opened(authenticator)
    stream, plain = (Found("/v1/x", Rule((USER,), body=body), "") for body in (STREAM, JSON))
    for method, found, is_cut in (
        ("GET", None, True),
        ("HEAD", None, True),
        (WEBSOCKET, None, True),
        ("POST", None, False),
        ("DELETE", plain, False),
        ("PUT", stream, True),
    ):
        request = requests.begin(caller, method, found)
        assert is_cut == (request is not None), method
        requests.end(request)
        assert requests.begin(Caller("local", ADMIN), method, found) is None
    assert {} == requests._requests
    requests.look()


# -- keys ----------------------------------------------------------------------------------------


def test_a_secret_that_was_rotated_away_is_not_kept(
    authenticator: Authenticator, store: Store
) -> None:
    record, first = authenticator.make(owner="ann", scope=USER)
    _, second = authenticator.rotate(record.id, 100.0)
    assert [True, True] == [Authenticator(store).caller(t) is not None for t in (first, second)]
    _, third = authenticator.rotate(record.id, 100.0)
    for known in (authenticator, Authenticator(store)):
        found = [known.caller(each) is not None for each in (first, second, third)]
        assert [False, True, True] == found
    _, fourth = authenticator.rotate(record.id, 0.0)
    [kept] = store.every_key()
    assert (None, None) == (kept.old_digest, kept.old_until)
    for known in (authenticator, Authenticator(store)):
        found = [known.caller(each) is not None for each in (third, fourth)]
        assert [False, True] == found


def test_a_use_is_written_down_once(authenticator: Authenticator, store: Store) -> None:
    record, text = authenticator.make(owner="ann", scope=USER)
    assert authenticator.caller(text)
    authenticator.flush()
    used_at = store.every_key()[0].used_at
    assert used_at is not None
    store.note_keys({record.id: used_at + 100}, time.time())  # as another server has seen it
    authenticator.flush()
    assert used_at + 100 == store.every_key()[0].used_at
    assert authenticator.caller(text)
    authenticator.flush()
    assert (store.every_key()[0].used_at or 0) < used_at + 100


def test_tokens_that_are_over_are_forgotten_and_what_was_made_since_is_not(
    authenticator: Authenticator, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = opened(authenticator)
    over, _ = authenticator.make_token(maker, "sbx-1", "ann", -1.0)
    kept, _ = authenticator.make_token(maker, "sbx-1", "ann", 100.0)
    note, made = store.note_keys, list[str]()

    def note_keys(used: Any, now: float) -> None:
        note(used, now)
        made.append(authenticator.make(owner="bob", scope=USER)[1])

    monkeypatch.setattr(store, "note_keys", note_keys)
    authenticator.flush()
    assert over.id not in authenticator._known
    assert kept.id in authenticator._known
    assert authenticator.caller(made[0]), "made while uses were written down"


def test_uses_are_due_once_in_a_while(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(keys, "time", clock)
    fresh = Authenticator(authenticator._store)
    due = []
    for clock.now in (1059.9, 1060.0, 1060.0, 1119.9, 1120.0):
        due.append(fresh.is_due)
    assert [False, True, False, False, True] == due


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rf_",
        "rf_.",
        "rf_x",
        "rf_é.é",
        "rf_x.\udc80",
        "x",
        "e2b_",
        "e2b_zz",
        "e2b_ff",
        "e2b_c3a9",
    ],
)
def test_what_can_be_no_key_opens_nothing(authenticator: Authenticator, text: str) -> None:
    record, key = authenticator.make(owner="ann", scope=USER)
    assert authenticator.caller(text) is None
    for wrong in (key[:-1], f"{key}\udc80", key.replace(".", ""), f"rf_{record.id}."):
        assert authenticator.caller(wrong) is None
    assert authenticator.caller(key)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("", True),
        ("a" * 255, True),
        ("a" * 256, False),
        ("a\nb", False),
        ("a\x1b[2J", False),
        ("é b", True),
    ],
)
def test_a_name_of_a_key_can_be_shown_in_a_line(
    authenticator: Authenticator, name: str, is_one: bool
) -> None:
    if is_one:
        assert name == authenticator.make(owner="ann", scope=USER, name=name)[0].name
        return
    with pytest.raises(InvalidRequest) as refused:
        authenticator.make(owner="ann", scope=USER, name=name)
    assert "name" == refused.value.field
    assert [] == authenticator.every()


def test_a_removed_key_and_its_tokens_stay_removed_after_a_restart(
    authenticator: Authenticator, store: Store
) -> None:
    record, text = authenticator.make(owner="ann", scope=USER)
    caller = authenticator.caller(text)
    assert caller is not None
    _, token = authenticator.make_token(caller, "sbx-1", "ann", None)
    assert [True, True] == [Authenticator(store).caller(each) is not None for each in (text, token)]
    authenticator.remove(record.id, OPS, this_key=False)
    for known in (authenticator, Authenticator(store)):
        assert [None, None] == [known.caller(each) for each in (text, token)]
    assert [] == authenticator.every()


def test_a_token_whose_maker_is_not_known_any_more_opens_nothing(
    authenticator: Authenticator,
) -> None:
    """Another gateway may have removed the key, and this one has read of it in two steps."""
    maker = opened(authenticator)
    _, text = authenticator.make_token(maker, "sbx-1", "ann", 100.0)
    token = authenticator.caller(text)
    assert token is not None
    assert authenticator.opens_until(token) > time.time()
    del authenticator._known[maker.key]
    assert authenticator.caller(text) is None
    assert authenticator.holder(token.key) is None
    assert 0.0 == authenticator.opens_until(token)


def test_a_token_of_another_key_stays_when_one_is_removed(authenticator: Authenticator) -> None:
    makers = [opened(authenticator) for _ in range(2)]
    texts = [authenticator.make_token(each, "sbx-1", "ann", None)[1] for each in makers]
    authenticator.remove(makers[0].key, OPS, this_key=False)
    assert [False, True] == [authenticator.caller(each) is not None for each in texts]
    known = authenticator.caller(texts[1])
    assert known is not None
    assert ("sbx-1", TOKEN) == (known.sandbox, known.scope)


# -- gateways ------------------------------------------------------------------------------------

SEALED = Caller("ann", TOKEN, sandbox="sbx-1", max_sandboxes=3, gateway_key="key-1")
TARGET = b"/v1/sandboxes?limit=1"


def test_a_seal_is_for_one_request_of_one_cluster_and_says_all_of_its_caller() -> None:
    header = gateways.seal(SECRET, SEALED, "GET", TARGET).decode()
    assert SEALED == gateways.unseal(SECRET, header, "GET", TARGET)
    own = Caller("bob", USER, key="key-2", max_requests=5)
    again = gateways.unseal(
        SECRET, gateways.seal(SECRET, own, "GET", TARGET).decode(), "GET", TARGET
    )
    assert Caller("bob", USER, gateway_key="key-2") == again, "the node has no such key"
    for secret, method, target in (
        (b"t" * 32, "GET", TARGET),
        (b"", "GET", TARGET),
        (SECRET, "POST", TARGET),
        (SECRET, "GET", b"/v1/sandboxes"),
        (SECRET, "GET", TARGET + b"0"),
        (SECRET, "GET", b"/v1/keys"),
    ):
        assert gateways.unseal(secret, header, method, target) is None, (secret, method, target)
    middle = len(header) // 2
    for wrong in (
        "", "x", "=", "é", "\u20ac", header[:-4], header[:40], f"{header}=", f"{header}AAAA", f" {header}",
        f"{header[:middle]}\n{header[middle:]}", header[:middle] + "*" + header[middle:],
    ):  # fmt: skip
        assert gateways.unseal(SECRET, wrong, "GET", TARGET) is None, wrong


def test_an_empty_secret_is_nobodys() -> None:
    header = gateways.seal(b"", SEALED, "GET", TARGET).decode()
    assert gateways.unseal(b"", header, "GET", TARGET) is None


def test_a_seal_of_a_scope_that_is_none_opens_nothing() -> None:
    header = gateways.seal(SECRET, Caller("ann", "root"), "GET", TARGET).decode()
    assert gateways.unseal(SECRET, header, "GET", TARGET) is None


@pytest.mark.parametrize(
    ("apart_s", "is_good"), [(-301, False), (-299, True), (299, True), (301, False)]
)
def test_a_seal_is_good_for_five_minutes_of_either_clock(
    apart_s: float, is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    header = gateways.seal(SECRET, SEALED, "GET", TARGET).decode()
    monkeypatch.setattr(time, "time", lambda: now + apart_s)
    assert is_good == (gateways.unseal(SECRET, header, "GET", TARGET) is not None)


# -- the audit log -------------------------------------------------------------------------------


def test_a_file_that_is_renamed_twice_is_made_anew_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(audit_module, "time", clock)
    path = tmp_path / "log"
    log = LogFile(str(path), 100)
    log.append(b"one\n")
    for number in range(2):
        moved = tmp_path / f"moved-{number}"
        path.rename(moved)
        clock.now += 0.5
        log.append(b"in time\n")
        assert moved.read_bytes().endswith(b"in time\n"), "it is not looked at for each line"
        clock.now += 0.5
        log.append(b"anew\n")
        assert b"anew\n" == path.read_bytes()
    path.unlink()
    clock.now += 1.0
    log.append(b"after it was removed\n")
    assert b"after it was removed\n" == path.read_bytes()
    log.append(b"x" * 80)
    assert (tmp_path / "log.1").exists()
    log.append(b"y" * 60)
    os.truncate(path, 0)
    clock.now += 1.0
    log.append(b"z" * 60)
    assert b"z" * 60 == path.read_bytes(), "what was truncated is counted anew"
    log.reopen()
    assert 0 == log.lost
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    log.append(b"not through a link\n")
    assert 1 == log.lost
    assert not (tmp_path / "elsewhere").exists()


async def test_what_was_only_counted_is_written_when_it_is_closed(tmp_path: Path) -> None:
    log = Audit(str(tmp_path))
    for status in (401, 401, 403):
        log.write(peer="10.0.0.1:1", path="/", status=status, client=None, key=None)
    log.close()
    log.write(peer="10.0.0.1:1", path="/", status=200, client="ann", key="k")
    found = [json.loads(line) for line in (tmp_path / "refused.log").read_bytes().splitlines()]
    assert [401, None] == [each.get("status") for each in found]
    assert {"more": 2, "by_status": {"401": 1, "403": 1}}.items() <= found[1].items()
    assert not (tmp_path / "audit.log").exists()
    log.close()


# -- the middleware ------------------------------------------------------------------------------


class Door:
    """The middleware in front of an application of one's own."""

    def __init__(self, store: Store, place: Path, app: Any, secret: bytes = b"") -> None:
        self.audit = Audit(str(place))
        manager = cast("Any", SimpleNamespace(store=store))
        self.service = Service(manager, Settings(gateway_secret=secret), self.audit)
        self.app = AccessMiddleware(app, self.service)
        _, self.key = self.service.authenticator.make(owner="ann", scope=USER)
        self.headers: dict[str, str] = {}

    async def __call__(self, method: str, path: str, *, state: Any = None, **given: str) -> int:
        fields = {"host": "localhost"}
        fields |= {k.replace("_", "-"): v for k, v in given.items()}
        headers = [(k.encode(), v.encode()) for k, v in fields.items()]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "headers": headers}
        scope |= {"client": ("10.0.0.1", 1), "state": dict(state or {})}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await asyncio.wait_for(self.app(scope, receive, send), PATIENCE_S)
        self.headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return int(sent[0]["status"])

    def close(self) -> None:
        self.audit.close()
        self.service.thread_pools.close()


@pytest.fixture
def doors(store: Store, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(app: Any, secret: bytes = b"") -> Door:
            door = Door(store, tmp_path, app, secret)
            stack.callback(door.close)
            return door

        yield make


async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
    if scope["method"] == "POST":
        scope["state"]["made"] = "sbx-new"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_what_was_made_is_told_to_gateways_alone_and_written_down(
    doors: Any, tmp_path: Path
) -> None:
    door, path = doors(answer, SECRET), "/v1/sandboxes"
    seal = gateways.seal(SECRET, Caller("bob", USER), "POST", path.encode()).decode()
    assert 200 == await door("POST", path, x_ringfence_caller=seal)
    assert "sbx-new" == door.headers[gateways.MADE]
    assert 200 == await door("POST", path, x_api_key=door.key)
    assert gateways.MADE not in door.headers
    got = gateways.seal(SECRET, Caller("bob", USER), "GET", path.encode()).decode()
    assert 200 == await door("GET", path, x_ringfence_caller=got)
    assert gateways.MADE not in door.headers
    for other in (seal, "forged", gateways.seal(b"x", OPS, "GET", path.encode()).decode()):
        # Of another request, of nobody, of another cluster; not even a good key helps then.
        assert 401 == await door("GET", path, x_ringfence_caller=other, x_api_key=door.key)
    # What came with a seal that is none is a gateway's, and its connection opens nothing more without one.
    peer = Peer(0)
    assert 200 == await door("GET", path, state={PEER: peer})
    assert 401 == await door("GET", path, state={PEER: peer}, x_ringfence_caller="forged")
    assert 401 == await door("GET", path, state={PEER: peer})
    assert 200 == await door("GET", path, state={PEER: peer}, x_api_key=door.key)
    await asyncio.sleep(0)
    written = [json.loads(line) for line in (tmp_path / "audit.log").read_bytes().splitlines()]
    assert [("bob", "sbx-new"), ("ann", "sbx-new")] == [(e["client"], e["made"]) for e in written]


async def test_the_first_of_two_fields_of_one_name_counts(doors: Any) -> None:
    """As at what is in front of the server, which may have looked at that one."""
    door = doors(answer)
    for first, second, status in ((door.key, "rf_x.y", 200), ("rf_x.y", door.key, 401)):
        fields = [(b"host", b"localhost"), (b"x-api-key", first.encode())]
        fields.append((b"x-api-key", second.encode()))
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/sandboxes"}
        scope |= {"raw_path": b"/v1/sandboxes", "query_string": b"", "headers": fields}
        scope |= {"client": ("10.0.0.1", 1)}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        await door.app(scope, receive, send)
        assert status == sent[0]["status"]


async def test_no_more_is_read_of_a_body_that_is_refused(doors: Any) -> None:
    door, taken = doors(answer), list[bytes]()
    fields = [(b"host", b"localhost"), (b"x-api-key", door.key.encode())]
    fields.append((b"transfer-encoding", b"chunked"))
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/sandboxes"}
    scope |= {"raw_path": b"/v1/sandboxes", "query_string": b"", "headers": fields}
    scope |= {"client": ("10.0.0.1", 1)}
    sent: list[Message] = []

    async def receive() -> Message:
        taken.append(b" {" if not taken else b"more")
        return {"type": "http.request", "body": taken[-1], "more_body": len(taken) < 50}

    async def send(message: Message) -> None:
        sent.append(message)

    await door.app(scope, receive, send)
    assert 422 == sent[0]["status"]
    assert [b" {", b"more"] == taken


async def test_who_has_a_key_is_not_told_of_the_refusals_of_its_address(
    doors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "_WINDOW_S", 60.0)
    door = doors(answer)
    for _ in range(audit_module.MOST_REFUSED):
        assert 401 == await door("GET", "/v1/sandboxes")
    assert 429 == await door("GET", "/v1/sandboxes")
    assert 403 == await door("GET", "/v1/keys", x_api_key=door.key)
    assert 200 == await door("GET", "/v1/sandboxes", x_api_key=door.key)


async def test_uses_of_keys_are_written_down_when_they_are_due(
    doors: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = doors(answer)
    is_flushed = asyncio.Event()
    loop = asyncio.get_running_loop()
    note = store.note_keys

    def note_keys(used: Any, now: float) -> None:
        note(used, now)
        loop.call_soon_threadsafe(is_flushed.set)

    monkeypatch.setattr(store, "note_keys", note_keys)
    await door("GET", "/v1/sandboxes", x_api_key=door.key)
    assert store.every_key()[-1].used_at is None
    monkeypatch.setattr(keys, "_FLUSH_S", 0.0)
    await door("GET", "/v1/sandboxes", x_api_key=door.key)
    await asyncio.wait_for(is_flushed.wait(), PATIENCE_S)
    assert store.every_key()[-1].used_at is not None


async def test_a_task_goes_on_after_its_request_was_cut(doors: Any) -> None:
    """A connection serves the next request in the same task: that one must not be cancelled with it."""

    async def slow(_scope: Scope, _receive: Receive, _send: Send) -> None:
        door.service.authenticator.remove(
            door.key.removeprefix("rf_").partition(".")[0], OPS, this_key=False
        )
        door.service.open_requests.look()
        await asyncio.Event().wait()

    door = doors(slow)

    async def serve() -> tuple[int, int]:
        fields = [(b"host", b"localhost"), (b"x-api-key", door.key.encode())]
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/sandboxes"}
        scope |= {"raw_path": b"", "query_string": b"", "headers": fields}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await door.app(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        return sent[0]["status"], task.cancelling()

    assert (401, 0) == await asyncio.wait_for(asyncio.ensure_future(serve()), PATIENCE_S)


async def test_who_does_not_read_does_not_keep_a_socket_open_whose_key_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Message] = []

    async def take(message: Message) -> None:
        sent.append(message)

    async def stall(_message: Message) -> None:
        await asyncio.Event().wait()

    async def gone(_message: Message) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(middleware, "_CLOSE_S", 0.01)
    for send in (stall, gone):
        await asyncio.wait_for(middleware.close_cut(send), PATIENCE_S)
    monkeypatch.setattr(middleware, "_CLOSE_S", PATIENCE_S)
    await middleware.close_cut(take)
    [closed] = sent
    assert ("websocket.close", 1008) == (closed["type"], closed["code"])
    assert 0 < len(closed["reason"].encode()) <= 123, "RFC 6455, 5.5"
