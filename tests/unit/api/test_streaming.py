"""Streams of the API over unconfined processes: what each counts, holds and gives back at its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from starlette.websockets import WebSocket, WebSocketDisconnect
from tests.unconfined import Unconfined
from websockets.asyncio.server import unix_serve
from websockets.exceptions import ConnectionClosed

from ringfence.api.loop_share import LoopShare
from ringfence.api.service import Service
from ringfence.api.streaming import attachment, cells, pipes, tunnel
from ringfence.api.streaming.attachment import Attachment
from ringfence.api.streaming.cells import Events, Sending, cell_offset, is_idle, new_cell
from ringfence.api.streaming.lines import BOTH, NDJSON, SSE, Lines, cursor_of, place_of
from ringfence.api.streaming.runs import Bell, Signal, Watching, wait_for
from ringfence.api.streaming.uploads import Upload
from ringfence.errors import (
    ConnectError,
    ExecError,
    ExecNotFound,
    FileError,
    InvalidRequest,
    LifecycleError,
    ResourceExhausted,
    TimeoutExceeded,
    TooManyRequests,
)
from ringfence.execs.execs import Execs
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0


@pytest.fixture(name="manager", scope="module")
def fixture_manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionManager]:
    with SessionManager(
        ManagerConfig(pool=PoolConfig(enabled=False)),
        state_dir=str(tmp_path_factory.mktemp("s")),
        backends=[Unconfined()],
    ) as made:
        yield made


@pytest.fixture(name="live", scope="module")
def fixture_live(manager: SessionManager) -> Live:
    found = manager.index.find(manager.acquire(client_id="ann").id)
    assert found is not None
    return found


class Scene:
    """A service over unconfined sandboxes, and the execs of one of them."""

    def __init__(self, manager: SessionManager, live: Live) -> None:
        self.live, self.execs = live, Execs(manager)
        self.service = Service(manager)

    def start(self, script: str, **options: Any) -> Run:
        return self.execs.start(self.live, ExecRequest(("sh", "-c", script), **options))

    def play(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine; no task and no descriptor is left of it."""

        async def main() -> None:
            self.service.share = LoopShare()
            async with asyncio.timeout(PATIENCE_S):
                await part()
            await asyncio.sleep(0)
            assert {asyncio.current_task()} == asyncio.all_tasks()

        asyncio.run(main())


@pytest.fixture
def scene(manager: SessionManager, live: Live) -> Iterator[Scene]:
    made = Scene(manager, live)
    yield made
    for run in made.execs.list(live.sandbox_id):
        made.execs.find(live.sandbox_id, run.id).kill()
    made.execs.close()
    made.service.thread_pools.close()


