"""Forks of a sandbox, and a race between them."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

from ..errors import InvalidRequest, Unsupported
from ..model.base import checks
from ..model.base.helpful import helpful, knows_keywords
from ..model.calls import parse_network
from ..model.fork import MOST_ANCESTORS, MOST_FORKS, PROCESSES, CopiedProcess, ForkReport
from ..model.spec import LINEAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ..model.limits import Limits
    from ..model.spec import SandboxSpec

    Attempt = str | Sequence[str] | Callable[[Any], Any]
    Judge = Callable[[Any, Any], float]

_PICKS = ("first", "best")
_TOLD = (
    "python",
    "bash",
    "r",
)  # languages whose interpreter draws others by `_reseed` of its kernel
_INTERPRETERS = {"bash": "bash", "r": "R", "java": "java"}  # children of a kernel in Python
_NOT_TOLD = "only interpreters of contexts are told to seed their random numbers anew"


def check_arguments(n: object, processes: object) -> None:
    """Check what a fork is to be.

    Raises:
        InvalidRequest: `n` or `processes` is malformed.
    """
    checks.integer(n, "n", 1, MOST_FORKS)
    checks.choice(processes, "processes", PROCESSES, "auto, none or required")


def check(n: object, processes: object, parent: str) -> ForkReport:
    """Check what a fork on a server is to be, and return what it will take along.

    Raises:
        InvalidRequest: `n` or `processes` is malformed.
        Unsupported: Processes are required: a server copies files only.
    """
    check_arguments(n, processes)
    reason = "a server copies files only, and no running processes"
    if processes == "required":
        raise Unsupported(
            reason, operation="fork", hint='processes="auto" or "none" copies the files'
        )
    return ForkReport(parent, reason=reason if processes == "auto" else "")


def copied_processes(
    exec_id: str, command: str, language: str, processes: Sequence[tuple[int, str]]
) -> list[CopiedProcess]:
    """Say of each process of an exec that is copied whether it seeds its random numbers anew.

    Args:
        language: Of the context that it is; empty: it is none.
        processes: Pid inside and name, parents before their children; empty: not known.
    """
    if not processes:
        reason = _reason(language) if language else _NOT_TOLD
        return [CopiedProcess(exec_id, command, None, not reason, reason)]
    inner = _INTERPRETERS.get(language, "")
    found = []
    for number, (pid, name) in enumerate(processes):
        reason = _NOT_TOLD
        if number == 0 and language:
            reason = "" if inner else _reason(language)
        elif number == 1 and inner and name == inner:
            reason = _reason(language)
        found.append(CopiedProcess(exec_id, name, pid, not reason, reason))
    return found


def _reason(language: str) -> str:
    return "" if language in _TOLD else f"{language} cannot be told to seed its random numbers anew"


def lineage_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the sandboxes that one with these labels descends from, the first one first."""
    return tuple(labels.get(LINEAGE, "").split())


