"""Races between branches that are stand-ins: who wins, who ends when, and what is refused before a fork.

Also the spec and the report of a fork, which are plain values.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfence import Limits, SandboxSpec, race
from ringfence.errors import InvalidRequest, ResourceExhausted, Unsupported
from ringfence.fork import branches
from ringfence.model.fork import MOST_ANCESTORS, MOST_FORKS
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import LINEAGE

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0


class Branch:
    """A branch whose commands end with the exit code that they name; `wait` ends with the branch."""

    def __init__(self, index: int) -> None:
        self.index, self.asked = index, list[tuple[Any, float | None]]()
        self.ended, self.ends = threading.Event(), 0

    def exec(self, argv: Any, *, timeout_s: float | None) -> Any:
        self.asked.append((argv, timeout_s))
        if argv[0] == "wait":
            assert self.ended.wait(PATIENCE_S)
            raise ResourceExhausted("it has ended")
        return SimpleNamespace(exit_code=int(argv[0]))

    def shell(self, script: str, *, timeout_s: float | None) -> Any:
        return self.exec([script], timeout_s=timeout_s)

    def terminate(self) -> None:
        self.ends += 1
        self.ended.set()


class Forked:
    """A sandbox that is forked once."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []

    def fork(self, n: int) -> list[Branch]:
        assert not self.branches
        self.branches = [Branch(index) for index in range(n)]
        return self.branches

    @property
    def ends(self) -> list[int]:
        return [each.ends for each in self.branches]


def threads_of_races() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "ringfence-race"]


def test_each_attempt_has_its_branch_and_the_timeout() -> None:
    sandbox, got = Forked(), list[Branch]()
    found = race(sandbox, ["0", ["0", "x"], got.append], keep=3, pick="best", timeout_s=7.0)
    one, two, three = sandbox.branches
    assert ([(["0"], 7.0)], [(["0", "x"], 7.0)]) == (one.asked, two.asked)
    assert ([three], [], [0, 0, 0]) == (got, three.asked, sandbox.ends)
    assert [0, 1, 2] == sorted(each.index for each in found.winners)
    assert [1.0, 1.0, 1.0] == [each.score for each in found.outcomes]
    assert [0, 1, 2] == [each.index for each in found.outcomes]
    with found as same:
        assert found is same
    assert [1, 1, 1] == sandbox.ends
    assert [] == threads_of_races()


def test_the_first_wins_and_what_still_runs_is_ended_and_waited_for() -> None:
    sandbox = Forked()
    found = race(sandbox, ["wait", "0", "wait"])
    assert [1, 0, 1] == sandbox.ends
    assert [] == threads_of_races()
    assert found.winner is sandbox.branches[1]
    assert ([1], 1) == ([each.index for each in found.winners], found.winner.index)
    errors = [type(each.error) for each in found.outcomes]
    assert [ResourceExhausted, type(None), ResourceExhausted] == errors
    assert [None, 1.0, None] == [each.score for each in found.outcomes]


def test_so_many_of_the_first_are_kept() -> None:
    sandbox = Forked()
    found = race(sandbox, ["3", "0", "wait", "0"], keep=2)
    assert [1, 3] == sorted(each.index for each in found.winners)
    assert [1, 0, 1, 0] == sandbox.ends
    assert 0.0 == found.outcomes[0].score


@pytest.mark.parametrize(
    ("score", "is_accepted"), [(True, True), (0.5, True), (0, False), (False, False), (-1, False)]
)
def test_a_score_above_0_is_accepted(score: float, is_accepted: bool) -> None:
    sandbox, asked = Forked(), list[tuple[int, Any]]()

    def judge(branch: Branch, value: Any) -> float:
        asked.append((branch.index, value.exit_code))
        return score

    found = race(sandbox, ["3"], judge=judge)
    assert [(0, 3)] == asked
    assert is_accepted == (found.winner is not None)
    assert [not is_accepted] == sandbox.ends
    assert float(score) == found.outcomes[0].score


def test_without_a_judge_a_function_wins_unless_it_fails_or_returns_a_failed_command() -> None:
    def fail(_branch: Branch) -> None:
        raise ValueError("no")

    failed = SimpleNamespace(exit_code=3)
    sandbox = Forked()
    found = race(sandbox, [fail, lambda _: failed, lambda _: None], keep=3, pick="best")
    assert [2] == [each.index for each in found.winners]
    assert [1, 1, 0] == sandbox.ends
    assert [None, 0.0, 1.0] == [each.score for each in found.outcomes]
    assert [None, failed, None] == [each.value for each in found.outcomes]
    assert isinstance(found.outcomes[0].error, ValueError)


def test_the_best_are_in_the_order_of_their_scores() -> None:
    scores = [3.0, 0.0, 9.0, 5.0, -2.0]
    sandbox = Forked()
    found = race(
        sandbox, ["0"] * 5, judge=lambda branch, _: scores[branch.index], keep=2, pick="best"
    )
    assert [2, 3] == [each.index for each in found.winners]
    assert [1, 1, 0, 0, 1] == sandbox.ends
    sandbox = Forked()
    found = race(
        sandbox, ["0"] * 5, judge=lambda branch, _: scores[branch.index], keep=5, pick="best"
    )
    assert [2, 3, 0] == [each.index for each in found.winners], "none that was not accepted"


