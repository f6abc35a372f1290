"""Routes called as functions: what each page, part and stream holds, and what is closed at its end."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect
from tests.unconfined import Unconfined

from ringfence import SandboxSpec
from ringfence.api.access.caller import ADMIN, TOKEN, Caller
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.routes import (
    contexts,
    events,
    files,
    forks,
    health,
    output,
    ports,
    sandboxes,
    snapshots,
)
from ringfence.api.service import Service
from ringfence.api.streaming.breaking import BrokenOff
from ringfence.api.streaming.cells import sending_of
from ringfence.api.streaming.runs import find_run, sandbox_of
from ringfence.errors import (
    ExecNotFound,
    InvalidRequest,
    IoError,
    LifecycleError,
    QuotaExceeded,
    SandboxNotFound,
)
from ringfence.execs.execs import Execs
from ringfence.execs.run import Run
from ringfence.model.acquire import AcquireOptions
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.spool.order import ERR, OUT
from ringfence.spool.reader import Reader

pytestmark = pytest.mark.anyone

ANN, BOB, OPS = Caller("ann"), Caller("bob"), Caller("ops", ADMIN)
PATIENCE_S = 60.0
MUCH = 400_000


class Scene:
    """A service over sandboxes that confine nothing, and the execs of all."""

    def __init__(self, stack: ExitStack) -> None:
        backend = Unconfined()
        stack.callback(backend.close)
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        self.manager = stack.enter_context(
            SessionManager(config, backends=[backend], background=False)
        )
        self.service = Service(self.manager)
        stack.callback(self.service.thread_pools.close)
        self.execs = stack.enter_context(closing(Execs(self.manager)))

    def live(self, owner: str = "ann") -> Live:
        found = self.manager.index.find(self.manager.acquire(client_id=owner).id)
        assert found is not None
        return found

    def start(self, live: Live, script: str, **options: Any) -> Run:
        return self.execs.start(live, ExecRequest(("sh", "-c", script), **options))

    def over(self, live: Live, script: str, **options: Any) -> Run:
        run = self.start(live, script, **options)
        run.done.result(PATIENCE_S)
        return run


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


@pytest.fixture
def live(scene: Scene) -> Iterator[Live]:
    made = scene.live()
    yield made
    scene.manager.terminate(made.id)


async def body_of(response: Any) -> bytes:
    return b"".join([bytes(piece) async for piece in response.body_iterator])


def descriptors_of(path: Path) -> int:
    """How many descriptors this process has on a file."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
        except OSError:
            pass
    return found


# -- files ---------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "x"
    made.write_bytes(b"0123456789")
    return made


async def read(scene: Scene, live: Live, path: Path, range_: str = "", tag: str = "") -> Any:
    return await files.read(live.sandbox_id, str(path), scene.service, ANN, range_, tag)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 99])
async def test_a_part_is_of_the_file_as_it_was_or_the_whole_is_sent(
    scene: Scene, live: Live, path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(files, "_CHUNK", chunk)
    whole = await read(scene, live, path)
    tag = whole.headers["etag"]
    assert (200, b"0123456789") == (whole.status_code, await body_of(whole))
    assert "content-range" not in whole.headers
    part = await read(scene, live, path, "bytes=2-6", tag)
    assert (206, "5", "bytes 2-6/10", tag) == (
        part.status_code,
        *(part.headers[name] for name in ("content-length", "content-range", "etag")),
    )
    assert b"23456" == await body_of(part)
    path.write_bytes(b"abcdefghijk")
    changed = await read(scene, live, path, "bytes=2-6", tag)
    assert (200, b"abcdefghijk") == (changed.status_code, await body_of(changed))
    assert tag != changed.headers["etag"]
    path.write_bytes(b"kjihgfedcba")  # in place, and as long
    os.utime(path, ns=(1, 1))
    again = await read(scene, live, path)
    assert b"kjihgfedcba" == await body_of(again)
    assert changed.headers["etag"] != again.headers["etag"]
    none = await read(scene, live, path, "bytes=11-")
    assert (416, "bytes */11") == (none.status_code, none.headers["content-range"])
    assert 0 == descriptors_of(path)


async def test_a_file_that_becomes_shorter_does_not_look_whole(
    scene: Scene, live: Live, path: Path
) -> None:
    response = await read(scene, live, path)
    path.write_bytes(b"01234")
    with pytest.raises(IoError, match="became shorter"):
        await body_of(response)
    assert 0 == descriptors_of(path)
    assert not live.use.is_attended


async def test_a_client_that_stops_reading_leaves_no_file_open_and_no_sandbox_in_use(
    scene: Scene, live: Live, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 2)
    response = await read(scene, live, path)
    async with aclosing(response.body_iterator) as pieces:
        assert b"01" == await anext(pieces)
        assert (1, True) == (descriptors_of(path), live.use.is_attended)
    assert (0, False) == (descriptors_of(path), live.use.is_attended)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10])
