"""How an exec is driven, found again and tidied away: faults that were put in and went unnoticed."""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.optional import DrivenExec
from ringfence.execs import execs as module
from ringfence.execs import retention as module_retention
from ringfence.execs import told
from ringfence.execs.counts import Counts
from ringfence.execs.execs import Execs
from ringfence.execs.pump import SpoolSink
from ringfence.execs.retention import Retention
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.spool.order import OUT
from ringfence.spool.spool import Spool
from tests.execs.test_each_bound import CAT, PATIENCE_S, _keep, execs, live, manager, run
from tests.native.outside import until

pytestmark = pytest.mark.anyone

__all__ = ["execs", "live", "manager"]


def test_one_that_outlasts_whoever_attends_it_is_driven_on(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT, attend_s=0.01)
    assert begun.running
    begun.append(memoryview(b"late"))
    begun.end_input()
    begun.done.result(PATIENCE_S)
    assert "ended" == begun.view().state
    assert b"late" == begun.result().stdout
    assert not begun.running


def test_a_timeout_of_a_year_ends_nobody_elses(execs: Execs, live: Live) -> None:
    """epoll_wait(2) takes 24 days at most; an error there ended the thread that drives every exec."""
    year = execs.start(live, replace(CAT, timeout_s=366 * 86_400.0))
    other = execs.start(live, CAT)
    for each in (other, year):
        each.end_input()
        each.done.result(PATIENCE_S)
        assert "ended" == each.view().state