def test_a_judge_that_fails_is_told_and_its_attempt_loses() -> None:
    def judge(branch: Branch, _value: Any) -> float:
        if branch.index == 0:
            raise KeyError("x")
        return 1.0

    sandbox = Forked()
    found = race(sandbox, ["0", "0"], judge=judge, keep=2, pick="best")
    assert [1] == [each.index for each in found.winners]
    assert isinstance(found.outcomes[0].error, KeyError)
    assert 0 == found.outcomes[0].value.exit_code
    assert found.outcomes[0].score is None


def test_a_race_that_cannot_begin_leaves_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun = threading.Thread.start, list[str]()

    def short_of_threads(self: threading.Thread) -> None:
        begun.append(self.name)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        start(self)

    sandbox = Forked()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", short_of_threads)
        with pytest.raises(RuntimeError, match="thread"):
            race(sandbox, ["wait", "0", "0"])
    assert [1, 1, 1] == sandbox.ends
    assert [] == threads_of_races()


@pytest.mark.parametrize(
    ("attempts", "options", "field"),
    [
        ([], {}, "attempts"),
        ("true", {}, "attempts"),
        (["true"] * (MOST_FORKS + 1), {}, "attempts"),
        (["true", 3], {}, "attempts[1]"),
        (["true"], {"judge": 3}, "judge"),
        (["true"], {"keep": 0}, "keep"),
        (["true"], {"keep": 2}, "keep"),
        (["true"], {"pick": "last"}, "pick"),
    ],
)
def test_what_is_no_race_is_refused_before_anything_is_forked(
    attempts: Any, options: dict[str, Any], field: str
) -> None:
    sandbox = Forked()
    with pytest.raises(InvalidRequest) as refused:
        race(sandbox, attempts, **options)
    assert (field, []) == (refused.value.field, sandbox.branches)


# -- what a fork is --------------------------------------------------------------------------------


def test_a_fork_has_what_is_given_and_all_else_of_its_parent() -> None:
    parent = SandboxSpec(
        id="sbx-a", labels={"job": "1"}, limits=Limits(pids=50), secrets={}, ttl_s=9.0
    )
    plain = branches.spec_of(parent, "sbx-a")
    assert (None, {"job": "1", LINEAGE: "sbx-a"}) == (plain.id, plain.labels)
    assert (parent.limits, parent.network, 9.0) == (plain.limits, plain.network, plain.ttl_s)
    again = branches.spec_of(plain, "sbx-b", labels={"job": "2"}, network=["a.example"])
    assert {"job": "2", LINEAGE: "sbx-a sbx-b"} == again.labels
    assert NetworkPolicy.parse("a.example") == again.network
    assert 40 == branches.spec_of(parent, "sbx-a", limits={"pids": 40}).limits.pids
    written = branches.spec_of(again, "sbx-c", labels={})
    assert {LINEAGE: "sbx-a sbx-b sbx-c"} == written.labels
    with pytest.raises(InvalidRequest) as refused:
        branches.spec_of(parent, "sbx-a", limits={"pid": 1})
    assert refused.value.field.startswith("limits")


def test_so_many_ancestors_are_remembered_and_the_last_ones() -> None:
    spec = SandboxSpec()
    for number in range(MOST_ANCESTORS + 3):
        spec = branches.spec_of(spec, f"sbx-{number}")
    found = branches.lineage_of(spec.labels)
    assert tuple(f"sbx-{number}" for number in range(3, MOST_ANCESTORS + 3)) == found
    assert () == branches.lineage_of({})


def test_a_server_that_copies_files_only_says_so_where_it_is_asked_for_more() -> None:
    assert "files only" in branches.check(1, "auto", "sbx-a").reason
    assert ("", "sbx-a") == (
        branches.check(1, "none", "sbx-a").reason,
        branches.check(1, "none", "sbx-a").parent,
    )
    with pytest.raises(Unsupported):
        branches.check(1, "required", "sbx-a")
    for n, processes, field in (
        (0, "auto", "n"),
        (MOST_FORKS + 1, "auto", "n"),
        (1, "x", "processes"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            branches.check(n, processes, "sbx-a")
        assert field == refused.value.field


def kernel(inner: str) -> list[tuple[int, str]]:
    return [(2, "python3"), (3, inner), (4, inner)]


@pytest.mark.parametrize(
    ("language", "processes", "seeded"),
    [
        ("python", [], [True]),
        ("julia", [], [False]),
        ("", [], [False]),
        ("python", [(2, "python3"), (3, "python3")], [True, False]),
        ("", [(2, "python3")], [False]),
        ("bash", kernel("bash"), [True, True, False]),
        ("r", kernel("R"), [True, True, False]),
        ("java", kernel("java"), [True, False, False]),
        ("bash", kernel("sleep"), [True, False, False]),
    ],
)
def test_each_copy_says_whether_it_draws_other_random_numbers(
    language: str, processes: list[tuple[int, str]], seeded: list[bool]
) -> None:
    found = branches.copied_processes("exec-1", "command", language, processes)
    assert seeded == [not each.reason for each in found]
    assert seeded == [each.is_reseeded for each in found]
    assert {"exec-1"} == {each.exec_id for each in found}
    shown: list[tuple[int | None, str]] = [(each.pid, each.command) for each in found]
    assert ([*processes] or [(cast(Any, None), "command")]) == shown
