"""Execs that go on in forks, or where an evicted sandbox is restored: held, and let go on every way out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.optional import ProcessTemplate, WaitingCopy
from ringfence.contexts import frames
from ringfence.errors import IoError, LifecycleError, Unsupported
from ringfence.execs import evicted
from ringfence.execs.evicted import EvictedExecs, come_back
from ringfence.execs.execs import Execs
from ringfence.execs.live_forks import LiveForks
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.execs.exec_view import ExecState
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from tests.native.outside import until
from tests.unit.sessions.whole import Whole, WholeSandbox

pytestmark = pytest.mark.anyone

CAT = ExecRequest(("cat",), stream_stdin=True)
CONTEXT = ("sh", "-c", "exec cat", frames.MARK, "python")
PATIENCE_S = 60.0


class Template(ProcessTemplate):
    """What is asked of it is recorded; its copies are new processes of the same command."""

    ids = (7,)

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails = False

    def release(self) -> None:
        self.done.append("release")

    def load(self) -> None:
        self.done.append("load")

    def copy(self, sandbox: Any, request: ExecRequest, taken: Any, label: str = "") -> WaitingCopy:
        assert [7] * len(taken) == [*taken]
        if self.fails:
            raise Unsupported("the kernel refused")
        return Copy(sandbox.start(request), self)

    def close(self) -> None:
        self.done.append("close")


class Copy(WaitingCopy):
    def __init__(self, run: Any, template: Template) -> None:
        super().__init__(run)
        self._template = template

    def go_on(self) -> None:
        self._template.done.append("go on")

    def close(self) -> None:
        self._template.done.append("close copy")


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> list[Template]:
    """Of all sandboxes, in the order in which they were asked for."""
    made: list[Template] = []

    def template(self: WholeSandbox, run: Any) -> Template:
        made.append(Template())
        return made[-1]

    def move(self: WholeSandbox, templates: Any, sandbox: Any) -> None:
        self._backend.done.append("move")  # type: ignore[attr-defined]

    monkeypatch.setattr(WholeSandbox, "template", template)
    monkeypatch.setattr(WholeSandbox, "move", move)
    monkeypatch.setattr(WholeSandbox, "number_of", lambda _self, each: made.index(each))
    monkeypatch.setattr(WholeSandbox, "rejoin", lambda self, _number, request: self.start(request))
    return made


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SessionManager]:
    state = tmp_path / "state"
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with (
        closing(Whole(str(state / "snapshots"))) as backend,
        SessionManager(config, state_dir=str(state), backends=[backend]) as made,
    ):
        yield made


@pytest.fixture
def execs(manager: SessionManager) -> Iterator[Execs]:
    with closing(Execs(manager)) as made:
        yield made


def new(manager: SessionManager) -> Live:
    found = manager.index.find(manager.acquire(client_id="ann").id)
    assert found is not None
    return found


def carry_of(execs: Execs, live: Live, busy: str = "") -> tuple[LiveForks, list[str]]:
    going_on: list[str] = []
    return LiveForks(execs, live.sandbox_id, busy, lambda: going_on.append("on")), going_on


def test_execs_are_held_and_let_go(
    manager: SessionManager, execs: Execs, templates: list[Template]
) -> None:
    live, other = new(manager), new(manager)
    runs = [execs.start(live, CAT) for _ in range(2)]
    execs.start(other, CAT)
    carry, going_on = carry_of(execs, live)
    carry.stop("required", live, live.spec)
    assert carry.is_whole
    assert 2 == len(templates), "those of another sandbox are left alone"
    assert carry.report.has_processes
    assert ((), tuple(each.id for each in runs)) == (carry.report.contexts, carry.report.processes)
    assert ["cat", "cat"] == [each.command for each in carry.report.copies]
    assert [] == going_on
    carry.release()
    carry.load()
    fork = new(manager)
    carry.put_into(fork)
    assert [True, True] == [each.running for each in execs.running_of(fork.sandbox_id)]
    pairs = carry.execs[0]
    assert [each.id for each in runs] == [*pairs]
    assert [*pairs.values()] == [each.id for each in execs.running_of(fork.sandbox_id)]
    carry.close()
    carry.close()
    wanted = ["release", "load", "go on", "close copy", "close"]
    assert [wanted, wanted] == [each.done for each in templates]
    assert 3 == len(going_on)

    again, _ = carry_of(execs, live)
    again.remember(fork)
    assert [pairs] == again.execs
    assert again.report.processes == carry.report.processes


def test_a_copy_is_described_and_bounded_as_what_it_is_a_copy_of(
    manager: SessionManager, execs: Execs, templates: list[Template]
) -> None:
    """And a context, which is told that it is a copy; what has ended before is no part of it."""
    live, fork = new(manager), new(manager)
    over = execs.start(live, ExecRequest(("true",)))
    over.done.result(PATIENCE_S)
    request = ExecRequest(
        ("cat",),
        cwd="/tmp",
        user="sandbox",
        timeout_s=600,
        stream_stdin=True,
        max_output_bytes=12_345,
    )
    run = execs.start(live, request)
    kernel = execs.start(live, ExecRequest(CONTEXT, stream_stdin=True))
    carry, _going_on = carry_of(execs, live)
    carry.stop("required", live, live.spec)
    assert ((kernel.id,), (run.id,)) == (carry.report.contexts, carry.report.processes)
    carry.release()
    carry.put_into(fork)
    carry.close()

    pairs = carry.execs[0]
    assert {run.id, kernel.id} == {*pairs}
    was, now = run.view(), execs.find(fork.sandbox_id, pairs[run.id]).view()
    same = [
        "argv",
        "cwd",
        "user",
        "timeout_s",
        "stream_stdin",
        "max_output_bytes",
        "kept_bytes",
        "state",
    ]
    assert [getattr(was, name) for name in same] == [getattr(now, name) for name in same]
    assert 600 == now.timeout_s
    assert (12_345, fork.sandbox_id) == (now.max_output_bytes, now.sandbox_id)
    assert was.created_at <= now.created_at
    copied = execs.find(fork.sandbox_id, pairs[kernel.id])
    assert len(frames.request("copied")) == copied.view().stdin_bytes
    assert (0, 0) == (now.stdin_bytes, kernel.view().stdin_bytes)

    again, _ = carry_of(execs, live)
    again.remember(fork)
    assert [pairs] == again.execs, "what had ended is in no fork"
    assert ((kernel.id,), (run.id,)) == (again.report.contexts, again.report.processes)


def test_a_fork_that_gets_files_only_says_why_and_has_no_execs(
    manager: SessionManager, execs: Execs, templates: list[Template]
) -> None:
    live = new(manager)
    execs.start(live, CAT)
    carry, _going_on = carry_of(execs, live)
    carry.stop("auto", live, live.spec)
    carry.leave_out("the kernel refused")
    report = carry.report
    assert ("the kernel refused", False, ()) == (
        report.reason,
        report.has_processes,
        report.processes,
    )
    assert [{}] == carry.execs
    carry.close()


def test_none_of_several_copies_runs_where_one_fails(
    manager: SessionManager, execs: Execs, templates: list[Template]
) -> None:
    live, fork = new(manager), new(manager)
    for _ in range(2):
        execs.start(live, CAT)
    carry, _going_on = carry_of(execs, live)
    carry.stop("auto", live, live.spec)
    templates[1].fails = True
    with pytest.raises(Unsupported):
        carry.put_into(fork)
    assert [["close copy"], []] == [each.done for each in templates]
    assert 1 == execs.count(fork.sandbox_id), "the one that never began is not remembered"
    carry.close()
    assert [["close copy", "close"], ["close"]] == [each.done for each in templates]


@pytest.mark.parametrize("processes", ["auto", "required", "none"])
@pytest.mark.parametrize("why", ["busy", "hold", "template", "spec"])
def test_what_cannot_go_along_is_let_go(
    manager: SessionManager,
    execs: Execs,
    templates: list[Template],
    monkeypatch: pytest.MonkeyPatch,
    processes: str,
    why: str,
) -> None:
    live = new(manager)
    execs.start(live, CAT)
    execs.start(live, CAT)
    carry, going_on = carry_of(execs, live, "ctx-1" if "busy" == why else "")

    def refuse(*_args: object) -> Any:
        if "template" != why or templates:
            raise Unsupported("it holds a lock")
        templates.append(Template())
        return templates[0]

    name = {"hold": "hold", "template": "template", "spec": "check_copy"}.get(why)
    if name:
        monkeypatch.setattr(WholeSandbox, name, refuse)
    if "required" == processes:
        with pytest.raises(Unsupported, match=r"runs a cell|holds a lock"):
            carry.stop(processes, live, live.spec)
    else:
        carry.stop(processes, live, live.spec)
        assert bool(carry.report.reason) == ("auto" == processes)
    assert not carry.report.has_processes
    assert not carry.is_whole
    held = {"hold": 2, "template": 1}.get(why, 0) if "none" != processes else 0
    assert [["close"]] * held == [each.done for each in templates]
    assert ["on"] * ("none" != processes) == going_on


def test_another_error_is_no_reason_to_copy_files_only(
    manager: SessionManager,
    execs: Execs,
    templates: list[Template],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = new(manager)
    execs.start(live, CAT)
    carry, going_on = carry_of(execs, live)

    def fail(*_args: object) -> None:
        raise IoError("x")

    monkeypatch.setattr(WholeSandbox, "hold", fail)
    with pytest.raises(IoError):
        carry.stop("auto", live, live.spec)
    assert [["close"]] == [each.done for each in templates]
    assert ["on"] == going_on


def test_one_whose_end_a_client_waits_for_is_not_evicted(
    manager: SessionManager, execs: Execs, templates: list[Template]
) -> None:
    live = new(manager)
    run = execs.start(live, CAT)
    going_on: list[str] = []
    carry = EvictedExecs(execs, live.sandbox_id, "", lambda: going_on.append("on"))
    run.waiters = 1
    with pytest.raises(LifecycleError, match="waits for the end"):
        carry.stop("required", live, live.spec)
    assert ([], ["on"]) == (templates, going_on)
    run.waiters = 0
    carry.stop("required", live, live.spec)
    assert 1 == len(templates)
    carry.close()


def test_an_evicted_exec_goes_on_with_its_id_and_its_offsets(
    manager: SessionManager,
    execs: Execs,
    templates: list[Template],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = new(manager)
    run = execs.start(live, ExecRequest(("cat",), stream_stdin=True, timeout_s=600.0))
    run.append(memoryview(b"one\n"))
    until(lambda: 4 == run.view().stdout_bytes)
    carry = EvictedExecs(execs, live.sandbox_id, "", lambda: None)
    carry.stop("required", live, live.spec)
    begun, awaited, wait = run.begun, list[Any](), evicted._await_output

    def noted(each: Any) -> None:
        awaited.append(each)
        wait(each)

    monkeypatch.setattr(evicted, "_await_output", noted)
    (form,) = carry.forms()
    carry.close()
    assert [begun] == awaited, "what came before the save is in the spool"
    form["saved_at"] = form["view"]["created_at"] + 200.0
    assert (0, run.id, 4, 4) == (
        form["number"],
        form["view"]["id"],
        form["view"]["stdout_bytes"],
        form["view"]["stdin_bytes"],
    )

    settled: list[str] = []
    monkeypatch.setattr(
        "ringfence.sessions.eviction.settle", lambda *_args: settled.append("settled")
    )
    with closing(Execs(manager)) as elsewhere:  # a server that knows of none
        there = new(manager)
        lost = {**form["view"], "id": f"{run.id[:-4]}0000"}
        original = WholeSandbox.rejoin

        def rejoin(self: WholeSandbox, number: int, request: ExecRequest) -> Any:
            assert pytest.approx(400.0) == request.timeout_s
            if number:
                raise IoError("it does not go on")
            return original(self, number, request)

        monkeypatch.setattr(WholeSandbox, "rejoin", rejoin)
        forms = [{**form, "number": 1, "view": lost}, form]
        come_back(manager, elsewhere, there, {"execs": forms})
        assert ["settled"] == settled
        again = elsewhere.find(there.sandbox_id, run.id)
        assert 8 == again.give(4, memoryview(b"two\n"))
        until(lambda: 8 == again.view().stdout_bytes)
        assert (b"two\n", 4) == again.spool.tracks[0].ends(100)
        again.end_input()
        again.done.result(PATIENCE_S)
        gone = elsewhere.find(there.sandbox_id, lost["id"]).view()
        assert ExecState.LOST == gone.state
        assert gone.problem is not None
        assert "does not go on" in gone.problem.message
    run.kill()
    run.done.result(PATIENCE_S)


def test_output_on_its_way_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    begun: Any = SimpleNamespace(stdout=None, stderr=reading)
    evicted._await_output(begun)
    os.write(writing, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(evicted, "_DRAINED_S", 0.02)
        with pytest.raises(IoError, match="not taken in time"):
            evicted._await_output(begun)
    os.read(reading, 1)
    evicted._await_output(begun)
    for fd in (reading, writing):
        os.close(fd)
    evicted._await_output(begun)
    evicted._await_output(None)
