"""An exec that could not begin leaves nothing: no record, no key, no file, no descriptor, no budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import ExecNotFound, IoError, SandboxLost, StorageFull
from ringfence.execs.execs import Execs, _with_input
from ringfence.execs.given import Given
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))
REQUEST = ExecRequest(("cat",), stream_stdin=True)  # whose input is counted in a file
ERRORS = (IoError("the disk is full"), SandboxLost("gone"), ValueError("a fault of ours"))
PATIENCE_S = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SessionManager]:
    with SessionManager(CONFIG, state_dir=str(tmp_path), backends=[Unconfined()]) as made:
        yield made


@pytest.fixture
def live(manager: SessionManager) -> Live:
    found = manager.index.find(manager.acquire(client_id="ann").id)
    assert found is not None
    return found


@pytest.fixture
def execs(manager: SessionManager, live: Live) -> Iterator[Execs]:
    made = Execs(manager)
    finish(made.start(live, REQUEST))  # what is opened once, is open
    yield made
    made.close()


def finish(run: Run) -> bytes:
    run.give(0, memoryview(b"hello"))
    run.end_input()
    run.done.result(PATIENCE_S)
    return run.result().stdout


def descriptors_beneath(directory: str) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(directory))


def held(execs: Execs, live: Live) -> dict[str, Any]:
    """Everything that an exec takes while it is there."""
    return {
        "records": [record.id for record in execs._records.of_sandbox(live.sandbox_id, "", 100)],
        "keys": execs._records._database.rows("SELECT count(*) FROM exec_keys")[0][0],
        "listed": len(execs.list(live.sandbox_id)),
        "running": (execs.live_count, sorted(execs._runs), sorted(execs._beginning)),
        "files": sorted(str(path) for path in Path(execs.directory).rglob("*") if path.is_file()),
        "descriptors": descriptors_beneath(execs.directory),
        "budget": execs._budget.left,
        "in use": (live.use.running, live.use.busy),
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["put", "prepare", "start"])
@pytest.mark.parametrize("key", ["", "k"])
def test_one_that_could_not_begin_is_not_there_and_can_be_asked_for_again(
    execs: Execs,
    live: Live,
    step: str,
    key: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin() -> Run:
        if key:
            run, is_new = execs.start_once(live, REQUEST, key)
            assert is_new
            return run
        return execs.start(live, REQUEST)

    before = held(execs, live)
    target: Any = {"put": execs._records, "prepare": Run, "start": live.watched}[step]
    tried: list[str] = []

    def fail(*_given: Any, label: str = "", **_named: Any) -> None:
        tried.append(label)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(target, step, fail)
        with pytest.raises(type(error)):
            begin()

    assert tried
    assert before == held(execs, live)
    if tried[0]:  # it had an id
        with pytest.raises(ExecNotFound):
            execs.find(live.sandbox_id, tried[0])

    assert b"hello" == finish(begin())


def test_input_that_cannot_be_counted_is_refused_and_its_file_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    given = Given(str(tmp_path / "deep" / "stdin"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageFull):
            given.open()
    assert [] == descriptors_beneath(str(tmp_path))
    given.open()
    assert 1 == len(descriptors_beneath(str(tmp_path)))
    given.close()
    assert [] == descriptors_beneath(str(tmp_path))


def test_at_a_terminal_somebody_types() -> None:
    """Unless there is input already."""
    shell = ExecRequest(("sh",), pty=(24, 80))

    assert _with_input(shell).stream_stdin
    assert not _with_input(ExecRequest(("sh",))).stream_stdin