def spec_of(
    spec: SandboxSpec,
    parent: str,
    *,
    network: Any = None,
    limits: Limits | Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> SandboxSpec:
    """Return the spec of a fork: the parent's, but for what is given, its id and its lineage."""
    ancestors = [*lineage_of(spec.labels), parent][-MOST_ANCESTORS:]
    own = spec.labels if labels is None else checks.labels(labels, "labels")
    changes: dict[str, Any] = {"id": None, "labels": {**own, LINEAGE: " ".join(ancestors)}}
    if network is not None:
        changes["network"] = parse_network(network)
    if limits is not None:
        changes["limits"] = type(spec.limits).taken(limits, "limits")
    if secrets is not None:
        changes["secrets"] = secrets
    return replace(spec, **changes)


@helpful
class Outcome:
    """Result of one attempt in a race.

    Attributes:
        index: Position in the list of attempts.
        value: `ExecResult` of a command, or what a callable returned; None where it failed or was cut off.
        score: What the judge said; None where it was not asked.
        error: Exception of the attempt or of its judge; None: there was none.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: Any = None
        self.score: float | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Outcome {self.index} score={self.score} error={self.error!r}>"


@helpful
class Race:
    """Outcome of a race. As a context manager: leaving it terminates the winners.

    Attributes:
        winners: Branches that live on, the best one first; the caller's to terminate.
        outcomes: One per attempt, in their order.
    """

    def __init__(self, winners: list[Any], outcomes: list[Outcome]) -> None:
        self.winners, self.outcomes = winners, outcomes

    def __repr__(self) -> str:
        return f"<Race winners={self.winners} outcomes={self.outcomes}>"

    @property
    def winner(self) -> Any:
        """Return the best branch; None where no attempt was accepted."""
        return self.winners[0] if self.winners else None

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_exc: object) -> None:
        for branch in self.winners:
            branch.terminate()


@knows_keywords
def race(
    sandbox: Any,
    attempts: Sequence[Attempt],
    *,
    judge: Judge | None = None,
    keep: int = 1,
    pick: str = "first",
    timeout_s: float | None = None,
) -> Race:
    """Fork a sandbox once for each attempt, run all of them at once, and keep the winners.

    Args:
        sandbox: A `Sandbox` or a `RemoteSandbox`. It goes on unchanged.
        attempts: Each a shell script, an argument vector, or a callable that gets its branch; 1,000 at most.
        judge: Called with the branch and the result of its attempt; a score above 0, or True, accepts it.
            None: a command is accepted if it exits with 0, a callable if it raises nothing.
        keep: Number of winners at most.
        pick: `first` keeps the first ones accepted, and ends the others at once; `best` waits for all,
            and keeps those with the highest scores.
        timeout_s: Seconds, > 0, for each command.

    Raises:
        InvalidRequest: An argument is malformed; nothing was started.
    """
    if not isinstance(attempts, list | tuple) or not 0 < len(attempts) <= MOST_FORKS:
        what = f"must be a list of 1 to {MOST_FORKS} attempts"
        hint = 'as ["make test", ["pytest", "-x"], function]'
        raise InvalidRequest(what, field="attempts", hint=hint)
    for i, each in enumerate(attempts):
        if not (callable(each) or isinstance(each, str | list | tuple)):
            what = f"must be a script, a list of arguments or a function, not {each!r}"
            raise InvalidRequest(what, field=f"attempts[{i}]", hint='as "make test"')
    if judge is not None and not callable(judge):
        what = f"must be a function of a branch and a result, not {type(judge).__name__}"
        raise InvalidRequest(what, field="judge", hint="as lambda branch, result: result.ok")
    checks.integer(keep, "keep", 1, len(attempts))
    checks.choice(pick, "pick", _PICKS, " or ".join(_PICKS))
    branches = sandbox.fork(len(attempts))
    outcomes = [Outcome(i) for i in range(len(attempts))]
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def run(outcome: Outcome) -> None:
        branch, attempt = branches[outcome.index], attempts[outcome.index]
        try:
            outcome.value = _run(branch, attempt, timeout_s)
            outcome.score = _score(branch, outcome.value, judge)
        except BaseException as exc:  # noqa: BLE001  told in the outcome
            outcome.error = exc
        ended.put(outcome)

    threads = [
        threading.Thread(target=run, args=[each], name="ringfence-race") for each in outcomes
    ]
    kept: list[int] = []
    try:
        for thread in threads:
            thread.start()
        kept = _accepted(ended, len(threads), keep, pick)
    finally:
        for index, branch in enumerate(branches):
            if index not in kept:
                branch.terminate()  # ends the attempt that its thread waits for
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return Race([branches[index] for index in kept], outcomes)


def _accepted(ended: queue.SimpleQueue[Outcome], count: int, keep: int, pick: str) -> list[int]:
    """Wait for as many attempts as it takes; returns the numbers of the winners."""
    accepted: list[Outcome] = []
    for _ in range(count):
        outcome = ended.get()
        if outcome.score is not None and outcome.score > 0:
            accepted.append(outcome)
        if pick == "first" and len(accepted) == keep:
            break
    if pick == "best":
        accepted.sort(key=lambda each: -(each.score or 0.0))
    return [each.index for each in accepted[:keep]]


def _run(branch: Any, attempt: Attempt, timeout_s: float | None) -> Any:
    if isinstance(attempt, str):
        return branch.shell(attempt, timeout_s=timeout_s)
    if callable(attempt):
        return attempt(branch)
    return branch.exec(attempt, timeout_s=timeout_s)


def _score(branch: Any, value: Any, judge: Judge | None) -> float:
    if judge is not None:
        return float(judge(branch, value))
    return 1.0 if getattr(value, "exit_code", 0) == 0 else 0.0