@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, 4), (3, 7), (4, 8), (9, 10), (0, None)])
async def test_a_part_of_a_pipe_is_cut_out_of_what_comes(
    scene: Scene,
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    start: int,
    end: int | None,
) -> None:
    """Some backends have one in place of the file: it cannot be read from its middle."""
    monkeypatch.setattr(files, "_CHUNK", chunk)
    ours, theirs = os.pipe()
    os.write(theirs, b"0123456789")
    os.close(theirs)
    file = os.fdopen(ours, "rb")
    found = b"".join([each async for each in files._pieces(scene.service, live, file, start, end)])
    assert b"0123456789"[start:end] == found
    assert file.closed


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 6])
async def test_a_directory_comes_in_pages_with_each_entry_once(
    scene: Scene, live: Live, tmp_path: Path, limit: int
) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        (tmp_path / name).write_text("")
    found: list[str] = []
    pages, cursor = 0, ""
    while True:
        response = await files.list_(
            live.sandbox_id, scene.service, ANN, str(tmp_path), limit, cursor
        )
        page = json.loads(bytes(response.body))
        found += [each["name"] for each in page["items"]]
        pages += 1
        if (cursor := page["next_cursor"]) is None:
            break
    assert names == found
    assert -(-5 // limit) == pages


# -- output --------------------------------------------------------------------------------------


async def bytes_of(scene: Scene, run: Run, stream: int, offset: int, follow: bool) -> Any:
    return await output._bytes(scene.service, run, stream, offset, follow)


@pytest.mark.parametrize("stream", [OUT, ERR])
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("piece", [1000, 1 << 18])
async def test_a_gap_ends_a_body_and_the_next_begins_behind_it(
    scene: Scene,
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    stream: int,
    follow: bool,
    piece: int,
) -> None:
    monkeypatch.setattr(output, "_PIECE", piece)
    script = f"head -c {MUCH} /dev/zero | tr '\\0' y" + (" >&2" if stream == ERR else "")
    run = scene.over(live, script, max_output_bytes=5000)
    offset, dropped, sent, ends = 0, 0, 0, []
    while "true" not in ends:
        response = await bytes_of(scene, run, stream, offset, follow)
        missing = int(response.headers["x-ringfence-dropped-bytes"])
        assert offset + missing == int(response.headers["x-ringfence-offset"])
        body = await body_of(response)
        assert int(response.headers["content-length"]) == len(body)
        offset += missing + len(body)
        assert offset == int(response.headers["x-ringfence-next-offset"])
        dropped, sent = dropped + missing, sent + len(body)
        ends.append(response.headers["x-ringfence-end"])
    assert MUCH == offset == dropped + sent
    assert dropped > 0 < sent
    view = run.view()
    assert dropped == (view.stdout_dropped_bytes, view.stderr_dropped_bytes)[stream]
    assert len(ends) > 1, "the first ends before the gap"
    with pytest.raises(InvalidRequest) as refused:
        await bytes_of(scene, run, stream, MUCH + 1, follow)
    assert "offset" == refused.value.field
    assert b"" == await body_of(await bytes_of(scene, run, stream, MUCH, follow))


async def test_the_end_is_told_when_there_can_be_no_more(scene: Scene, live: Live) -> None:
    run = scene.start(live, "printf some; read x", stream_stdin=True)
    while run.spool.totals[OUT] < 4:
        await asyncio.sleep(0.001)
    response = await bytes_of(scene, run, OUT, 0, False)
    assert (b"some", "false") == (await body_of(response), response.headers["x-ringfence-end"])
    run.end_input()
    await asyncio.to_thread(run.done.result, PATIENCE_S)
    part = await bytes_of(scene, run, OUT, 1, False)
    assert (b"ome", "true") == (await body_of(part), part.headers["x-ringfence-end"])


async def test_what_is_dropped_before_it_was_sent_breaks_the_body_off(
    scene: Scene, live: Live
) -> None:
    run = scene.over(live, "printf 0123456789")
    reader = Reader(run.spool.tracks[OUT], 5)
    pieces = output._until(scene.service, reader, 12, b"01234")
    assert [b"01234", b"56789"] == [await anext(pieces) for _ in range(2)]
    with pytest.raises(BrokenOff):
        await anext(pieces)
    assert reader._fd == -1


async def take_all(pieces: AsyncIterator[bytes], into: list[bytes]) -> None:
    async for each in pieces:
        into.append(each)


@pytest.mark.parametrize("most", [5000, MUCH])
async def test_what_follows_a_gap_is_not_sent_as_if_it_followed_on(
    scene: Scene, live: Live, most: int
) -> None:
    """Control: where nothing is dropped the same reading goes on to the end."""
    run = scene.over(live, f"head -c {MUCH} /dev/zero", max_output_bytes=most)
    track = run.spool.tracks[OUT]
    reader = Reader(track, 0)
    first = reader.next(1000)
    assert first is not None
    sent: list[bytes] = []
    taking = take_all(output._until(scene.service, reader, track.total, first.data), sent)
    if most == MUCH:
        await taking
    else:
        with pytest.raises(BrokenOff):
            await taking
    assert track.kept[0][1] == sum(map(len, sent))
    assert reader._fd == -1


async def test_what_is_followed_ends_before_a_gap(scene: Scene, live: Live) -> None:
    run = scene.over(live, f"head -c {MUCH} /dev/zero", max_output_bytes=5000)
    track = run.spool.tracks[OUT]
    [(begin, end), *rest] = track.kept
    assert (0, True) == (begin, bool(rest)), "there is a gap, and output behind it"
    reader = Reader(track, 0)
    first = reader.next(1000)
    assert first is not None
    pieces = [each async for each in output._follow(scene.service, run, OUT, reader, first.data)]
    assert end == sum(map(len, pieces))
    assert reader._fd == -1
    behind = Reader(track, rest[0][0])
    pieces = [each async for each in output._follow(scene.service, run, OUT, behind, b"")]
    assert track.total - rest[0][0] == sum(map(len, pieces))


# -- events --------------------------------------------------------------------------------------


async def told(stream: AsyncIterator[str], count: int) -> list[str]:
    return [await anext(stream) for _ in range(count)]


async def test_events_are_the_clients_own_in_order_and_none_is_lost(scene: Scene) -> None:
    """Those of others are passed over; what happens while the stream waits comes as well."""
    log = scene.manager.events
    for caller, kinds in ((ANN, [0, 2]), (BOB, [1]), (OPS, [0, 1, 2, 3])):
        before = log.last
        for number, owner in enumerate(("ann", "bob", "ann", "ops")):
            log.add(f"one{number}", _someone(owner))
        response = await events.events(scene.service, caller, False, before, "")
        items = json.loads(bytes(response.body))["items"]
        assert [f"one{number}" for number in kinds] == [each["kind"] for each in items]
        stream: Any = events._stream(scene.service, caller, before, False)
        async with aclosing(stream):
            pieces = await told(stream, len(kinds))
            ids = [f"id: {log.epoch}-{before + 1 + number}" for number in kinds]
            assert ids == [each.splitlines()[0] for each in pieces]
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await asyncio.to_thread(log.add, "late", _someone("bob"))
            await asyncio.to_thread(log.add, "late", _someone(caller.client))
            async with asyncio.timeout(PATIENCE_S):
                assert "event: late\n" in await waiting
            assert 1 == len(log._listeners)
        assert [] == log._listeners


async def test_what_happens_while_events_are_told_is_told_next(scene: Scene) -> None:
    log = scene.manager.events
    before = log.last
    log.add("early", _someone("ann"))
    stream: Any = events._stream(scene.service, ANN, before, False)
    async with aclosing(stream):
        assert "event: early\n" in await anext(stream)
        log.add("between", _someone("ann"))
        for _ in range(3):
            await asyncio.sleep(0)  # the stream hears of it, and has not looked yet
        async with asyncio.timeout(PATIENCE_S / 6):
            assert "event: between\n" in await anext(stream)


async def test_events_of_others_that_are_kept_no_longer_are_no_gap(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scene.manager.events
    monkeypatch.setattr(log, "_records", deque(log._records, maxlen=2))
    stream: Any = events._stream(scene.service, ANN, log.last, False)
    async with aclosing(stream):
        waiting = asyncio.ensure_future(anext(stream))
        for _ in range(4):
            log.add("other", _someone("bob"))
            for _ in range(3):
                await asyncio.sleep(0)
        log.add("mine", _someone("ann"))
        async with asyncio.timeout(PATIENCE_S / 6):
            assert "event: mine\n" in await waiting


def _someone(owner: str) -> Any:
    return SimpleNamespace(sandbox_id=f"sbx-{owner}", id=f"ses-{owner}", client_id=owner, reason="")


async def test_a_stream_of_events_goes_on_where_it_was_or_says_what_is_missing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scene.manager.events
    log.add("first", _someone("ann"))
    at = log.last
    log.add("second", _someone("ann"))

    async def first_of(last_id: str, since: int = 0) -> str:
        response = await events.events(scene.service, ANN, True, since, last_id)
        stream: Any = response.body_iterator  # type: ignore[attr-defined]
        async with aclosing(stream):
            return str(await anext(stream))

    assert "event: second" in await first_of(f"{log.epoch}-{at}")
    assert "event: second" in await first_of("", at)
    assert "event: second" in await first_of(f"{log.epoch}-{at}", 1), "the newer word counts"
    for wrong in (f"other-{at}", f"{log.epoch}-x", f"{log.epoch}-", "x"):
        assert (await first_of(wrong)).startswith("event: gap\n"), wrong
    monkeypatch.setattr(log, "_records", type(log._records)(list(log._records)[-1:]))
    assert f'event: gap\ndata: {{"lost": {log.last - 1}}}\n\n' == await first_of("")
    assert [] == log._listeners


# -- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
async def test_snapshots_come_in_pages_also_those_of_one_sandbox(
    scene: Scene, live: Live, limit: int
) -> None:
    other, strangers = scene.live(), scene.live("bob")
    made = [
        (each, scene.manager.snapshot(each.id, {}, None).id)
        for each in (live, other, live, strangers, live)
    ]

    async def pages(caller: Caller, sandbox_id: str | None) -> list[str]:
        found, cursor = [], ""
        while True:
            response = await snapshots.list_(scene.service, caller, sandbox_id, limit, cursor)
            page = json.loads(bytes(response.body))
            assert len(page["items"]) <= limit
            found += [each["id"] for each in page["items"]]
            if page["next_cursor"] is None:
                return found
            assert limit == len(page["items"])
            cursor = page["next_cursor"]

    try:
        assert sorted(name for each, name in made if each is not strangers) == await pages(
            ANN, None
        )
        assert sorted(name for _, name in made) == await pages(OPS, None)
        assert [name for each, name in made if each is strangers] == await pages(BOB, None)
        own = scene.manager.snapshots(None)[0].session_id
        theirs = {each.session_id for each in scene.manager.snapshots("bob")}
        assert [] == await pages(ANN, theirs.pop())
        wanted = [each.id for each in scene.manager.snapshots("ann") if each.session_id == own]
        assert sorted(wanted) == await pages(ANN, own)
    finally:
        for _, name in made:
            scene.manager.delete_snapshot(name)
        for each in (other, strangers):
            scene.manager.terminate(each.id)


def asking() -> Any:
    """A request as routes note on it what they have made."""
    return SimpleNamespace(state=SimpleNamespace())


async def test_a_client_that_keeps_as_many_snapshots_as_it_may_takes_none(
    scene: Scene, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = Permissions(most=Ceilings(snapshots=1))
    monkeypatch.setattr(scene.service, "permissions", most)
    made: list[str] = []
    try:
        for caller, is_refused in ((ANN, False), (ANN, True), (OPS, False), (ANN, True)):
            request = asking()
            taking = snapshots.take(live.sandbox_id, request, scene.service, caller)
            if is_refused:
                with pytest.raises(QuotaExceeded):
                    await taking
                assert not hasattr(request.state, "made")
                continue
            made.append(json.loads(bytes((await taking).body))["id"])
            assert made[-1] == request.state.made
        assert {*made} == {each.id for each in scene.manager.snapshots(None)}
    finally:
        for name in made:
            scene.manager.delete_snapshot(name)


# -- sandboxes and their tokens ------------------------------------------------------------------


async def test_a_token_is_of_the_sandboxs_owner_whoever_makes_it(scene: Scene, live: Live) -> None:
    for caller in (ANN, OPS):
        request = asking()
        response = await sandboxes.make_token(live.sandbox_id, request, scene.service, caller)
        made = json.loads(bytes(response.body))
        opened = scene.service.authenticator.caller(made["key"])
        assert opened is not None
        assert ("ann", TOKEN, live.sandbox_id) == (opened.client, opened.scope, opened.sandbox)
        assert made["id"] == request.state.made == opened.key


def test_an_id_that_was_used_before_makes_no_sandbox(scene: Scene) -> None:
    mine, bobs = scene.live(), scene.live("bob")
    scene.manager.terminate(mine.id)
    for taken in (mine.sandbox_id, bobs.sandbox_id):
        before = len(scene.manager.index.all())
        with pytest.raises(InvalidRequest) as refused:
            sandboxes._create(
                scene.service, scene.execs, ANN, SandboxSpec(), AcquireOptions(preferred_id=taken)
            )
        assert "id" == refused.value.field
        assert before == len(scene.manager.index.all())
    scene.manager.terminate(bobs.id)


def test_of_all_bounds_on_sandboxes_the_lowest_is_told(scene: Scene) -> None:
    config = scene.manager.config
    server = config.max_sandboxes
    for of_client, of_key, most in (
        (None, None, server), (7, None, 7), (7, 3, 3), (3, 7, 3), (None, 0, 0), (server + 1, None, server),
    ):  # fmt: skip
        manager = SimpleNamespace(
            config=SimpleNamespace(max_sandboxes=server, max_of_client=of_client)
        )
        service: Any = SimpleNamespace(manager=manager)
        assert most == health._most_sandboxes(service, Caller("ann", max_sandboxes=of_key))


# -- tunnels -------------------------------------------------------------------------------------


class Tunnel:
    """Both ends of a WebSocket to a server inside: whether the sandbox was in use, and how it was closed."""

    subprotocol = "p"

    def __init__(self, live: Live, fails: str) -> None:
        at = f"/v1/sandboxes/{live.sandbox_id}/ports/1/ws/x".encode()
        self.scope = {"raw_path": at, "query_string": b""}
        self.live, self.fails = live, fails
        self.told: list[object] = []

    async def accept(self, subprotocol: str | None = None) -> None:
        self.told.append(subprotocol)
        if self.fails == "accept":
            raise WebSocketDisconnect(1006)

    async def carry(self, *_given: object) -> None:
        self.told.append(self.live.use.is_attended)
        if self.fails == "carry":
            raise RuntimeError("a bug")

    async def given(self, *_given: object) -> Any:
        """What answers for the server inside."""
        return self

    async def close(self) -> None:
        self.told.append("closed")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        self.told.append("closed")


@pytest.mark.parametrize("fails", ["", "accept", "carry"])
@pytest.mark.parametrize("route", [ports.websocket, ports.tcp])
async def test_a_tunnel_is_use_of_its_sandbox_and_is_closed_on_every_way_out(
    scene: Scene, live: Live, monkeypatch: pytest.MonkeyPatch, route: Any, fails: str
) -> None:
    tunnel: Any = Tunnel(live, fails)
    monkeypatch.setattr(ports, "_dial", tunnel.given)
    monkeypatch.setattr(ports, "open_websocket", tunnel.given)
    monkeypatch.setattr(ports, "carry_messages", tunnel.carry)
    monkeypatch.setattr(ports, "carry_bytes", tunnel.carry)
    try:
        await route(tunnel, live.sandbox_id, 1, scene.service, ANN)
    except (RuntimeError, WebSocketDisconnect):
        assert fails
    chosen = "p" if route is ports.websocket else None
    assert [chosen, *([] if fails == "accept" else [True]), "closed"] == tunnel.told
    assert not live.use.is_attended


# -- execs and contexts --------------------------------------------------------------------------


async def test_an_exec_of_one_that_is_over_is_its_owners_and_its_own_tokens(scene: Scene) -> None:
    first, second = scene.live(), scene.live()
    run = scene.over(first, "true")
    for each in (first, second):
        scene.manager.terminate(each.id)
    own, others = (Caller("ann", TOKEN, sandbox=each.sandbox_id) for each in (first, second))
    for caller in (ANN, OPS, own):
        assert first.sandbox_id == await sandbox_of(scene.service, caller, first.id)
        found = await find_run(scene.service, scene.execs, caller, first.sandbox_id, run.id)
        assert run.id == found.id
    for caller in (BOB, others, Caller("bob", TOKEN, sandbox=first.sandbox_id)):
        with pytest.raises(SandboxNotFound):
            await sandbox_of(scene.service, caller, first.sandbox_id)
    with pytest.raises(ExecNotFound):
        await find_run(scene.service, scene.execs, ANN, second.sandbox_id, run.id)


async def test_a_context_is_an_exec_of_a_language_that_runs_in_a_sandbox_that_is_awake(
    scene: Scene, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scene.start(live, "read x", stream_stdin=True)
    asked = (scene.service, scene.execs, ANN, live.sandbox_id, run.id)
    with pytest.raises(ExecNotFound, match="is no context"):
        await contexts._find(*asked)
    monkeypatch.setattr(contexts, "language_of", lambda _: "python")
    for find in (contexts._find, contexts._live, contexts._awake):
        assert run is await find(*asked)
    scene.manager.suspend(live.id)
    assert run is await contexts._live(*asked)
    with pytest.raises(LifecycleError, match="suspended"):
        await contexts._awake(*asked)
    scene.manager.resume(live.id)
    await contexts._end(scene.service, run)
    assert not run.running
    await contexts._end(scene.service, run)
    assert run.id == (await contexts._find(*asked)).id
    for find in (contexts._live, contexts._awake):
        with pytest.raises(LifecycleError, match="has ended"):
            await find(*asked)


@pytest.mark.parametrize("processes", ["auto", "required", "none"])
async def test_cells_of_a_sandbox_that_is_forked_are_held_until_it_is(
    scene: Scene, live: Live, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setattr(forks, "language_of", lambda argv: "python" if "x" in argv[-1] else "")
    monkeypatch.setattr(forks, "Forkable", type(live.inner))
    answers: dict[str, bool] = {}

    async def is_idle(_service: Service, run: Run) -> bool:
        return answers[run.id]

    monkeypatch.setattr(forks, "is_idle", is_idle)
    plain = scene.start(live, "read y", stream_stdin=True)
    runs = [scene.start(live, "read x", stream_stdin=True) for _ in range(2)]
    locks = sending_of(scene.service)._locks
    for busy in (None, *runs):
        answers.update({each.id: each is not busy for each in runs})
        async with AsyncExitStack() as held:
            found = await forks.hold_cells(scene.service, scene.execs, live, processes, held)
            if processes == "none":
                assert ("", {}) == (found, locks)
            else:
                assert (busy.id if busy is not None else "") == found
                assert plain.id not in locks
                if busy is None:
                    assert {each.id for each in runs} == locks.keys()
        assert {} == locks
    scene.manager.suspend(live.id)
    async with AsyncExitStack() as held:
        assert "" == await forks.hold_cells(scene.service, scene.execs, live, processes, held)
        assert {} == locks
    scene.manager.resume(live.id)
