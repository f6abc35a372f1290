"""Marks and forks that fail half-way: what was stopped goes on, and nothing that was made is left."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.host import owner
from ringfence.backends.optional import Continuable, Forkable
from ringfence.errors import ExecError, LifecycleError, ResourceExhausted, Unsupported
from ringfence.fork import branches as _branches  # noqa: F401  imported before a fork needs it
from ringfence.sandbox import live_fork, marks
from ringfence.sandbox.live_fork import LiveFork, _answering, _background, _Copy
from ringfence.sandbox.marks import MOST_MARKS, OWNER, Mark

pytestmark = pytest.mark.anyone
PLAIN: Any = SimpleNamespace()


class Home:
    """A backend that keeps snapshots, as far as a mark asks for it."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, str]] = {}
        self.made: list[Made] = []
        self.fails_at = 0

    def snapshot(self, metadata: dict[str, str]) -> Any:
        name = f"snap-{len(self.kept)}"
        self.kept[name] = metadata
        return SimpleNamespace(id=name)

    def snapshots(self) -> list[Any]:
        return [SimpleNamespace(id=name, metadata=data) for name, data in self.kept.items()]

    def delete_snapshot(self, name: str) -> None:
        del self.kept[name]

    def restore(self, name: str, _spec: Any) -> Any:
        assert name in self.kept
        if len(self.made) + 1 == self.fails_at:
            raise ResourceExhausted("no room")
        self.made.append(Made())
        return self.made[-1]


class Made:
    """A fork."""

    def __init__(self) -> None:
        self.is_ended = False
        self._fork_report: Any = None
        self.spec = PLAIN

    def terminate(self) -> None:
        self.is_ended = True


def sandbox_of(home: Home) -> Any:
    inner = SimpleNamespace(snapshot=home.snapshot)
    session = SimpleNamespace(backend="plain")
    return SimpleNamespace(id="sbx-1", _inner=inner, session=session)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(marks, "_kept", set())
    return Home()


def mark_of(home: Home, processes: str = "none") -> Mark:
    made: Any = home
    return Mark(sandbox_of(home), made, processes)


def test_a_mark_has_a_snapshot_until_it_is_closed_and_names_its_process(home: Home) -> None:
    with mark_of(home) as mark:
        assert {mark.id: {OWNER: owner.label()}} == home.kept
        assert {mark.id} == marks._kept
        mark.check()
    assert {} == home.kept
    assert set() == marks._kept
    mark.close()
    for use in (mark.check, lambda: mark.restore(PLAIN), lambda: mark.branch(lambda it: it, PLAIN)):
        with pytest.raises(LifecycleError, match="closed"):
            use()


def test_so_many_marks_are_kept_and_the_next_leaves_nothing(home: Home) -> None:
    kept = [mark_of(home) for _ in range(2)]
    marks._kept |= {f"other-{i}" for i in range(MOST_MARKS - 3)}
    kept.append(mark_of(home))
    assert MOST_MARKS == len(marks._kept)
    with pytest.raises(ResourceExhausted, match=f"{MOST_MARKS} marks"):
        mark_of(home)
    assert 3 == len(home.kept)
    kept.pop().close()
    mark_of(home).close()
    for each in kept:
        each.close()


def test_a_mark_whose_snapshot_fails_lets_all_go_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LiveFork, "close", lambda _self: closed.append("closed"))

    def snapshot(_metadata: Any) -> Any:
        raise ResourceExhausted("full")

    monkeypatch.setattr(home, "snapshot", snapshot)
    with pytest.raises(ResourceExhausted, match="full"):
        mark_of(home)
    assert ["closed"] == closed
    assert set() == marks._kept


def test_what_must_be_copied_and_cannot_is_refused_or_left_out(home: Home) -> None:
    with pytest.raises(Unsupported, match="copies files only"):
        mark_of(home, "required")
    assert {} == home.kept
    with mark_of(home, "auto") as mark:
        assert not mark.report.has_processes
        assert "copies files only" in mark.report.reason
    with mark_of(home) as mark:
        assert "" == mark.report.reason


def test_marks_of_processes_that_ended_are_swept_once(home: Home) -> None:
    ended = subprocess.Popen(["sleep", "600"])
    of_ended = owner.label(ended.pid)
    ended.kill()
    ended.wait()
    home.kept = {
        "ended": {OWNER: of_ended},
        "mine": {OWNER: owner.label()},
        "a client's": {},
        "odd": {OWNER: "x.y"},
        "elsewhere": {OWNER: of_ended.rpartition(".")[0] + ".1"},
    }
    made: Any = home
    marks._sweep(made)
    assert {"mine", "a client's", "odd", "elsewhere"} == {*home.kept}
    home.kept["later"] = {OWNER: of_ended}
    marks._sweep(made)
    assert "later" in home.kept, "this process has looked already"