def test_one_that_ends_in_time_is_over_when_it_is_returned(
    execs: Execs, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[object] = []
    monkeypatch.setattr(execs._reactor, "drive", driven.append)

    assert "ended" == execs.start(live, ExecRequest(("true",)), attend_s=PATIENCE_S).view().state
    assert [] == driven


def test_a_signal_reaches_what_runs_and_nothing_that_has_ended(execs: Execs, live: Live) -> None:
    begun = execs.start(live, ExecRequest(("sleep", "1000")))
    begun.signal(15)
    begun.done.result(PATIENCE_S)
    status = begun.view().status
    assert status is not None
    assert 15 == status.signal
    begun.signal(15)


def test_what_the_backend_still_has_runs_on(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server takes over the streams of an exec that lives, and sees its end."""
    first = Execs(manager)
    begun = first.start(live, replace(CAT, timeout_s=500.0))
    assert begun._pump is not None
    _keep(live, {begun.id: begun._pump.run}, monkeypatch)
    driven: list[object] = []

    def attend(_self: Execs, _live: Live, run: Run, _begun: object, request: ExecRequest) -> None:
        assert (500.0, True) == (request.timeout_s, request.stream_stdin)
        assert run._given is not None
        assert run._given._fd >= 0, "its input is counted on"
        run._given.close()

    def drive(_self: Execs, run: Run, _pump: object, _attend_s: float = 0.0) -> None:
        driven.append(run.id)

    monkeypatch.setattr(Execs, "_drive", drive)
    monkeypatch.setattr(Execs, "_attend", attend)
    monkeypatch.setattr(live.watched, "adopt", lambda each: each, raising=False)
    second = Execs(manager)

    assert [begun.id] == driven
    record = second._records.get(begun.id)
    assert record is not None
    assert "running" == record.state
    begun.end_input()
    begun.done.result(PATIENCE_S)
    for each in (first, second):
        each.close()


def test_the_end_of_the_server_waits_for_the_ends_of_execs(
    execs: Execs, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[list[Future[Any]], float]] = []
    monkeypatch.setattr(
        module, "wait", lambda futures, patience_s: waited.append((futures, patience_s))
    )
    begun = execs.start(live, CAT)
    execs._settle()
    begun.end_input()
    begun.done.result(PATIENCE_S)

    assert [[begun.done]] == [futures for futures, _ in waited]


def test_what_is_over_is_found_without_its_files_kept_open(
    manager: SessionManager, live: Live, execs: Execs, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = run(execs, live, "echo hi")
    closed: list[Spool] = []
    close = Spool.close

    def counted(spool: Spool, *streams: int) -> None:
        closed.append(spool)
        close(spool, *streams)

    monkeypatch.setattr(Spool, "close", counted)
    other = Execs(manager)
    found = other.find(live.sandbox_id, begun.id)

    assert found.spool in closed
    other.close()


@pytest.mark.parametrize(("number", "reads_on"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_terminal_that_cannot_be_spliced_is_read(
    number: int, reads_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL: before Linux 5.10 no terminal can be; EIO: its other side is closed."""
    spool = Spool(str(tmp_path / "spool"), 1 << 20)
    pipe, source = os.pipe(), os.pipe()
    os.set_blocking(pipe[0], False)
    os.write(source[1], b"typed")

    def refuse(*_: object, **_options: object) -> int:
        raise OSError(number, os.strerror(number))

    sink = SpoolSink(spool, OUT, pipe)
    monkeypatch.setattr(os, "splice", refuse)
    taken = sink.take(source[0])

    assert (5 if reads_on else 0) == taken
    for fd in (*pipe, *source):
        os.close(fd)
    spool.close()


# -- tidying ----------------------------------------------------------------------------------------


def test_output_goes_with_its_record(manager: SessionManager, live: Live) -> None:
    """The records alone are looked at every 15 s, every file every ten minutes."""
    execs = Execs(manager, most_records=2)
    made = [run(execs, live, "echo x").id for _ in range(4)]
    execs._retention._tidy_records_alone()

    assert made[2:] == [each.id for each in execs.list(live.sandbox_id)]
    assert {*made[2:]} == {*os.listdir(Path(execs.directory) / live.sandbox_id)}
    execs.close()


def test_more_than_an_eighth_wakes_it_once(
    manager: SessionManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_retention, "_EVERY_S", PATIENCE_S * 10)
    looked = threading.Semaphore(0)
    retention = Retention(manager.store, str(tmp_path / "none"), 800, 10, looked.release)
    assert looked.acquire(timeout=PATIENCE_S)  # on its start
    retention._wake.set()
    assert looked.acquire(timeout=PATIENCE_S)
    assert until(lambda: not retention._wake.is_set())
    retention.close()
    retention._wake.clear()
    retention.came(100)
    assert not retention._wake.is_set()
    retention.came(1)
    assert retention._wake.is_set()


def test_execs_that_ended_at_once_are_each_looked_at_once(
    execs: Execs, live: Live, manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page, in the order of their ids: which of them goes first is not left to chance."""
    monkeypatch.setattr(module_retention, "_BATCH", 2)
    made = [run(execs, live, "true").id for _ in range(5)]
    for each in made:
        record = manager.store.execs.get(each)
        assert record is not None
        manager.store.execs.put(replace(record, ended_at=1.0))

    assert sorted(made) == [found for found, _sandbox, _end in execs._retention._oldest()]


def test_so_much_is_kept_as_the_reference_says(execs: Execs) -> None:
    page = Path("docs/reference/streams.md").read_text(encoding="utf-8")

    assert f"limited to {execs._retention._most_bytes >> 30} GiB" in page
    assert f"{execs._retention._most_records:,} at most" in page


@pytest.mark.parametrize("key", ["", "key"])
@pytest.mark.parametrize(("attend_s", "is_attended"), [(0.0, False), (60.0, True)])
def test_what_is_attended_to_goes_on_in_no_fork(
    execs: Execs,
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    attend_s: float,
    is_attended: bool,
) -> None:
    """With a key and without: nothing is between it and its streams then."""
    started: list[str] = []
    for name in ("start", "start_attended"):
        plain = getattr(live.watched, name)

        def noted(*args: object, name: str = name, plain: Any = plain, **options: object) -> Any:
            started.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(live.watched, name, noted)
    request = ExecRequest(("true",))
    if key:
        run, is_new = execs.start_once(live, request, key, attend_s=attend_s)
        assert is_new
    else:
        run = execs.start(live, request, attend_s=attend_s)
    run.done.result(PATIENCE_S)
    assert ("start_attended" if is_attended else "start") == started[0]


def test_a_manager_that_ends_all_waits_for_what_is_written_of_it(
    manager: SessionManager, execs: Execs
) -> None:
    assert [execs._settle] == manager.before_store_closes


def test_what_the_backend_has_to_say_of_an_exec_is_at_the_end_of_its_errors(
    execs: Execs, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrivenExec, "note", b"a note\n")
    run = execs.start(live, ExecRequest(("sh", "-c", "echo out; echo err >&2")))
    run.done.result(PATIENCE_S)
    result = run.result()
    assert (b"out\n", b"err\na note\n") == (result.stdout, result.stderr)
    assert (4, 11) == (run.view().stdout_bytes, run.view().stderr_bytes)


def test_both_streams_are_counted_and_who_killed_it_is_told(
    execs: Execs, live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    run = execs.start(live, ExecRequest(("sh", "-c", "echo out; echo error >&2; exec sleep 600")))
    until(lambda: (4, 6) == (run.view().stdout_bytes, run.view().stderr_bytes))
    with caplog.at_level(logging.INFO, "ringfence.execs"):
        run.kill()
        run.done.result(PATIENCE_S)
    view = run.view()
    assert view.status is not None
    assert view.status.killed_by
    (record,) = (each for each in caplog.records if each.getMessage() == "exec ended")
    facts = getattr(record, told.FACTS)
    assert (view.status.killed_by, 4, 6) == (
        facts["killed_by"],
        facts["stdout_bytes"],
        facts["stderr_bytes"],
    )
    counts = Counts()
    counts.ended(view.altered(stdout_dropped_bytes=20, stderr_dropped_bytes=3))
    counts.ended(view)
    page = counts.render(0)
    assert "ringfence_output_bytes_total 20\n" in page
    assert "ringfence_output_dropped_bytes_total 23\n" in page
    assert 'ringfence_execs_total{state="ended"} 2\n' in page
