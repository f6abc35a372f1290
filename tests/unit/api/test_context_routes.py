"""Routes of contexts over processes that stand in for interpreters: what is begun, sent, ended and bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unconfined import Unconfined

from ringfence.api.access.caller import Caller
from ringfence.api.routes import contexts
from ringfence.api.routes.contexts import InputLine, NewCell, NewContext
from ringfence.api.service import Service
from ringfence.contexts.frames import MARK, request
from ringfence.errors import ExecNotFound, LifecycleError, TooManyRequests
from ringfence.execs.execs import Execs
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.spool.order import OUT

pytestmark = pytest.mark.anyone

ANN = Caller("ann")
PATIENCE_S = 60.0


class Scene:
    """One sandbox of ann's, whose contexts tell where they are and wait for input."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = Unconfined()
        stack.callback(backend.close)
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        manager = stack.enter_context(SessionManager(config, backends=[backend], background=False))
        self.service = Service(manager)
        stack.callback(self.service.thread_pools.close)
        self.execs = stack.enter_context(closing(Execs(manager)))
        lease = manager.acquire(client_id="ann")
        self.sandbox = lease.session.sandbox_id
        live = manager.index.find(lease.id)
        assert live is not None
        self.live = live
        self.begun: list[str] = []
        self.sent: list[tuple[str, bytes]] = []
        monkeypatch.setattr(contexts, "begin", self.begin)
        monkeypatch.setattr(contexts, "argv_of", self.argv_of)
        monkeypatch.setattr(contexts, "sending_of", lambda _service: self)

    @staticmethod
    def argv_of(language: str) -> list[str]:
        return ["sh", "-c", "echo $PWD $A; read x", MARK, language]

    async def begin(self, _service: Service, run: Run) -> None:
        self.begun.append(run.id)

    async def send(self, run: Run, data: bytes) -> None:
        self.sent.append((run.id, data))

    async def ask(self, route: Any, *given: Any) -> Any:
        """What a route answers to ann about this sandbox."""
        asked = route(self.sandbox, *given, self.service, self.execs, ANN)
        body = bytes((await asked).body)
        return json.loads(body) if body else None

    def run(self, context_id: str) -> Run:
        return self.execs.find(self.sandbox, context_id)


def new(**given: Any) -> NewContext:
    return NewContext.model_validate(given)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, monkeypatch)


async def test_a_restart_ends_a_context_and_begins_what_was_asked_for(
    scene: Scene, tmp_path: Path
) -> None:
    plain = scene.execs.start(scene.live, ExecRequest(("cat",), stream_stdin=True))
    first = await scene.ask(contexts.create, new(cwd=str(tmp_path), env={"A": "1"}))
    assert ("python", str(tmp_path), True) == (first["language"], first["cwd"], first["running"])
    async with asyncio.timeout(PATIENCE_S):
        while not any(scene.run(first["id"]).spool.totals):
            await asyncio.sleep(0.001)
    body = new(language="bash", cwd="/", env={"A": "2"})
    second = await scene.ask(contexts.restart, first["id"], body)
    assert ("bash", "/", True) == (second["language"], second["cwd"], second["running"])
    assert [first["id"], second["id"]] == scene.begun
    assert not scene.run(first["id"]).running
    listed = (await scene.ask(contexts.list_))["items"]
    assert [second["id"]] == [each["id"] for each in listed], (
        "neither what ended nor a plain command"
    )
    scene.run(second["id"]).append(memoryview(b"\n"))
    scene.run(second["id"]).done.result(PATIENCE_S)
    for made, said in ((first, f"{tmp_path} 1\n"), (second, "/ 2\n")):
        assert said.encode() == scene.run(made["id"]).result().stdout
    assert not (await scene.ask(contexts.get, second["id"]))["running"]
    for route in (contexts.get, contexts.close):
        with pytest.raises(ExecNotFound):
            await scene.ask(route, plain.id)
    assert plain.running


async def test_so_many_run_and_one_that_is_closed_makes_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "_MOST", 1)
    first = await scene.ask(contexts.create, new())
    with pytest.raises(TooManyRequests):
        await scene.ask(contexts.create, new())
    again = await scene.ask(contexts.restart, first["id"], new())
    for _ in range(2):
        assert await scene.ask(contexts.close, again["id"]) is None
    assert not scene.run(again["id"]).running, "it has ended once this is answered"
    assert (await scene.ask(contexts.create, new()))["running"]


async def test_what_is_asked_of_a_context_is_sent_to_it_while_it_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[tuple[Any, ...]] = []

    def events(*given: Any) -> Any:
        streamed.append(given)
        return SimpleNamespace(stream=lambda _heartbeat_s: iter(()))

    monkeypatch.setattr(contexts, "Events", events)
    context = (await scene.ask(contexts.create, new()))["id"]
    other = (await scene.ask(contexts.create, new()))["id"]
    cell = "0" * 32

    async def interrupt(*more: str) -> None:
        await contexts.interrupt(scene.sandbox, context, scene.service, scene.execs, ANN, *more)

    await interrupt()
    await interrupt(cell)
    for text in ("line", None):
        await scene.ask(contexts.give_input, context, InputLine(text=text))
    wanted = [
        request("interrupt", cell=None),
        request("interrupt", cell=cell),
        request("answer", text="line"),
        request("answer", text=None),
    ]
    assert [(context, each) for each in wanted] == scene.sent
    code = NewCell(code="1", timeout_s=7.0, input=True)
    await contexts.run_cell(scene.sandbox, other, code, scene.service, scene.execs, ANN)
    (_, _, run, name, offset, timeout_s) = streamed.pop()
    assert (other, 7.0) == (run.id, timeout_s)
    assert (other, request("run", cell=name, code="1", input=True)) == scene.sent[-1]
    assert offset <= run.spool.tracks[OUT].total
    asked = (scene.sandbox, other, name, scene.service, scene.execs, ANN)
    for cursor, found in ((0, offset), (offset + 5, offset + 5)):
        await contexts.events(*asked, cursor)
        assert (name, found) == streamed.pop()[3:5]
    await scene.ask(contexts.close, context)
    for ended in (interrupt(), scene.ask(contexts.give_input, context, InputLine(text="x"))):
        with pytest.raises(LifecycleError):
            await ended
    assert 5 == len(scene.sent)
