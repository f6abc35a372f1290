"""Execs that are kept: within bounds, on a full disk, and over the end of whoever kept them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import ExecNotFound, LifecycleError, SandboxLost
from ringfence.execs import retention
from ringfence.execs.execs import Execs
from ringfence.execs.given import Given
from ringfence.execs.pump import SpooledPump
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.spool.order import OUT
from ringfence.spool.track import EXHAUSTED
from tests.features import require
from tests.native.callers import Caller
from tests.native.outside import until
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))
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


def run(execs: Execs, live: Live, script: str) -> Run:
    begun = execs.start(live, ExecRequest(("sh", "-c", script)))
    begun.done.result(PATIENCE_S)
    return begun


def test_an_exec_is_found_again_by_whoever_comes_later(manager: SessionManager, live: Live) -> None:
    first = Execs(manager)
    begun = run(first, live, "echo hello; exit 3")
    first.close()
    second = Execs(manager)
    found = second.find(live.sandbox_id, begun.id)

    assert (3, b"hello\n") == (found.result().exit_code, found.result().stdout)
    assert found.view() == begun.view()
    with pytest.raises(ExecNotFound):
        second.find("sbx-another", begun.id)
    with pytest.raises(LifecycleError):
        found.give(0, memoryview(b"x"))
    second.close()


def test_who_sees_an_exec_can_write_to_it(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written down before it begins, and shown once it has."""
    execs, starting, go_on = Execs(manager), threading.Event(), threading.Event()
    start = live.watched.start

    def slowly(*given: Any, **named: Any) -> Any:
        starting.set()
        assert go_on.wait(PATIENCE_S)
        return start(*given, **named)

    monkeypatch.setattr(live.watched, "start", slowly)
    request = ExecRequest(("cat",), stream_stdin=True)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(execs.start, live, request)
        assert starting.wait(PATIENCE_S)
        (record,) = manager.store.execs.of_sandbox(live.sandbox_id, "", 10)
        seen = execs.list(live.sandbox_id)
        with pytest.raises(ExecNotFound):
            execs.find(live.sandbox_id, record.id)
        go_on.set()
        assert record.id == begun.result(PATIENCE_S).id
    (view,) = execs.list(live.sandbox_id)
    found = execs.find(live.sandbox_id, view.id)
    found.give(0, memoryview(b"hello"))
    found.end_input()
    found.done.result(PATIENCE_S)

    assert [] == seen
    assert b"hello" == found.result().stdout
    execs.close()


def test_one_whose_end_nobody_saw_is_lost(manager: SessionManager, live: Live) -> None:
    first = Execs(manager)
    begun = first.start(live, ExecRequest(("sleep", "1000")))
    second = Execs(manager)  # the backend keeps nothing for it
    found = second.find(live.sandbox_id, begun.id)

    with pytest.raises(SandboxLost):
        found.result()
    assert ("lost", None) == (found.view().state, found.view().status)
    begun.kill()
    first.close()
    second.close()


def test_output_that_ended_first_goes_first_and_its_loss_is_told(
    manager: SessionManager, live: Live, tmp_path: Path
) -> None:
    execs = Execs(manager, most_bytes=250, most_records=4)
    made = [run(execs, live, "echo " + "x" * 99) for _ in range(5)]
    execs._retention.tidy()
    left = {each.id for each in execs.list(live.sandbox_id)}
    on_disk = {path.name for path in (tmp_path / "spool" / live.sandbox_id).iterdir()}
    gone = execs.find(live.sandbox_id, made[2].id)

    assert {each.id for each in made[1:]} == left
    assert {each.id for each in made[3:]} == on_disk
    assert (0, 100, b"") == (
        gone.result().exit_code,
        gone.result().stdout_dropped_bytes,
        gone.result().stdout,
    )
    assert 100 == gone.spool.tracks[OUT].dropped_bytes
    execs.close()