class TestBranches:
    def make(self, inner: Any) -> Any:
        return inner

    @pytest.mark.parametrize("processes", ["auto", "required"])
    @pytest.mark.parametrize("error", [Unsupported("this copy"), OSError("another")])
    def test_a_copy_that_fails_leaves_no_fork_unless_its_files_will_do(
        self,
        home: Home,
        processes: str,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        mark = mark_of(home)
        mark._processes = processes

        def put_into(_self: Any, _fork: Any) -> None:
            raise error

        monkeypatch.setattr(LiveFork, "put_into", put_into)
        if processes == "auto" and isinstance(error, Unsupported):
            fork = mark.branch(self.make, PLAIN)
            assert [True, False] == [each.is_ended for each in home.made]
            assert fork is home.made[1]
            assert "this copy" == fork._fork_report.reason
        else:
            with pytest.raises(type(error)):
                mark.branch(self.make, PLAIN)
            assert [True] == [each.is_ended for each in home.made]
        mark.close()

    @pytest.mark.parametrize("n", [1, 3])
    def test_of_many_none_is_left_where_one_fails(self, home: Home, n: int) -> None:
        with mark_of(home) as mark:
            assert n == len(mark.branches(n, self.make, PLAIN))
            assert not any(each.is_ended for each in home.made)
            home.made.clear()
            home.fails_at = n
            with pytest.raises(ResourceExhausted):
                mark.branches(n, self.make, PLAIN)
            assert all(each.is_ended for each in home.made)


class Template:
    """A process that stands still."""

    ids = (1,)
    processes = ()

    def __init__(self) -> None:
        self.done: list[str] = []

    def release(self) -> None:
        self.done.append("release")

    def load(self) -> None:
        self.done.append("load")

    def close(self) -> None:
        self.done.append("close")

    def copy(self, _inner: Any, _request: Any, taken: list[int]) -> Any:
        assert [1, 1] == taken
        return Copied(self)


class Copied:
    def __init__(self, template: Template) -> None:
        self.template = template
        self.run = SimpleNamespace(close=lambda: template.done.append("run closed"))

    def go_on(self) -> None:
        raise ExecError("it did not")

    def close(self) -> None:
        self.template.done.append("copy closed")


class Copying(Forkable):
    """A sandbox whose execs can be copied, but for one."""

    def __init__(self, commands: dict[str, str]) -> None:
        self.commands, self.refuses = commands, ""
        self.made: list[Template] = []

    def running(self) -> dict[str, str]:
        return self.commands

    def template(self, run: Any) -> Any:
        if run == self.refuses:
            raise Unsupported("it has something that no copy can have")
        self.made.append(Template())
        return self.made[-1]

    def left_behind(self) -> list[str]:
        return []


class Whole(Continuable):
    """A sandbox that is saved as a whole."""

    def __init__(self, commands: dict[str, str]) -> None:
        self.commands = commands
        self.held: list[Any] | None = None

    def running(self) -> dict[str, str]:
        return self.commands

    def template(self, run: Any) -> Any:
        assert run in self.commands
        return Template()

    def check_copy(self, spec: Any) -> None:
        raise Unsupported(f"another limit than {spec}")

    def hold(self, templates: Any) -> None:
        self.held = list(templates)


class TestLiveForks:
    def held(self) -> tuple[LiveFork, list[Template], list[str]]:
        live = LiveFork(SimpleNamespace(id="sbx-1"))
        templates = [Template(), Template()]
        for i, template in enumerate(templates):
            standing: Any = template
            live._held.append(live_fork._Held(f"e{i}", "x", standing, False))
        goes: list[str] = []
        live._waiting = [SimpleNamespace(let_go=lambda: goes.append("on"))]  # type: ignore[list-item]
        return live, templates, goes

    def test_closing_lets_all_go_on_once(self) -> None:
        live, templates, goes = self.held()
        live.close()
        live.close()
        assert [["release", "close"]] * 2 == [each.done for each in templates]
        assert ["on"] == goes

    def test_a_context_whose_process_cannot_be_copied_goes_on(self) -> None:
        live, _, goes = self.held()
        live._held, live._waiting = [], []
        process = SimpleNamespace(_pump=SimpleNamespace(run=PLAIN))
        context: Any = SimpleNamespace(
            id="ctx-1", hold=lambda: True, let_go=lambda: goes.append("on"), _process=process
        )

        def template(_run: Any) -> Any:
            raise Unsupported("it cannot be copied")

        inner: Any = SimpleNamespace(template=template)
        with pytest.raises(Unsupported, match="cannot be copied"):
            live._hold_context(inner, "x", context, is_default=False)
        live.close()
        assert ["on"] == goes

    def test_contexts_go_on_where_a_release_fails(self) -> None:
        live, templates, goes = self.held()

        def release() -> None:
            raise OSError("gone")

        templates[0].release = release  # type: ignore[method-assign]
        with pytest.raises(OSError, match="gone"):
            live.close()
        assert ["on"] == goes
        assert ["close"] == [word for word in templates[1].done if word == "close"]

    def test_copies_that_were_not_started_end(self) -> None:
        live, templates, _goes = self.held()
        fork = SimpleNamespace(_inner=None, spec=SimpleNamespace(limits=None), _began=None)
        with pytest.raises(ExecError):
            live.put_into(fork)
        assert [["copy closed", "run closed"]] * 2 == [each.done for each in templates]

    def test_one_that_was_started_is_not_ended(self) -> None:
        template = Template()
        copied: Any = Copied(template)
        copy = _Copy(copied, PLAIN)
        copy._is_started = True
        copy.close()
        assert [] == template.done

    def sandbox(self, inner: Any, **changes: Any) -> Any:
        facts: dict[str, Any] = {"id": "sbx-1", "_inner": inner, "_can_move": True, "_started": {}}
        facts["session"] = SimpleNamespace(backend="plain")
        facts["stats"] = lambda: SimpleNamespace(pids=1)
        facts["_its_contexts"] = SimpleNamespace(running=list)
        return SimpleNamespace(**{**facts, **changes})

    def started(self, run: object) -> Any:
        return SimpleNamespace(_pump=SimpleNamespace(run=run, timeout_s=None), stdin=None)

    @pytest.mark.parametrize("processes", ["required", "auto"])
    def test_what_was_stopped_goes_on_where_another_cannot_be_copied(self, processes: str) -> None:
        inner = Copying({"one": "sleep", "two": "odd"})
        sandbox = self.sandbox(
            inner, _started={"one": self.started("one"), "two": self.started("two")}
        )
        live = LiveFork(sandbox)
        inner.refuses = "two"
        if processes == "required":
            with pytest.raises(Unsupported, match="odd"):
                live.stop(processes)
            assert ["release", "close"] == inner.made[0].done
        else:
            report = live.stop(processes)
            assert (("one",), ("two (odd)",)) == (report.processes, report.left_out)
            assert [] == inner.made[0].done
            live.close()

    def test_what_this_process_did_not_start_is_left_out_or_refused(self) -> None:
        sandbox = self.sandbox(Copying({"one": "sleep"}))
        report = LiveFork(sandbox).stop("auto")
        assert "nobody would read its output" in report.reason
        assert not report.has_processes
        with pytest.raises(Unsupported, match="nobody would read"):
            LiveFork(sandbox).stop("required")

    @pytest.mark.parametrize(
        ("can_move", "running", "pids", "spec", "outcome"),
        [
            (False, True, 1, None, "a manager's session"),
            (True, False, 0, None, "nothing runs"),
            (True, False, 1, None, "whole"),
            (True, True, 1, None, "whole"),
            (True, True, 1, PLAIN, "another limit"),
        ],
    )
    def test_a_sandbox_that_is_saved_as_a_whole(
        self, can_move: bool, running: bool, pids: int, spec: Any, outcome: str
    ) -> None:
        inner = Whole({"one": "sleep"} if running else {})
        sandbox = self.sandbox(inner, _can_move=can_move, _started={"one": self.started("one")})
        sandbox.stats = lambda: SimpleNamespace(pids=pids)
        live = LiveFork(sandbox)
        if outcome in ("whole", "nothing runs"):
            report = live.stop("required", spec)
            is_whole = outcome == "whole"
            assert (is_whole, is_whole) == (live.is_whole, report.has_processes)
            assert is_whole == (inner.held is not None)
        else:
            with pytest.raises(Unsupported, match=outcome):
                live.stop("required", spec)
            assert inner.held is None

    def test_one_that_is_saved_as_a_whole_goes_on_in_its_own_place(self, home: Home) -> None:
        """Its snapshot ends it: what was restored is what its object has, and the old one is told."""
        inner, moved = Whole({"one": "sleep"}), list[tuple[list[Any], Any]]()
        sandbox = self.sandbox(inner, _started={"one": self.started("one")})
        noting: Any = inner
        noting.snapshot = home.snapshot
        noting.move = lambda templates, there: moved.append((templates, there))
        sandbox._as_it_is = lambda: PLAIN
        sandbox._take_place = lambda there: vars(sandbox).update(_inner=there)
        given: Any = home
        mark = Mark(sandbox, given, "required")
        [restored] = home.made
        assert restored is sandbox._inner
        assert [(inner.held, restored)] == moved
        mark._live._held.clear()
        mark.close()
        assert {} == home.kept

    @pytest.mark.parametrize("is_required", [True, False])
    def test_background_processes_stay_behind_or_are_refused(self, is_required: bool) -> None:
        inner: Any = SimpleNamespace(left_behind=lambda: ["sleep"])
        if is_required:
            with pytest.raises(Unsupported, match="belongs to no exec"):
                _background(inner, is_required=True)
        else:
            assert ["sleep"] == list(_background(inner, is_required=False))
        none: Any = SimpleNamespace(left_behind=list)
        assert {} == _background(none, is_required=is_required)

    def test_a_copy_that_does_not_answer_is_refused(self) -> None:
        def begin() -> None:
            raise ExecError("silent")

        with pytest.raises(Unsupported, match="silent"):
            _answering(begin)
        assert 5 == _answering(lambda: 5)

    def test_a_context_that_runs_a_cell_is_refused(self) -> None:
        live, _templates, _goes = self.held()
        context: Any = SimpleNamespace(id="ctx-1", hold=lambda: False)
        with pytest.raises(Unsupported, match="runs a cell"):
            live._hold_context(PLAIN, "python", context, False)
        assert 2 == len(live._held)
