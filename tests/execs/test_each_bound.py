"""What an exec is given, keeps and leaves: each bound and each refusal, and what a full disk holds up."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.optional import DurableSandbox
from ringfence.errors import ExecError, ExecNotFound, LifecycleError, SandboxLost, StorageFull
from ringfence.execs import run as run_module
from ringfence.execs import told
from ringfence.execs.evicted import left_s
from ringfence.execs.execs import Execs
from ringfence.execs.given import Given
from ringfence.execs.pump import SpooledPump, SpoolSink
from ringfence.execs.retention import Retention
from ringfence.execs.run import Run
from ringfence.model.execs.exec import ExecRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.spool.order import ERR, OUT
from ringfence.spool.spool import Spool
from tests.execs.test_giving_back import descriptors_beneath
from tests.native.outside import until
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))
CAT = ExecRequest(("cat",), stream_stdin=True)
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
def execs(manager: SessionManager) -> Iterator[Execs]:
    made = Execs(manager)
    yield made
    made.close()


def writable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(PATIENCE_S * 1000))


def run(execs: Execs, live: Live, script: str, **options: Any) -> Run:
    begun = execs.start(live, ExecRequest(("sh", "-c", script), **options))
    begun.done.result(PATIENCE_S)
    return begun


# -- input --------------------------------------------------------------------------------------


def test_a_piece_that_overlaps_is_given_once_and_none_after_a_gap(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT)
    assert 5 == begun.give(0, memoryview(b"hello"))
    assert 5 == begun.give(2, memoryview(b"llo"))
    assert 11 == begun.give(3, memoryview(b"lo world"))
    for offset in (12, 1000):
        with pytest.raises(LifecycleError, match="continues at 11"):
            begun.give(offset, memoryview(b"x"))
        with pytest.raises(LifecycleError, match="continues at 11"):
            begun.end_input(offset)
    assert 1 == begun.append(memoryview(b"!"))
    begun.end_input(12)
    begun.done.result(PATIENCE_S)

    assert b"hello world!" == begun.result().stdout
    for attempt in (lambda: begun.append(memoryview(b"x")), begun.end_input):
        with pytest.raises(LifecycleError, match="has ended"):
            attempt()


def test_one_that_takes_no_input_says_so(execs: Execs, live: Live) -> None:
    begun = execs.start(live, ExecRequest(("sleep", "1000")))
    for attempt in (lambda: begun.give(0, memoryview(b"x")), begun.end_input):
        with pytest.raises(ExecError, match="no input stream"):
            attempt()
    with pytest.raises(LifecycleError, match="has not ended"):
        begun.result()
    begun.kill()
    begun.done.result(PATIENCE_S)


def test_a_terminal_s_input_does_not_end(execs: Execs, live: Live) -> None:
    begun = execs.start(live, ExecRequest(("cat",), pty=(24, 80)))
    with pytest.raises(LifecycleError, match="a terminal's input does not end"):
        begun.end_input()
    assert 2 == begun.append(memoryview(b"x\n"))
    begun.kill()
    begun.done.result(PATIENCE_S)


def test_closed_it_waits_for_the_removal_under_way(manager: SessionManager, tmp_path: Path) -> None:
    """The database is closed next."""
    entered, go_on = threading.Event(), threading.Event()

    def before() -> None:
        entered.set()
        go_on.wait(PATIENCE_S)

    retention = Retention(manager.store, str(tmp_path), 1, 1, before)
    assert entered.wait(PATIENCE_S)
    threading.Timer(0.05, go_on.set).start()
    retention.close()

    assert not retention._thread.is_alive()


def test_input_of_which_nobody_knows_how_far_it_came_is_not_gone_on_with(
    execs: Execs, live: Live
) -> None:
    begun = execs.start(live, CAT)
    begun.give(0, memoryview(b"hello"))
    assert begun._given
    begun._given.begin(3)  # and killed in the middle
    for attempt in (
        lambda: begun.give(5, memoryview(b"x")),
        lambda: begun.append(memoryview(b"x")),
        begun.end_input,
    ):
        with pytest.raises(ExecError, match="bytes 5 to 8"):
            attempt()
    begun.kill()
    begun.done.result(PATIENCE_S)


def test_a_count_of_input(tmp_path: Path) -> None:
    given = Given(str(tmp_path / "deep" / "stdin"))
    given.open()
    fd = given._fd
    given.open()
    assert fd == given._fd, "opened twice"
    given.begin(10)
    assert (0, 10) == (Given(given._path).count, Given(given._path)._most)
    given.end(10)
    assert (10, 10) == (Given(given._path).count, Given(given._path)._most)
    assert [0, 2, 5, 0] == [given.accept(*each) for each in ((10, 5), (8, 5), (0, 5), (10, 0))]
    with pytest.raises(LifecycleError):
        given.accept(11, 1)
    given.close()

    (tmp_path / "short").write_bytes(b"1234567")
    assert (0, 0) == (Given(str(tmp_path / "short")).count, Given(str(tmp_path / "none")).count)
    (tmp_path / "outside").touch()
    (tmp_path / "link").symlink_to("outside")
    with pytest.raises(StorageFull):
        Given(str(tmp_path / "link")).open()
    assert b"" == (tmp_path / "outside").read_bytes()


# -- output -------------------------------------------------------------------------------------


def test_what_is_dropped_of_either_stream_is_told(execs: Execs, live: Live) -> None:
    request = ExecRequest(("sh", "-c", "cat; cat >&2"), max_output_bytes=100, stream_stdin=True)
    total = 0
    for script in ("cat", "cat >&2"):
        begun = execs.start(live, replace(request, argv=("sh", "-c", script)))
        place, given = begun.input_place(), 0
        while given < 400_000:
            assert writable(place)
            given += begun.append(memoryview(b"x" * 50_000))
        os.close(place)
        begun.end_input()
        begun.done.result(PATIENCE_S)
        view = begun.view()
        dropped = (view.stdout_dropped_bytes, view.stderr_dropped_bytes)
        total += sum(dropped)

        assert view.truncated
        assert (0 < dropped[0], 0 < dropped[1]) == ("cat" == script, "cat" != script)
    assert not run(execs, live, "echo x; echo y >&2", max_output_bytes=2).view().truncated
    assert f"ringfence_output_dropped_bytes_total {total}\n" in execs.counts.render(0)


def test_a_result_is_no_larger_than_one_made_in_memory_may_be(
    execs: Execs, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = run(execs, live, "echo 0123456789")
    monkeypatch.setattr(run_module, "MOST_INLINE_BYTES", 6)
    result = begun.result()

    assert 6 == len(result.stdout)
    assert (5, 0) == (result.stdout_dropped_bytes, begun.view().stdout_dropped_bytes)


@pytest.mark.parametrize(
    ("asked", "of_spec", "kept"), [(None, None, 77), (5, 9, 5), (None, 9, 9), (0, 9, 0)]
)
def test_so_much_is_kept_as_the_request_says_or_else_the_sandbox_or_else_the_server(
    manager: SessionManager, asked: int | None, of_spec: int | None, kept: int
) -> None:
    limits = {} if of_spec is None else {"limits": {"output_bytes": of_spec}}
    live = manager.index.find(manager.acquire(limits, client_id="ann").id)
    assert live
    execs = Execs(manager, 77)
    assert kept == run(execs, live, "true", max_output_bytes=asked).view().kept_bytes
    execs.close()


def test_what_was_on_its_way_when_a_server_was_killed_arrives(tmp_path: Path) -> None:
    splice_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.write(splice_pipe[1], b"before")
    spool = Spool(str(tmp_path / "spool"), 100, (0, 0), None)
    SpoolSink(spool, OUT, splice_pipe)

    assert b"before" == spool.tracks[OUT].ends(100)[0]
    spool.close()
    for fd in splice_pipe:
        os.close(fd)


@pytest.mark.parametrize("has_splice_pipe", [True, False])
def test_a_terminal_whose_other_side_is_closed_ends_its_stream(
    tmp_path: Path, has_splice_pipe: bool
) -> None:
    splice_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    spool = Spool(str(tmp_path / "spool"), 100, (0, 0), None)
    sink = SpoolSink(spool, OUT, splice_pipe if has_splice_pipe else None)
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    os.write(theirs, b"said")
    taken = 0
    while taken < 4:
        taken += sink.take(ours)
    with pytest.raises(BlockingIOError):
        sink.take(ours)
    os.close(theirs)
    if has_splice_pipe:
        assert 0 == sink.take(ours)

    assert b"said" == spool.tracks[OUT].ends(100)[0]
    spool.close()
    os.close(ours)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SpoolSink(spool, ERR, splice_pipe).take(ours)
    for fd in splice_pipe:
        os.close(fd)


# -- ends ---------------------------------------------------------------------------------------


def test_an_exec_is_found_in_its_own_sandbox_alone(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT)

    assert begun is execs.running(live.sandbox_id, begun.id)
    assert execs.running("sbx-another", begun.id) is None
    with pytest.raises(ExecNotFound):
        execs.find("sbx-another", begun.id)
    begun.end_input()
    begun.done.result(PATIENCE_S)
    with pytest.raises(ExecNotFound):
        execs.find("sbx-another", begun.id)


def test_an_end_that_cannot_be_written_holds_what_it_holds_until_it_is(
    execs: Execs, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released sooner, the next server could not learn the end; later, each would stay for good."""
    released: list[SpooledPump] = []
    release = SpooledPump.release

    def note(pump: SpooledPump) -> None:
        released.append(pump)
        release(pump)

    def full(*_: Any) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(SpooledPump, "release", note)
    some = [execs.start(live, CAT) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(execs._records, "put", full)
        for each in some:
            each.end_input()
            each.done.result(PATIENCE_S)
        for _ in range(2):  # it is tried again, and it is all there still
            execs._write_rest()
            assert ([], 2, 2) == (released, len(execs._unwritten), len(execs._runs))
    assert ["running"] * 2 == [each.state for each in execs._records.unended()]
    assert ["ended"] * 2 == [execs.find(live.sandbox_id, each.id).view().state for each in some]

    execs._write_rest()
    assert (2, [], {}) == (len(released), execs._unwritten, execs._runs)
    assert [] == execs._records.unended()
    execs._write_rest()
    assert 2 == len(released)


def test_what_never_began_has_failed_and_what_did_is_lost(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT)
    assert "failed" == begun.problem(ExecError("it could not be run")).state
    assert "lost" == begun.problem(SandboxLost("it is gone")).state
    begun.end_input()
    begun.done.result(PATIENCE_S)


def test_closed_it_looks_after_nothing_any_more(manager: SessionManager) -> None:
    execs = Execs(manager)
    thread = execs._retention._thread
    assert thread.is_alive()
    execs.close()
    assert not thread.is_alive()
    execs.close()


def test_a_look_that_fails_is_not_the_last(manager: SessionManager) -> None:
    execs = Execs(manager)
    looked = threading.Semaphore(0)

    def fail() -> None:
        looked.release()
        raise OSError(5, "a disk that cannot be read")

    execs._retention._tidy_records_alone = execs._retention.tidy = fail  # type: ignore[method-assign]
    for _ in range(3):
        execs._retention._wake.set()
        assert looked.acquire(timeout=PATIENCE_S)
    assert execs._retention._thread.is_alive()
    execs.close()


def test_who_is_given_the_rest_of_its_input_by_nobody_is_ended(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input was in the memory of the server before; without it, it would wait for ever."""
    first = Execs(manager)
    request = ExecRequest(("sleep", "1000"), stdin=b"x" * 1_000_000)
    begun = first.start(live, request)
    assert begun._pump
    theirs = begun._pump.run
    closed: list[str] = []

    class Adopted:
        """What another process would have of it."""

        stdin = theirs.stdin

        def kill(self) -> None:
            closed.append("killed")

        def close(self) -> None:
            closed.append("closed")

    _keep(live, {begun.id: Adopted()}, monkeypatch)
    second = Execs(manager)
    found = second.find(live.sandbox_id, begun.id).view()

    assert ["killed", "closed"] == closed
    assert found.problem
    assert ("lost", "sandbox_lost") == (found.state, found.problem.code)
    begun.kill()
    begun.done.result(PATIENCE_S)
    for each in (first, second):
        each.close()


def _keep(live: Live, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sandbox one of a durable backend, which has these execs of an earlier process."""
    own = type(live.inner)
    durable = type("Kept", (own, DurableSandbox), {"adopted_execs": lambda _self: kept})
    monkeypatch.setattr(live.inner, "__class__", durable)


def test_one_that_never_began_may_be_asked_for_again_under_its_key(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written down, and killed before it was started; the backend has every one that was."""
    first = Execs(manager)
    begun, _ = first.start_once(live, CAT, "key")
    _keep(live, {}, monkeypatch)
    second = Execs(manager)
    found = second.find(live.sandbox_id, begun.id).view()

    assert found.problem
    assert ("failed", "exec_not_started") == (found.state, found.problem.code)
    monkeypatch.undo()
    again, is_new = second.start_once(live, CAT, "key")
    assert is_new
    assert again.id != begun.id
    for each in (begun, again):
        each.end_input()
        each.done.result(PATIENCE_S)
    for every in (first, second):
        every.close()


def test_a_page_is_full_although_one_on_it_is_about_to_begin(execs: Execs, live: Live) -> None:
    """One that is hidden does not count, be it the first, one between or the last."""
    some = [run(execs, live, "true").id for _ in range(5)]
    for each in some:
        record = execs._records.get(each)
        assert record
        hidden = replace(record, state="running", id=each + "-x")
        execs._records.put(hidden)
        execs._beginning.add(hidden.id)
        assert some[:3] == [view.id for view in execs.list(live.sandbox_id, limit=3)]
        assert some == [view.id for view in execs.list(live.sandbox_id)]
        execs._records.remove(hidden.id)
        execs._beginning.discard(hidden.id)


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_begins_while_it_is_looked_for_is_found_as_it_is_then(
    execs: Execs, live: Live, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written down, and does not run yet; then it does, or has ended already."""
    begun = execs.start(live, CAT)
    original, looks = execs._records.get, list[str]()
    with execs._lock:
        run = execs._runs.pop(begun.id)

    def get(exec_id: str) -> Any:
        record = original(exec_id)
        looks.append(exec_id)
        if 1 == len(looks):
            with execs._lock:
                execs._runs[begun.id] = run
            if ends:
                begun.end_input()
                begun.done.result(PATIENCE_S)
                assert until(lambda: begun.id not in execs._runs)
        return record

    monkeypatch.setattr(execs._records, "get", get)
    found = execs.find(live.sandbox_id, begun.id)
    assert ends == (not found.view().running)
    assert ends == (found is not begun)
    if not ends:
        begun.end_input()
        begun.done.result(PATIENCE_S)


def test_one_that_does_not_go_on_here_is_told_and_holds_nothing(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT)
    # A thread looks at the directory itself now and then.
    assert until(lambda: execs.directory not in descriptors_beneath(execs.directory))
    before = descriptors_beneath(execs.directory), execs._budget.left
    execs.lose(begun.view().altered(id="exec-elsewhere"), SandboxLost("it does not go on"))
    found = execs.find(live.sandbox_id, "exec-elsewhere").view()
    assert found.problem is not None
    assert ("lost", "it does not go on") == (found.state, found.problem.message)
    assert until(lambda: before == (descriptors_beneath(execs.directory), execs._budget.left))
    begun.end_input()
    begun.done.result(PATIENCE_S)


def test_what_is_over_or_known_already_holds_nothing_open(
    manager: SessionManager, live: Live
) -> None:
    """Neither the counting of input, nor the output, nor a part of what all may keep together."""
    first = Execs(manager)
    begun, _ = first.start_once(live, CAT, "key")
    before = descriptors_beneath(first.directory), first._budget.left
    again, is_new = first.start_once(live, CAT, "key")
    assert (begun, False) == (again, is_new)
    assert before == (descriptors_beneath(first.directory), first._budget.left)

    second = Execs(manager)  # to which it is lost
    assert until(lambda: before[0] == descriptors_beneath(first.directory))
    assert "lost" == second.find(live.sandbox_id, begun.id).view().state
    begun.end_input()
    begun.done.result(PATIENCE_S)
    assert until(lambda: [] == descriptors_beneath(first.directory))
    for each in (first, second):
        each.close()


def test_what_is_over_takes_nothing_of_what_those_that_run_may_keep(
    execs: Execs, live: Live
) -> None:
    """However often it is looked at."""
    left = execs._budget.left
    over = run(execs, live, "echo said")
    assert until(lambda: over.id not in execs._runs)
    for _ in range(2):
        assert 5 == execs.find(live.sandbox_id, over.id).view().stdout_bytes
    assert left == execs._budget.left


def test_a_fault_of_the_disk_is_told_of_either_stream(execs: Execs, live: Live) -> None:
    begun = execs.start(live, CAT)
    for track in begun.spool.tracks:
        track.fault = f"of {track.segments.name}"
        assert track.fault == begun.view().storage_fault
        track.fault = ""
    begun.end_input()
    begun.done.result(PATIENCE_S)


def test_what_could_not_be_written_is_tried_once_more_at_the_end(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageFull("no room")

    execs = Execs(manager)
    begun = execs.start(live, CAT)
    with monkeypatch.context() as patch:
        patch.setattr(execs._records, "put", full)
        begun.end_input()
        begun.done.result(PATIENCE_S)
    execs.close()

    assert [] == execs._records.unended()


def test_the_log_warns_of_what_was_lost_and_not_of_what_never_began(
    execs: Execs, live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    begun = run(execs, live, "true")
    caplog.clear()
    with caplog.at_level("INFO", logger="ringfence.execs"):
        told.ended(begun.problem(ExecError("it could not be run")))
        told.ended(begun.problem(SandboxLost("it is gone")))

    assert ["INFO", "WARNING"] == [record.levelname for record in caplog.records]


def test_an_evicted_exec_has_the_rest_of_its_timeout(execs: Execs, live: Live) -> None:
    view = run(execs, live, "true", timeout_s=60.0).view()

    assert 45.0 == left_s(view, view.created_at + 15.0)
    assert 0 < (left_s(view, view.created_at + 100.0) or 0) < 1
    assert left_s(view.altered(timeout_s=None), view.created_at + 15.0) is None