def test_more_records_than_are_read_at_once_are_bounded_in_bytes(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH", 2)
    execs = Execs(manager)
    made = [run(execs, live, "echo " + "x" * 99) for _ in range(7)]
    execs._retention._most_bytes = 150
    execs._retention.tidy()

    left = [each.id for each in made if execs.find(live.sandbox_id, each.id).result().stdout]
    assert [made[6].id] == left
    execs.close()


def test_much_output_is_tidied_before_its_time(manager: SessionManager, live: Live) -> None:
    """The thread looks every 15 s; an eighth of what may be kept wakes it."""
    execs = Execs(manager, most_bytes=1000)
    execs._retention._survey_at = float("inf")
    for _ in range(20):
        run(execs, live, "echo " + "x" * 99)

    def kept() -> int:
        return len(list((Path(execs.directory) / live.sandbox_id).iterdir()))

    assert until(lambda: kept() <= 11)  # and what came since the last look
    execs.close()


def test_begun_and_ended_are_counted(manager: SessionManager, live: Live) -> None:
    execs = Execs(manager)
    run(execs, live, "exit 0")
    running = execs.start(live, ExecRequest(("cat",), stream_stdin=True))

    counted = execs.counts.render(1).splitlines()
    assert "ringfence_execs_started_total 2" in counted
    assert 'ringfence_execs_total{state="ended"} 1' in counted
    running.end_input()
    running.done.result(PATIENCE_S)
    execs.close()


@pytest.mark.parametrize("attend_s", [0.0, 5.0])
def test_output_that_cannot_be_moved_ends_the_exec_with_the_reason(
    manager: SessionManager, live: Live, attend_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the caller moves it, or the thread that moves that of all."""
    released = []

    def fail(*_: Any) -> None:
        raise ValueError("a fault of ours")

    release = SpooledPump.release

    def note(pump: SpooledPump) -> None:
        released.append(pump)
        release(pump)

    execs = Execs(manager)
    with monkeypatch.context() as patch:
        patch.setattr(SpooledPump, "release", note)
        patch.setattr(SpooledPump, "ready", fail)
        begun = execs.start(live, ExecRequest(("echo", "x")), attend_s=attend_s)
        begun.done.result(PATIENCE_S)

    problem = begun.view().problem
    assert problem
    assert ("task_failed", True) == (problem.code, "a fault of ours" in problem.message)
    assert released
    assert begun.spool.closed, "who follows its output is told that no more comes"
    assert b"x\n" == run(execs, live, "echo x").result().stdout, "the control"
    execs.close()


def test_two_that_tidy_at_once_remove_no_more_than_one(
    manager: SessionManager, live: Live, tmp_path: Path
) -> None:
    execs = Execs(manager, most_bytes=10_000)
    for _ in range(20):
        run(execs, live, "echo " + "x" * 999)
    execs._retention._most_bytes = 4000
    together = threading.Barrier(8)

    def tidy(_: int) -> None:
        together.wait(PATIENCE_S)
        execs._retention.tidy()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tidy, range(8)))

    assert 4 == len(list((tmp_path / "spool" / live.sandbox_id).iterdir()))
    execs.close()


def test_what_runs_keeps_no_more_than_it_may_together(manager: SessionManager, live: Live) -> None:
    execs = Execs(manager, most_running_bytes=1000)
    says = "echo " + "x" * 799
    request = ExecRequest(("sh", "-c", f"{says}; cat"), stream_stdin=True)
    begun = [execs.start(live, request) for _ in range(2)]
    assert until(lambda: [800, 800] == [each.view().stdout_bytes for each in begun])

    assert [0, 600] == sorted(each.view().stdout_dropped_bytes for each in begun)
    assert {"", EXHAUSTED} == {each.view().storage_fault for each in begun}
    for each in begun:
        each.end_input()
        each.done.result(PATIENCE_S)
        assert 0 == each.result().exit_code
    after = run(execs, live, says).view()
    assert (800, 0, "") == (after.stdout_bytes, after.stdout_dropped_bytes, after.storage_fault)
    execs.close()


def test_what_belongs_to_no_sandbox_is_removed(
    manager: SessionManager, live: Live, tmp_path: Path
) -> None:
    stray = tmp_path / "spool" / "sbx-unknown" / "exec-1"
    stray.mkdir(parents=True)
    execs = Execs(manager)
    kept = run(execs, live, "echo kept")
    execs._retention.tidy()
    execs.close()

    assert not stray.parent.exists()
    assert b"kept\n" == execs.find(live.sandbox_id, kept.id).result().stdout


def test_without_a_state_directory_nothing_is_left(tmp_path: Path) -> None:
    with SessionManager(CONFIG, backends=[Unconfined()]) as manager:
        live = manager.index.find(manager.acquire(client_id="ann").id)
        assert live is not None
        execs = Execs(manager)
        assert b"x\n" == run(execs, live, "echo x").result().stdout
        execs.close()
    assert not os.path.exists(execs.directory)


def test_input_of_which_nobody_knows_whether_it_arrived_is_never_sent_again(tmp_path: Path) -> None:
    path = str(tmp_path / "x" / "stdin")
    sure = Given(path)
    sure.open()
    sure.begin(10)
    sure.end(7)
    assert (7, 5) == (Given(path).count, Given(path).accept(0, 5))
    sure.begin(3)  # and killed
    with pytest.raises(Exception, match="bytes 7 to 10"):
        Given(path).accept(7, 3)
    sure.close()


def test_the_log_has_ids_and_numbers_and_nothing_that_was_run(
    manager: SessionManager, live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    execs = Execs(manager)
    with caplog.at_level("INFO", logger="ringfence.execs"):
        begun = run(execs, live, "echo secret; exit 3")
    execs.close()
    facts: list[dict[str, Any]] = [vars(record)["facts"] for record in caplog.records]

    assert ["exec running", "exec ended"] == [record.getMessage() for record in caplog.records]
    assert {(begun.id, live.sandbox_id)} == {(each["exec"], each["sandbox"]) for each in facts}
    assert (3, 7) == (facts[1]["exit_code"], facts[1]["stdout_bytes"])
    assert "secret" not in str(facts)


_FULL = """
import ctypes, tempfile
from tests.unconfined import Unconfined
from ringfence.errors import ResourceExhausted
from ringfence.execs.execs import Execs
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions import ManagerConfig, PoolConfig, SessionManager
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, sys.argv[1].encode())
config = ManagerConfig(pool=PoolConfig(enabled=False))
manager = SessionManager(config, state_dir=place + "/state", backends=[Unconfined()])
live = manager.index.find(manager.acquire(client_id="ann").id)
execs = Execs(manager)
running = execs.start(live, ExecRequest(("sh", "-c", "cat; exit 3"), stream_stdin=True))
pump = running._pump
fill = open(place + "/filler", "wb", buffering=0)
try:
    while True:
        fill.write(b"x" * 4096)
except OSError:
    pass
refused = None
for _ in range(200):
    try:
        execs.start(live, ExecRequest(("true",)))
    except ResourceExhausted as exc:
        refused = exc.code
        break
data = memoryview(bytes(600_000))
given = 0
while given < len(data):
    given = running.give(given, data[given:])
running.end_input(given)
running.done.result(20)
view = running.view()
found = execs.find(live.sandbox_id, running.id).view()
unwritten, kept_open = running.id in [view.id for view, _ in execs._unwritten], pump.run.done >= 0
fill.close()
os.unlink(place + "/filler")
again = execs.start(live, ExecRequest(("sh", "-c", "echo again")))
again.done.result(20)
execs._retention.tidy()
kept_open = [kept_open, pump.run.done >= 0, execs._records.get(running.id).state, execs._unwritten]
say([refused, view.status.exit_code, view.storage_fault, view.stdout_bytes, view.stdout_dropped_bytes,
     found == view, again.result().stdout.decode(), unwritten, kept_open])
execs.close()
manager.close()
libc.umount2(place.encode(), 2)
os.rmdir(place)
say()
"""


def test_a_full_disk_kills_nothing_and_hides_nothing() -> None:
    require("user namespaces")
    under = ("unshare", "--user", "--map-root-user", "--mount")
    with Caller(_FULL, "size=900k", under=under) as caller:
        refused, code, fault, came, dropped, found, again, unwritten, kept = caller.hear()
        assert caller.hear() is None  # it has removed what it made

    assert refused
    assert (3, os.strerror(28)) == (code, fault)
    assert 600_000 == came
    assert 0 < dropped <= came
    assert found
    assert "again\n" == again
    # Until its end is written down, the next server could still learn it. It may have been at once: what
    # was refused wrote part of itself into SQLite's log, where a smaller record has room then.
    assert [unwritten, False, "ended", []] == kept


def test_who_waits_for_the_end_is_called_once_and_forgotten_when_they_leave(
    manager: SessionManager, live: Live
) -> None:
    execs = Execs(manager)
    begun = execs.start(live, ExecRequest(("cat",), stream_stdin=True))
    called: list[str] = []
    stay = begun.at_end(lambda: called.append("stayed"))
    for _ in range(100):
        begun.at_end(lambda: called.append("left"))()
    assert 1 == len(begun._waiting)
    begun.end_input()
    begun.done.result(PATIENCE_S)
    execs.close()
    begun.at_end(lambda: called.append("late"))
    stay()

    assert {"stayed", "late"} == set(called)
    assert 2 == len(called)


def test_closed_it_leaves_no_thread_and_no_descriptor(manager: SessionManager, live: Live) -> None:
    def threads() -> int:
        return sum("ringfence-reactor" == thread.name for thread in threading.enumerate())

    before = threads()
    execs = Execs(manager)
    running = execs.start(live, ExecRequest(("sleep", "1000")))
    assert before + 1 == threads()

    execs.close()
    assert before + 1 == threads()  # it still drives what runs
    running.kill()
    running.done.result(PATIENCE_S)

    until(lambda: before == threads())
