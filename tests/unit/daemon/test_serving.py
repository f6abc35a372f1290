"""What serves by a configuration, without its sockets: what is closed, and left to the next daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unconfined import Unconfined

from ringfence.api.access.audit import Audit
from ringfence.api.access.caller import USER
from ringfence.api.loop_share import LoopShare
from ringfence.daemon import serve as module
from ringfence.daemon.config import DaemonConfig
from ringfence.daemon.holding import held
from ringfence.daemon.succession import LEAVE
from ringfence.errors import InvalidRequest, IoError
from ringfence.sessions import liveness
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0


class Daemon:
    """A daemon whose `run` is a function of the test."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, outlive_s: float) -> None:
        self.monkeypatch, self.backend = monkeypatch, Unconfined()
        manager = ManagerConfig(pool=PoolConfig(enabled=False))
        self.config = DaemonConfig(state_dir=str(place / "s"), outlive_s=outlive_s, manager=manager)
        self.app: Any = None

    def serve(self, run: Callable[[Any], bool]) -> None:
        def noted(_config: Any, app: Any, _front: Any, _held: Any, _ready: Any) -> bool:
            self.app = app
            return run(app)

        self.monkeypatch.setattr(module, "run", noted)
        self.monkeypatch.setattr(module, "_check_working", lambda *_: None)
        with held(self.config) as mine:
            object.__setattr__(self.config, "backends", (self.backend,))
            module.serve(self.config, mine, lambda _: None)

    @property
    def service(self) -> Any:
        return self.app.state.service

    def is_closed(self) -> bool:
        """Return whether nothing of it takes anything any more."""
        with pytest.raises(RuntimeError):
            asyncio.run(self.service.thread_pools.call(int))
        return self.service.audit._done is None


@pytest.fixture
def daemon_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    root, interval = logging.getLogger(), sys.getswitchinterval()
    before = root.handlers, root.level
    with ExitStack() as stack:

        def make(outlive_s: float = 0.0) -> Daemon:
            made = Daemon(tmp_path, monkeypatch, outlive_s)
            stack.callback(made.backend.close)
            return made

        yield make
    for each in root.handlers:
        if each not in before[0]:
            each.flush()
            each.close()
    root.handlers = before[0]
    root.setLevel(before[1])
    sys.setswitchinterval(interval)


def sandbox_of(app: Any) -> Live:
    manager = app.state.service.manager
    found: Live = manager.index.find(manager.acquire(client_id="ann").id)
    return found


def test_all_that_served_is_closed_and_uses_of_keys_are_written_down(
    daemon_of: Any, tmp_path: Path
) -> None:
    daemon = daemon_of()
    used: list[Any] = []

    def run(app: Any) -> bool:
        keys = app.state.service.authenticator
        _, text = keys.make(owner="ann", scope=USER)
        assert keys.caller(text)
        store, note = app.state.service.manager.store, app.state.service.manager.store.note_keys

        def note_keys(each: Any, now: float) -> None:
            used.append(each)
            note(each, now)

        store.note_keys = note_keys
        sandbox_of(app)
        app.state.service.audit.write(status=201, peer="uid 0", client="ann", key="k")
        return False

    daemon.serve(run)
    assert 1 == sum(len(each) for each in used), "before the store is closed"
    assert [] == daemon.service.manager.index.all()
    assert daemon.is_closed()
    assert 1 == len((tmp_path / "s" / "audit.log").read_text().splitlines())


class LeftError(BaseException):
    """What ends this process, which it does not here."""


@pytest.mark.parametrize(
    ("outlive_s", "is_told", "leaves"),
    [(60.0, True, True), (0.0, True, False), (60.0, False, False)],
)
def test_a_daemon_that_is_told_to_leave_writes_all_down_and_ends_no_sandbox(
    daemon_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    outlive_s: float,
    is_told: bool,
    leaves: bool,
) -> None:
    daemon, said, left = daemon_of(outlive_s), list[str](), list[tuple[int, list[str], int]]()

    def heard(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Any) -> None:
            said.append(name)
            real(*given)

        return noted

    for name in ("tidy", "save"):
        monkeypatch.setattr(liveness, name, heard(name, getattr(liveness, name)))

    def run(app: Any) -> bool:
        keys, manager = app.state.service.authenticator, app.state.service.manager
        assert keys.caller(keys.make(owner="ann", scope=USER)[1])
        manager.store.note_keys = heard("keys", manager.store.note_keys)
        sandbox_of(app)
        said.clear()
        monkeypatch.setattr(logging, "shutdown", lambda: said.append("log"))
        monkeypatch.setattr(os, "_exit", leave)
        return is_told

    def leave(code: int) -> None:
        monkeypatch.undo()
        left.append((code, [*said], len(daemon.service.manager.index.all())))
        raise LeftError

    with pytest.raises(LeftError) if leaves else nullcontext():
        daemon.serve(run)
    assert ([(0, ["keys", "tidy", "save", "log"], 1)] if leaves else []) == left
    assert [] == daemon.service.manager.index.all(), "this process goes on, and ends them after all"