class Client:
    """The client of a WebSocket: what it says, and what it was told."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._said.put_nowait({"type": "websocket.connect"})
        self.heard: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        scope = {"type": "websocket", "path": "/", "headers": [], "query_string": b""}
        self.socket = WebSocket(scope, self._said.get, self._send)

    async def _send(self, message: Any) -> None:
        self.heard.append(message)
        self._news.set()

    def say(self, data: bytes | str | None = None, **order: Any) -> None:
        data = json.dumps(order) if data is None else data
        name = "bytes" if isinstance(data, bytes) else "text"
        self._said.put_nowait({"type": "websocket.receive", name: data})

    def leave(self, code: int = 1001) -> None:
        self._said.put_nowait({"type": "websocket.disconnect", "code": code})

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._news.wait()
            self._news.clear()

    def told(self, kind: str) -> list[dict[str, Any]]:
        texts = [json.loads(each["text"]) for each in self.heard if each.get("text")]
        return [each for each in texts if each["type"] == kind]

    @property
    def closes(self) -> list[tuple[int, str]]:
        closes = (each for each in self.heard if each["type"] == "websocket.close")
        return [(each["code"], each.get("reason") or "") for each in closes]


# -- attached --------------------------------------------------------------------------------------


async def attach(scene: Scene, run: Run) -> tuple[Client, asyncio.Future[None]]:
    client = Client()
    await client.socket.accept()
    serving = asyncio.ensure_future(Attachment(scene.service, run, client.socket, "").serve())
    await client.until(lambda: client.told("attached"))
    return client, serving


@pytest.mark.parametrize("leaves", ["with input that waits", "while it waits for room"])
def test_a_client_that_leaves_takes_its_input_with_it(scene: Scene, leaves: str) -> None:
    """Its bytes would count against every other client of the process, which reads nothing."""
    run = scene.start("exec sleep 1000", stream_stdin=True)

    async def part() -> None:
        client, serving = await attach(scene, run)
        room = attachment._rooms[run]
        client.say(b"\x00" + bytes(200_000))
        if leaves == "while it waits for room":
            client.say(b"\x00" + bytes(200_000))
        while not room._taken or (leaves != "with input that waits" and not room._waiting):
            await asyncio.sleep(0)
        if leaves == "with input that waits":
            client.leave()
        else:
            serving.cancel()
        await asyncio.wait([serving])
        assert 0 == room._taken
        again, serving = await attach(scene, run)
        assert room is attachment._rooms[run]
        again.say(b"\x00" + bytes(200_000))
        again.say(type="signal", signal="KILL")
        await again.until(lambda: again.told("end"))
        await serving
        assert 0 == room._taken

    scene.play(part)


def test_room_is_had_in_turn_and_given_back() -> None:
    async def part() -> None:
        room, most = attachment._Room(), attachment._MOST_INPUT
        await room.take(most)
        waiting = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        room.give(1)
        await waiting
        room.give(most)
        await room.take(10 * most)  # larger than the whole: alone
        late = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        late.cancel()
        other = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        assert not other.done()
        room.give(10 * most)
        await other
        room.give(1)
        assert 0 == room._taken

    asyncio.run(part())


def test_all_that_fit_have_what_was_given_back() -> None:
    async def part() -> None:
        room, most = attachment._Room(), attachment._MOST_INPUT
        await room.take(most)
        waiting = [asyncio.ensure_future(room.take(most // 2)) for _ in range(3)]
        await asyncio.sleep(0)
        room.give(most)
        for _ in range(3):
            await asyncio.sleep(0)
        assert [True, True, False] == [each.done() for each in waiting]
        room.give(most // 2)
        for _ in range(3):
            await asyncio.sleep(0)
        assert waiting[2].done()
        assert most == room._taken

    asyncio.run(part())


def test_input_that_is_refused_gives_its_room_back_and_the_next_is_looked_at(scene: Scene) -> None:
    run = scene.start("exec sleep 1000")

    async def part() -> None:
        client, serving = await attach(scene, run)
        room = attachment._rooms[run]
        for number in range(1, 4):
            client.say(b"\x00" + bytes(200_000))
            while number != len(client.told("error")) or room._taken:
                await asyncio.sleep(0)
        client.leave()
        await serving
        assert 0 == room._taken, "and is not given back twice"

    scene.play(part)
    run.kill()


def test_an_attachment_tells_of_each_stream_from_its_cursor_on(scene: Scene) -> None:
    run = scene.start(
        "printf old; printf odd >&2; read x; printf new; printf err >&2", stream_stdin=True
    )

    async def part() -> None:
        while (3, 3) != run.spool.totals:
            await asyncio.sleep(0.001)
        clients = []
        for cursor in ("now", "1.2", ""):
            client = Client()
            await client.socket.accept()
            attached = Attachment(scene.service, run, client.socket, cursor)
            clients.append((client, asyncio.ensure_future(attached.serve())))
            await client.until(partial(client.told, "attached"))
        run.append(memoryview(b"x\n"))
        await asyncio.gather(*(serving for _, serving in clients))
        told = [(_of(client, b"\1"), _of(client, b"\2")) for client, _ in clients]
        assert [(b"new", b"err"), (b"ldnew", b"derr"), (b"oldnew", b"odderr")] == told
        began = [client.told("attached")[0]["cursor"] for client, _ in clients]
        assert ["3.3", "1.2", "0.0"] == began
        assert {"6.6"} == {client.told("end")[0]["cursor"] for client, _ in clients}

    scene.play(part)


def _of(client: Client, stream: bytes) -> bytes:
    pieces = [each.get("bytes") or b"" for each in client.heard]
    return b"".join(each[1:] for each in pieces if each[:1] == stream)


MUCH = 400_000


def _dropped(scene: Scene, stream: int) -> Run:
    """An exec that is over, and of whose much output in one stream only the ends are kept."""
    much, little = ("", ">&2") if stream == 0 else (">&2", "")
    script = f"printf x {little}; head -c {MUCH} /dev/zero | tr '\\0' y {much}"
    run = scene.start(script, max_output_bytes=100)
    run.done.result(PATIENCE_S)
    return run


@pytest.mark.parametrize("stream", [0, 1])
def test_what_was_dropped_is_told_with_its_place(scene: Scene, stream: int) -> None:
    """Who goes on from there is not told of it again, and misses nothing that is kept."""
    run = _dropped(scene, stream)
    found: list[dict[str, Any]] = []
    with Lines(run, BOTH, "", NDJSON) as lines:
        while data := lines.batch():
            found += map(json.loads, data.splitlines())
        last = json.loads(lines.heartbeat())
    at, seq = [0, 0], 0
    for each in found:
        number = ["stdout", "stderr"].index(each["stream"])
        assert (at[number], seq) == (each["offset"], each["seq"])
        size = each["bytes"] if each["type"] == "dropped" else len(each["data"])
        at[number] += size
        seq += size
        assert f"{at[0]}.{at[1]}" == each["cursor"]
    assert [MUCH, 1] == (at if stream == 0 else at[::-1])
    assert f"{at[0]}.{at[1]}" == last["cursor"]
    (gap,) = (number for number, each in enumerate(found) if each["type"] == "dropped")
    with Lines(run, BOTH, found[gap]["cursor"], NDJSON) as lines:
        again = json.loads(lines.batch().splitlines()[0])
    assert found[gap + 1] == again

    async def part() -> None:
        client = Client()
        await client.socket.accept()
        await Attachment(scene.service, run, client.socket, "").serve()
        (told,) = client.told("dropped")
        assert {key: found[gap][key] for key in ("stream", "offset", "bytes")} == {
            key: told[key] for key in ("stream", "offset", "bytes")
        }
        assert MUCH == told["bytes"] + len(_of(client, bytes([stream + 1])))

    scene.play(part)


def test_each_order_is_looked_at(scene: Scene) -> None:
    run = scene.start("cat; echo over", stream_stdin=True)

    async def part() -> None:
        client, serving = await attach(scene, run)
        wrong: list[bytes | str] = [
            *("", "[]", "1", '{"type": "dance"}', "{}", '{"type": "kill"', " " * 4097),
            *(b"", b"\x01x", b"x"),
            *(json.dumps({"type": "resize", "rows": r, "cols": c}) for r, c in
              ((0, 1), (1, 0), (65_536, 1), (1, 65_536), (True, 1), ("1", 1), (None, 1))),
            *(json.dumps({"type": "signal", "signal": each}) for each in
              ("NONE", 0, -1, 65, True, None, 1.5)),
            json.dumps({"type": "signal", "signal": "TERM", "group": 1}),
        ]  # fmt: skip
        for number, each in enumerate(wrong, 1):
            client.say(each)
            while number != len(client.told("error")):
                await asyncio.sleep(0)
        assert {"invalid_request", "bad_json"} == {each["code"] for each in client.told("error")}
        fields = [each["field"] for each in client.told("error")]
        assert ["rows", "cols"] * 2 + ["rows"] * 3 + ["signal"] * 7 + ["group"] == fields[10:]
        client.say(('{"type": "eof"}').rjust(4096))
        await client.until(lambda: client.told("input"))
        assert [True] == [each["eof"] for each in client.told("input")]
        client.say(b"\x00late")
        await serving
        assert [(1000, "")] == client.closes
        (end,) = client.told("end")
        assert 0 == end["exec"]["status"]["exit_code"]

    scene.play(part)


def test_an_attachment_that_is_over_listens_no_more(scene: Scene) -> None:
    run = scene.start("read x", stream_stdin=True)

    async def part() -> None:
        client, serving = await attach(scene, run)
        await asyncio.sleep(0)
        client.leave()
        await serving
        assert [] == run.spool._listeners
        assert [] == run._waiting

    scene.play(part)
    run.kill()


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in vain", "cancelled", "to the end"])
def test_one_that_waits_is_counted_as_long_as_it_does(scene: Scene, how: str) -> None:
    run = scene.start("exec sleep 1000")

    async def part() -> None:
        waiting = asyncio.ensure_future(wait_for(run, 0.01 if how == "in vain" else None))
        await asyncio.sleep(0)
        assert (1, 1) == (run.waiters, len(run._waiting))
        if how == "cancelled":
            waiting.cancel()
            await asyncio.wait([waiting])
        elif how == "to the end":
            run.kill()
            assert await waiting
            assert await wait_for(run, 0)
        else:
            assert not await waiting
        assert 0 == run.waiters
        if how != "to the end":
            assert [] == run._waiting

    scene.play(part)
    run.kill()


def test_a_signal_is_heard_from_any_thread_until_it_is_cleared() -> None:
    async def part() -> None:
        signal = Signal()
        assert not await signal.wait(0.001)
        await asyncio.to_thread(signal.ring)
        assert await signal.wait(None)
        assert await signal.wait(None), "it stays"
        signal.clear()
        assert not await signal.wait(0.001)
        signal.ring()
        assert await signal.wait(None), "and rings again"
        kept.append(signal)

    kept: list[Signal] = []
    asyncio.run(part())
    kept[0].clear()
    kept[0].ring()  # of a loop that is over


def test_a_bell_rings_for_output_and_for_the_end_and_is_taken_down(scene: Scene) -> None:
    run = scene.start("read x; echo $x; read x", stream_stdin=True)

    async def part() -> None:
        with Bell(run) as bell:
            bell.clear()
            run.append(memoryview(b"x\n"))
            assert await bell.wait(PATIENCE_S)
            bell.clear()
            run.end_input()
            assert await bell.wait(PATIENCE_S)
        assert [] == run.spool._listeners
        assert [] == run._waiting

    scene.play(part)


def test_a_sandbox_is_in_use_while_a_stream_is_watched(scene: Scene) -> None:
    use = scene.live.use
    with Watching(scene.service, scene.live.sandbox_id) as watching:
        assert not watching.closed
        assert use.is_attended
    assert watching.closed
    assert not use.is_attended
    with Watching(scene.service, "sbx-none"):
        pass


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted", "place"),
    [
        ("", (0, 1), (0, 0)),
        ("0", (0, 1), (0, 0)),
        ("4.3", (0, 1), (4, 3)),
        ("5.3", (0, 1), None),
        ("4.4", (0, 1), None),
        ("4", (0, 1), None),
        ("4.3.0", (0, 1), None),
        ("4", (0,), (4, 0)),
        ("5", (0,), None),
        ("3", (1,), (0, 3)),
        ("4", (1,), None),
        ("4.3", (0,), None),
        ("", (1,), (0, 0)),
        ("-1", (0,), None),
        ("+1", (0,), None),
        (" 1", (0,), None),
        ("0" * 17 + "4", (0,), (4, 0)),
        ("0" * 18 + "4", (0,), None),
        ("x", (0,), None),
        (".", (0, 1), None),
        ("1.", (0, 1), None),
    ],
)
def test_a_cursor_lies_within_the_output(
    scene: Scene, text: str, wanted: tuple[int, ...], place: tuple[int, int] | None
) -> None:
    run = _said(scene)
    if place is None:
        with pytest.raises(InvalidRequest) as refused:
            place_of(run, text, wanted)
        assert "offset" == refused.value.field
    else:
        assert place == place_of(run, text, wanted)
        assert place == place_of(run, cursor_of(place, wanted), wanted)


_cache: dict[str, Run] = {}


def _said(scene: Scene) -> Run:
    """An exec that is over: four bytes of output, three of error."""
    run = _cache.get(scene.live.sandbox_id)
    if run is None:
        run = _cache[scene.live.sandbox_id] = scene.start("printf four; printf err >&2")
        run.done.result(PATIENCE_S)
    return run


@pytest.mark.parametrize("kind", [NDJSON, SSE])
def test_events_of_an_exec_that_is_over(scene: Scene, kind: str) -> None:
    run = _said(scene)
    with Lines(run, BOTH, "", kind) as lines:
        text = (lines.batch() + lines.heartbeat() + lines.last()).decode()
    found = [json.loads(each[each.index("{") :]) for each in text.splitlines() if "{" in each]

    names = ["output", "output", "end"] if kind == SSE else ["output", "output", "heartbeat", "end"]
    assert names == [each["type"] for each in found]
    outputs = {each["stream"]: each["data"] for each in found[:2]}
    assert {"stdout": "four", "stderr": "err"} == outputs
    assert "4.3" == found[-1]["cursor"]
    if kind == SSE:
        assert ": heartbeat\n\n" in text
        assert "id: 4.3\nevent: end\ndata: {" in text


def test_events_of_one_stream_and_of_an_exec_that_runs(scene: Scene) -> None:
    with Lines(_said(scene), "stderr", "1", NDJSON) as lines:
        (event,) = map(json.loads, lines.batch().splitlines())
        assert ("stderr", "rr", 1, "3") == (
            event["stream"],
            event["data"],
            event["offset"],
            event["cursor"],
        )
    run = scene.start("exec sleep 1000")
    with Lines(run, BOTH, "", NDJSON) as lines:
        assert b"" == lines.batch()
        assert "running" == json.loads(lines.last())["type"]


# -- cells -----------------------------------------------------------------------------------------


def test_requests_to_a_context_are_sent_one_at_a_time_and_nothing_is_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scene.start("exec sleep 1000", stream_stdin=True)
    monkeypatch.setattr(cells, "_SEND_S", 0.05)

    async def part() -> None:
        sending, order = Sending(), []

        async def hold(name: str, free: asyncio.Event) -> None:
            async with sending.hold(run):
                order.append(name)
                await free.wait()

        first, second = asyncio.Event(), asyncio.Event()
        holds = [asyncio.ensure_future(hold(*each)) for each in (("a", first), ("b", second))]
        for _ in range(3):
            await asyncio.sleep(0)
        assert ["a"] == order
        with pytest.raises(ExecError, match="does not read"):
            await sending.send(run, b"x")
        first.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert ["a", "b"] == order
        assert {run.id} == sending._locks.keys()
        second.set()
        await asyncio.gather(*holds)
        assert {} == sending._locks
        with pytest.raises(ExecError, match="does not read"):
            await sending.send(run, bytes(1 << 20))
        assert {} == sending._locks

    scene.play(part)


def test_a_cell_is_one_of_its_context(scene: Scene) -> None:
    run = _said(scene)
    cell = new_cell(run)
    assert (32, 4) == (len(cell), cell_offset(run, cell))
    assert cell != new_cell(run)
    assert 0 == cell_offset(run, "0" * 32)
    with pytest.raises(ExecNotFound):
        cell_offset(run, f"{5:016x}{'0' * 16}")


KERNEL = "printf '%b' '{frames}'; read x; exit 3"


def frames(cell: str, *wanted: tuple[str, str, str]) -> str:
    return "".join(f"\\036{kind} {cell} {len(text)} {name}\\n{text}" for kind, name, text in wanted)


def _events(scene: Scene, run: Run, cell: str, offset: int = 0, **options: Any) -> Any:
    """The events of a cell, to its end; its reader is closed then."""
    found: list[Any] = []

    async def part() -> None:
        events = Events(scene.service, Sending(), run, cell, offset, **options)
        closed: list[int] = []
        close = events._spool.close
        events._spool.close = lambda: closed.append(1)  # type: ignore[method-assign]
        async for lines in events.stream(0.01):
            found.extend(map(json.loads, lines.splitlines()))
        assert closed
        close()

    scene.play(part)
    return found


def test_a_cell_ends_with_its_process(scene: Scene) -> None:
    cell = "0" * 32
    run = scene.start(KERNEL.format(frames=frames(cell, ("out", "-", "said"))), stream_stdin=True)
    run.end_input()
    start, out, end = (each for each in _events(scene, run, cell) if each["type"] != "heartbeat")

    assert ("start", "stdout", "said") == (start["type"], out["type"], out["text"])
    assert (False, "ContextEnded") == (end["running"], end["error"]["name"])
    assert "exited with code 3" in end["error"]["value"]


def test_frames_of_other_cells_are_not_this_ones(scene: Scene) -> None:
    cell, other = "0" * 32, "1" * 32
    said = frames(other, ("out", "-", "theirs"), ("done", "-", "1 0"))
    said += frames(cell, ("out", "-", "mine"), ("done", "-", "2 0"))
    run = scene.start(f"printf '%b' '{said}'; exec sleep 1000")
    start, out, end = (each for each in _events(scene, run, cell) if each["type"] != "heartbeat")
    assert ("start", "mine", 2) == (start["type"], out["text"], end["execution_count"])


def _with_gap(scene: Scene, cell: str, before: str, after: str) -> Run:
    """A kernel that is over: one that says so much of `before` in its cell that some is dropped."""
    text = "y" * 999
    filler = frames(before, ("out", "-", text))
    script = f"printf '%b' '{frames(cell, ('out', '-', 'first'))}'; "
    script += f"for n in $(seq 400); do printf '%b' '{filler}'; done; printf '%b' '{after}'"
    run = scene.start(script, max_output_bytes=5000)
    run.done.result(PATIENCE_S)
    return run


def test_a_cell_goes_on_behind_what_was_dropped_and_its_cursors_with_it(scene: Scene) -> None:
    cell = "1" * 32
    done = frames(cell, ("out", "-", "last"), ("done", "-", "7 0"))
    run = _with_gap(scene, cell, cell, done)
    found = _events(scene, run, cell)
    (gap,) = (number for number, each in enumerate(found) if each["type"] == "dropped")
    assert 0 < gap < len(found) - 3
    assert (7, run.spool.tracks[0].total) == (found[-1]["execution_count"], found[-1]["cursor"])
    texts = [each["text"] for each in found if each["type"] == "stdout"]
    assert texts[0].startswith("first")
    assert texts[-1].endswith("last")
    for number in (gap + 1, len(found) - 2):
        again = _events(scene, run, cell, offset=found[number]["cursor"])
        rest = [each for each in again if each["type"] == "stdout"]
        assert "".join(each["text"] for each in rest) == "".join(
            each["text"] for each in found[number + 1 :] if each["type"] == "stdout"
        )
        assert found[-1]["cursor"] == again[-1]["cursor"]


@pytest.mark.parametrize("other", ["0" * 32, "2" * 32, "-"])
def test_a_cell_whose_end_was_dropped_ends_where_a_later_one_began(
    scene: Scene, other: str
) -> None:
    """What an earlier cell says late, and what belongs to none, ends none."""
    cell = "1" * 32
    done = frames(cell, ("done", "-", "7 0"))
    end = _events(scene, _with_gap(scene, cell, other, done), cell)[-1]
    if other > cell:
        assert "OutputDropped" == end["error"]["name"]
    else:
        assert (7, None) == (end["execution_count"], end["error"])


def test_output_that_is_no_frame_ends_the_process(scene: Scene) -> None:
    cell = "0" * 32
    said = frames(cell, ("out", "-", "x"))
    run = scene.start(f"printf '%b' '{said}'; head -c 5000 /dev/zero; exec sleep 1000")
    end = _events(scene, run, cell)[-1]

    assert (False, "ContextEnded") == (end["running"], end["error"]["name"])
    assert "damaged" in end["error"]["value"]
    run.done.result(PATIENCE_S)


def test_a_cell_that_is_quiet_has_heartbeats_and_one_past_its_time_is_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "GRACE_S", 0.05)
    run = scene.start("exec sleep 1000", stream_stdin=True)
    found = _events(scene, run, "0" * 32, timeout_s=0.05)

    assert {"start", "heartbeat", "end"} == {each["type"] for each in found}
    end = found[-1]
    assert (True, False, "CellTimeout") == (
        end["timed_out"],
        end["running"],
        end["error"]["name"],
    )
    assert "longer than 0.05 s and did not react" in end["error"]["value"]
    run.done.result(PATIENCE_S)


def test_a_cell_that_ends_by_the_interrupt_keeps_its_context(scene: Scene) -> None:
    cell = "0" * 32
    ends = frames(cell, ("done", "-", "1 0"))
    run = scene.start(f"read x; read x; printf '%b' '{ends}'; exec sleep 1000", stream_stdin=True)
    end = _events(scene, run, cell, timeout_s=0.02)[-1]

    assert (True, True) == (end["timed_out"], end["running"])
    assert "longer than 0.02 s and was interrupted" in end["error"]["value"]
    assert run.running


def test_the_time_of_a_cell_goes_on_without_its_reader(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "GRACE_S", 0.02)
    run = scene.start("exec sleep 1000", stream_stdin=True)

    async def part() -> None:
        events = Events(scene.service, Sending(), run, "0" * 32, 0, timeout_s=0.05)
        closed: list[int] = []
        events._spool.close = lambda: closed.append(1)  # type: ignore[method-assign]
        stream: Any = events.stream(9.0)
        assert b'"start"' in await anext(stream)
        await stream.aclose()
        assert await wait_for(run, PATIENCE_S)
        while cells._tasks:
            await asyncio.sleep(0.001)
        assert [1] == closed

    scene.play(part)


def test_a_kernel_that_does_not_answer_is_not_idle(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_IDLE_S", 0.05)
    answers = frames("-", ("hello", "-", ""))
    idle = scene.start(f"read x; read x; printf '%b' '{answers}'; read x", stream_stdin=True)
    busy = scene.start("exec sleep 1000", stream_stdin=True)
    over = scene.start("read x", stream_stdin=True)
    over.kill()
    over.done.result(PATIENCE_S)
    wrong = scene.start("read x; read x; head -c 9999 /dev/zero; read x", stream_stdin=True)

    async def part() -> None:
        assert [True, False, False, False] == [
            await is_idle(scene.service, run) for run in (idle, busy, over, wrong)
        ]

    monkeypatch.setattr(cells, "language_of", lambda _: "python")
    scene.play(part)


def test_what_a_kernel_said_before_it_was_asked_is_no_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_IDLE_S", 0.05)
    hello = frames("-", ("hello", "-", ""))
    run = scene.start(f"printf '%b' '{hello}'; exec sleep 1000", stream_stdin=True)

    async def part() -> None:
        while not run.spool.totals[0]:
            await asyncio.sleep(0.001)
        assert not await is_idle(scene.service, run)

    monkeypatch.setattr(cells, "language_of", lambda _: "python")
    scene.play(part)


@pytest.mark.parametrize("language", ["bash", "python"])
def test_a_kernel_of_bash_has_longer_to_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.setattr(cells, "_IDLE_S", 0.0)
    answers = frames("-", ("hello", "-", ""))
    run = scene.start(f"read x; read x; printf '%b' '{answers}'; read x", stream_stdin=True)

    async def part() -> None:
        assert (language == "bash") == await is_idle(scene.service, run)

    monkeypatch.setattr(cells, "language_of", lambda _: language)
    scene.play(part)


@pytest.mark.parametrize("answer", ["nothing", "damage", "the end"])
def test_a_context_that_does_not_begin_is_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(cells, "START_S", 0.1)
    script = {
        "nothing": "exec sleep 1000",
        "damage": "head -c 9999 /dev/zero; exec sleep 1000",
        "the end": "head -c 6 >/dev/null; exit 1",
    }[answer]
    run = scene.start(script, stream_stdin=True)

    async def part() -> None:
        with pytest.raises(ExecError, match="did not start"):
            await cells.begin(scene.service, run)

    monkeypatch.setattr(cells, "kernel_of", lambda _: b"kernel")
    scene.play(part)
    run.done.result(PATIENCE_S)


async def given_back(before: int) -> None:
    """Wait until no more descriptors are open than before; what a loop closes, it closes later."""
    async with asyncio.timeout(PATIENCE_S):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.001)


# -- tunnels ---------------------------------------------------------------------------------------


def test_the_first_that_ends_ends_the_others_and_a_fault_is_told() -> None:
    async def part() -> None:
        ended: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("waits")

        async def raises(exc: Exception) -> None:
            raise exc

        await tunnel.first_of(asyncio.sleep(0), waits())
        for ignored in (OSError(), WebSocketDisconnect(), ConnectionResetError()):
            await tunnel.first_of(raises(ignored), waits())
        with pytest.raises(KeyError):
            await tunnel.first_of(raises(KeyError()), waits())
        assert ["waits"] * 5 == ended

    asyncio.run(part())


@pytest.mark.parametrize("who", ["the server", "the client"])
def test_a_tunnel_of_bytes_ends_with_either_end(who: str) -> None:
    async def part() -> None:
        before = len(os.listdir("/proc/self/fd"))
        client, loop = Client(), asyncio.get_running_loop()
        await client.socket.accept()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        carrying = asyncio.ensure_future(tunnel.carry_bytes(client.socket, theirs, LoopShare()))
        client.say(b"in")
        assert b"in" == await loop.sock_recv(ours, 9)
        await loop.sock_sendall(ours, b"out")
        await client.until(lambda: any(each.get("bytes") == b"out" for each in client.heard))
        client.say("no word that is known")
        client.say("eof")
        assert b"" == await loop.sock_recv(ours, 9)
        if who == "the client":
            client.leave()
        else:
            ours.shutdown(socket.SHUT_WR)
        await carrying
        assert ([] if who == "the client" else [(1000, "")]) == client.closes
        ours.close()
        await given_back(before)

    asyncio.run(part())


def test_what_comes_after_the_server_is_gone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, and nobody has been told so yet."""
    connect, writers = asyncio.open_connection, list[asyncio.StreamWriter]()

    async def record(**more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(**more)
        writers.append(writer)
        return reader, writer

    async def part() -> None:
        client, pair = Client(), socket.socketpair()
        await client.socket.accept()
        receive = client.socket.receive

        async def receive_late() -> Any:
            message = await receive()
            writers[0].transport.abort()
            await asyncio.sleep(0)  # uvloop closes it in between
            return message

        client.socket.receive = receive_late  # type: ignore[method-assign]
        client.say(b"in")
        with pair[0]:
            await tunnel.carry_bytes(client.socket, pair[1], LoopShare())

    monkeypatch.setattr(asyncio, "open_connection", record)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(part())


@pytest.mark.parametrize(("code", "passed"), [(4321, 4321), (1000, 1000), (1006, 1011)])
def test_messages_and_the_close_of_either_pass(tmp_path: Path, code: int, passed: int) -> None:
    path = str(tmp_path / "s")

    async def part() -> None:
        before = len(os.listdir("/proc/self/fd"))
        closed: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        async def serve(connection: Any) -> None:
            with suppress(ConnectionClosed):
                async for message in connection:
                    await connection.send(message)
                    if message == "close":
                        await connection.close(4001, "why")
            closed.set_result(connection.close_code)

        async def meet() -> tuple[Client, asyncio.Future[None]]:
            client = Client()
            await client.socket.accept()
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            inside = await tunnel.open_websocket(sock, 80, "/x", [], LoopShare())
            carrying = tunnel.carry_messages(client.socket, inside, LoopShare())
            return client, asyncio.ensure_future(carrying)

        async with unix_serve(serve, path):
            client, carrying = await meet()
            client.say("text")
            client.say(b"bytes")
            client.say("")
            await client.until(lambda: 4 == len(client.heard))
            assert ["text", b"bytes", ""] == [
                each.get("bytes", each.get("text")) for each in client.heard[1:]
            ]
            client.leave(code)
            await carrying
            assert passed == await closed
            closed = asyncio.get_running_loop().create_future()
            client, carrying = await meet()
            client.say("close")
            await carrying
            assert (4001, "why") in client.closes
            closed = asyncio.get_running_loop().create_future()
            client, carrying = await meet()
            client.say("text")
            await client.until(lambda: 2 == len(client.heard))
            carrying.cancel()
            assert 1000 == await closed, "a route that ends takes both with it"
        await given_back(before)

    asyncio.run(part())


def test_what_opens_no_websocket_is_closed() -> None:
    async def part() -> None:
        before = len(os.listdir("/proc/self/fd"))
        ours, theirs = socket.socketpair()
        ours.sendall(b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n")
        with pytest.raises(ConnectError, match="opened no WebSocket"):
            await tunnel.open_websocket(theirs, 80, "/", [], LoopShare())
        assert theirs.fileno() == -1
        ours.close()
        await given_back(before)

    asyncio.run(part())


# -- helpers inside --------------------------------------------------------------------------------


class Helper:
    """A helper inside, of which this test has the other end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.stream, self.is_abandoned = self.theirs.fileno(), 0

    def abandon(self) -> None:
        self.is_abandoned += 1
        self.theirs.close()

    def finish(self, path: str) -> None:
        self.theirs.close()
        if path == "bad":
            raise FileError("bad")


def _live(scene: Scene, start: Callable[..., Any]) -> Any:
    inner = SimpleNamespace(files=SimpleNamespace(start_helper=start))
    return SimpleNamespace(sandbox_id="sbx-x", use=scene.live.use, inner=inner)


def test_a_helper_that_does_not_start_counts_no_more(scene: Scene) -> None:
    async def part() -> None:
        def fail(*_: object) -> None:
            raise LifecycleError("gone")

        for _ in range(20):  # more than may run at once
            with pytest.raises(LifecycleError):
                async with pipes.Running(scene.service.thread_pools, _live(scene, fail), "x", "y"):
                    pass
        assert not scene.service.thread_pools._tasks
        assert not scene.live.use.is_attended

    scene.play(part)


@pytest.mark.parametrize("path", ["good", "bad", "left"])
def test_a_helper_is_counted_while_it_runs_and_never_left(scene: Scene, path: str) -> None:
    helper, threads = Helper(), scene.service.thread_pools

    async def part() -> None:
        running = pipes.Running(threads, _live(scene, lambda *_: helper), "x", path)
        async with running:
            assert 1 == threads._tasks["sbx-x"]
            assert scene.live.use.is_attended
            assert await running.write(b"to the helper")
            assert b"to the helper" == helper.ours.recv(99)
            helper.ours.sendall(b"answer")
            assert b"ans" == await running.read(most=3)
            assert b"wer" == await running.read()
            with pytest.raises(TimeoutExceeded, match="does not answer"):
                await running.read(0.001)
            assert not asyncio.get_running_loop().remove_reader(helper.stream)
            helper.ours.close()
            assert b"" == await running.read()
            assert not await running.write(b"x" * 100)
            if path == "good":
                await running.finish()
            elif path == "bad":
                with pytest.raises(FileError):
                    await running.finish()
        assert not threads._tasks
        assert not scene.live.use.is_attended

    scene.play(part)
    if path == "left":
        while not helper.is_abandoned:
            pass
    assert (path == "left") == helper.is_abandoned


def test_only_so_many_helpers_run_in_one_sandbox(scene: Scene) -> None:
    threads = scene.service.thread_pools
    for _ in range(16):
        threads.begin_task("one")
    with pytest.raises(TooManyRequests):
        threads.begin_task("one")
    threads.begin_task("other")
    threads.end_task("one")
    threads.begin_task("one")
    for _ in range(16):
        threads.end_task("one")
    threads.end_task("other")
    assert not threads._tasks


# -- uploads ---------------------------------------------------------------------------------------


@pytest.fixture
def place(scene: Scene, tmp_path: Path) -> Path:
    del scene
    return tmp_path


def upload(scene: Scene, path: Path, *data: bytes, append: bool = False, mode: int = 0o640) -> Any:
    made = Upload(scene.live.sandbox.files, str(path), append=append, mode=mode)
    for each in data:
        made.write(each)
    return made


def test_a_new_file_has_the_mode_that_was_asked_for(scene: Scene, place: Path) -> None:
    info = upload(scene, place / "x", b"one", b"two").done()
    assert (6, 0o640) == (info.size_bytes, (place / "x").stat().st_mode & 0o777)
    assert "onetwo" == (place / "x").read_text()
    assert ["x"] == os.listdir(place)


def test_a_file_that_is_there_keeps_its_mode_and_its_name(scene: Scene, place: Path) -> None:
    (place / "x").write_text("old")
    (place / "x").chmod(0o601)
    (place / "link").symlink_to("x")
    (place / "dangling").symlink_to("none")
    made = upload(scene, place / "link", b"new")
    assert "old" == (place / "x").read_text(), "readers see the old one, whole"
    made.done()
    assert ("new", 0o601) == ((place / "x").read_text(), (place / "x").stat().st_mode & 0o777)
    assert (place / "link").is_symlink()
    upload(scene, place / "dangling", b"made").done()
    assert "made" == (place / "none").read_text()
    assert {"x", "link", "dangling", "none"} == {*os.listdir(place)}


@pytest.mark.parametrize("append", [False, True])
def test_an_upload_that_is_abandoned_leaves_what_was_there(
    scene: Scene, place: Path, append: bool
) -> None:
    (place / "x").write_text("old")
    made = upload(scene, place / "x", b"new", append=append)
    made.abandon()
    assert ["x"] == os.listdir(place)
    assert ("oldnew" if append else "old") == (place / "x").read_text()
    made = upload(scene, place / "x", b"new")
    made.done()
    made.abandon()
    assert "new" == (place / "x").read_text(), "nothing after it is done"


def test_a_file_that_can_be_filled_and_not_replaced_is_filled(
    scene: Scene, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "x").write_text("longer than the new content")
    inode = (place / "x").stat().st_ino

    def fail(*_: object, **__: object) -> None:
        raise FileError("busy")

    files = scene.live.sandbox.files
    monkeypatch.setattr(type(files), "move", fail)
    upload(scene, place / "x", b"new").done()
    assert ("new", inode) == ((place / "x").read_text(), (place / "x").stat().st_ino)
    assert ["x"] == os.listdir(place)


def test_zeros_are_holes_and_zeros(scene: Scene, place: Path) -> None:
    block = 1 << 16
    data = b"head".ljust(block, b"x") + bytes(8 * block) + b"tail" + bytes(block)
    upload(scene, place / "x", data, bytes(3 * block)).done()
    assert data + bytes(3 * block) == (place / "x").read_bytes()
    assert (place / "x").stat().st_blocks * 512 < 6 * block


def test_a_place_that_cannot_be_written_is_told_of(scene: Scene, place: Path) -> None:
    (place / "directory").mkdir()
    for path in (place / "none" / "y", place / "none" / "x", place / "directory" / "x" / "y"):
        with pytest.raises(FileError):
            upload(scene, path, b"x").done()
    assert ["directory"] == os.listdir(place)


def test_a_file_that_may_not_be_written_is_not_replaced_either(
    scene: Scene, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory may be written, so that a rename would go around its mode."""
    (place / "x").write_text("old")
    files = type(scene.live.sandbox.files)
    open_write = files.open_write

    def only_beside(self: Any, path: str, **more: Any) -> Any:
        if path == str(place / "x"):
            raise FileError(f"{path}: permission denied")
        return open_write(self, path, **more)

    monkeypatch.setattr(files, "open_write", only_beside)
    with pytest.raises(FileError, match="permission denied"):
        upload(scene, place / "x", b"new").done()
    upload(scene, place / "y", b"new").done()
    assert {"x": "old", "y": "new"} == {each.name: each.read_text() for each in place.iterdir()}


def test_a_limit_that_ends_an_upload_names_the_path_that_was_asked_for(
    scene: Scene, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: Any, path: str, **_more: Any) -> Any:
        raise ResourceExhausted(f"{path}: no space is left")

    monkeypatch.setattr(type(scene.live.sandbox.files), "open_write", fail)
    with pytest.raises(ResourceExhausted) as refused:
        upload(scene, place / "x", b"new")
    assert f"{place}/x: no space is left" == refused.value.message