@pytest.mark.parametrize(("signum", "leaves"), [(signal.SIGTERM, False), (LEAVE, True)])
def test_who_asks_a_daemon_that_ends_is_answered_and_nobody_else_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, leaves: bool
) -> None:
    state: Any = SimpleNamespace(service=SimpleNamespace(share=LoopShare()))
    config = DaemonConfig(state_dir=str(tmp_path / "s"), listen="127.0.0.1:0")
    path, said, answers = tmp_path / "s" / "ringfence.sock", list[str](), list[bytes]()
    monkeypatch.setattr("ringfence.daemon.memory.give_back", lambda: beside("memory"))

    async def beside(name: str) -> None:
        said.append(f"{name} begins")
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            said.append(f"{name} ends")

    async def front(_scope: Any, _receive: Any, send: Any) -> None:
        os.kill(os.getpid(), signum)
        until = time.monotonic() + 2
        while path.exists() and time.monotonic() < until:
            await asyncio.sleep(0.001)
        body = b"there" if path.exists() else b"hidden"
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while data := client.recv(1 << 16):
                answers.append(data)

    def ready(addresses: list[str]) -> None:
        assert [f"unix:{path}", "http://127.0.0.1:"] == [
            addresses[0], addresses[1].rstrip("0123456789")
        ]  # fmt: skip
        asking.start()

    asking = threading.Thread(target=ask)
    with held(config) as mine:
        app: Any = SimpleNamespace(state=state)
        told = module.run(config, app, front, mine, ready, lambda: [beside("other")])
    asking.join()
    assert leaves == told
    assert b"".join(answers).endswith(b"\r\n\r\nhidden")
    assert {"memory begins", "other begins", "memory ends", "other ends"} == {*said}


@pytest.mark.parametrize(
    ("outlive_s", "error", "stays"),
    [(60.0, IoError, True), (0.0, IoError, False), (60.0, KeyboardInterrupt, False)],
)
def test_a_failure_leaves_the_sandboxes_to_the_next_daemon_where_they_outlive_one(
    daemon_of: Any, outlive_s: float, error: type[BaseException], stays: bool
) -> None:
    daemon = daemon_of(outlive_s)

    def run(app: Any) -> bool:
        sandbox_of(app)
        raise error("full")

    with pytest.raises(error):
        daemon.serve(run)
    manager = daemon.service.manager
    assert stays == bool(manager.index.all())
    if stays:
        manager.close()
        daemon.app.state.execs.close()
        daemon.service.thread_pools.close()
    assert [] == manager.index.all()


def test_a_failure_without_sandboxes_closes_everything(daemon_of: Any) -> None:
    daemon = daemon_of(60.0)

    def run(_app: Any) -> bool:
        raise IoError("full")

    with pytest.raises(IoError):
        daemon.serve(run)
    assert daemon.is_closed()


async def test_a_hangup_begins_new_logs_and_reads_what_was_edited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit, is_read = Audit(str(tmp_path)), asyncio.Event()
    loop = asyncio.get_running_loop()
    path, moved = tmp_path / "audit.log", tmp_path / "moved"

    def write() -> None:
        audit.write(status=201, peer="uid 0", client="ann", key="k")

    def reload() -> None:
        loop.call_soon_threadsafe(is_read.set)
        raise InvalidRequest("is wrong", field="x")

    state = SimpleNamespace(service=SimpleNamespace(audit=audit))
    state.executions = SimpleNamespace(reload=reload)
    write()
    path.rename(moved)
    with caplog.at_level(logging.ERROR):
        module._reload(SimpleNamespace(state=state))  # type: ignore[arg-type]
        write()
        await asyncio.wait_for(is_read.wait(), PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while not caplog.records and time.monotonic() < until:
            await asyncio.sleep(0)
    assert (1, 1) == (len(moved.read_bytes().splitlines()), len(path.read_bytes().splitlines()))
    assert ["the configuration of executions was not changed"] == [
        each.getMessage().partition(":")[0] for each in caplog.records
    ]
    audit.close()


def test_a_shared_store_is_for_nodes_alone(tmp_path: Path) -> None:
    config = DaemonConfig(state_dir=str(tmp_path), snapshot_store=str(tmp_path / "store"))
    assert module._shared(DaemonConfig(state_dir=str(tmp_path))) is None
    with pytest.raises(InvalidRequest) as refused:
        module._shared(config)
    assert "snapshot_store" == refused.value.field


def test_what_keys_may_do_is_what_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "gateway.secret").write_bytes(b"s")
    form = {"node": "0a1b2c3d"}
    node = DaemonConfig.from_json(
        {**DaemonConfig(state_dir=str(tmp_path)).to_json(), "membership": form}
    )
    assert b"s" == module.settings_of(node).gateway_secret
    alone = DaemonConfig(state_dir=str(tmp_path))
    settings = module.settings_of(alone)
    assert b"" == settings.gateway_secret, "no gateway is trusted where there is no cluster"
    assert alone.bounds is settings.bounds
