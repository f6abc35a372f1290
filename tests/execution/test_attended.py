"""One execution from its acquire to its result, against stand-ins for the manager and the command."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfence.errors import LifecycleError, ResourceExhausted
from ringfence.execution.running import METADATA, Running, _command
from ringfence.model.execs.exec import KILLED_BY_CALLER, ExecResult
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import ExecutionRequest, ExecutionResult, ExecutionStatus

pytestmark = pytest.mark.anyone


class Service:
    """What an execution needs of its service and the manager behind it.

    Args:
        session: Of the lease that is acquired; None: there is no room.
    """

    def __init__(self, session: Any = None, *, run: Any = None, is_full: bool = False) -> None:
        self.manager = self
        self.clock = self
        self.index = self
        self.execs = self
        self.did: list[Any] = []
        self._session, self._run, self._is_full = session, run, is_full

    def wall(self) -> float:
        return 9.0

    def acquire(self, spec: Any, options: Any, *, client_id: str, most: int | None) -> Any:
        self.did.append(("acquire", client_id, most, options.preferred_backend, options.metadata))
        if self._session is None:
            raise ResourceExhausted("no room")
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.did.append("release")

    id, sandbox = "sess-1", SimpleNamespace()

    @property
    def session(self) -> Any:
        return self._session

    def find(self, any_id: str) -> str:
        return f"live {any_id}"

    def save(self, result: ExecutionResult) -> None:
        self.did.append(("save", result.backend, result.sandbox_id, result.status))
        if self._is_full:
            raise ResourceExhausted("the disk is full")

    def start(self, live: str, _request: Any, *, is_forked: bool) -> Any:
        self.did.append(("start", live, is_forked))
        return self._run

    def note(self, running: Running) -> None:
        self.did.append(("note", running.result.status, running.result.exec_id))

    def release(self, sandbox_id: str) -> None:
        self.did.append(("release", sandbox_id))

    def ended(self, running: Running) -> None:
        self.did.append(("ended", running.result.status))


def running_of(service: Service, *, most: int | None = None, **fields: Any) -> Running:
    result = ExecutionResult("x", ExecutionStatus.PENDING, command="true", **fields)
    return Running(cast(Any, service), "ann", result, most)


def request_of(tier: str = "light") -> ExecutionRequest:
    return ExecutionRequest(
        "true", id="x", tier=tier, timeout_secs=3.0, memory_mb=64, cpus=1.0, work_dir="/tmp"
    )


def run_of(*, exit_code: int | None = 0, killed_by: str | None = None, is_over: bool = True) -> Any:
    done: Future[None] = Future()
    if is_over:
        done.set_result(None)
    killed: list[int] = []

    def kill() -> None:
        killed.append(1)
        if not done.done():
            done.set_result(None)

    signal = 9 if exit_code is None else None
    ended = ExecResult(b"out", b"err", exit_code=exit_code, signal=signal, killed_by=killed_by)
    return SimpleNamespace(
        id="exec-1", sandbox_id="sbx-1", done=done, kill=kill, killed=killed, running=not is_over,
        result=lambda: ended, view=lambda: SimpleNamespace(created_at=4.0),
    )  # fmt: skip


SESSION = SimpleNamespace(backend="one", sandbox_id="sbx-1")
CONFIG = ExecutionConfig(work_dir="/tmp", strong_runtime={"backend": "gvisor"})


@pytest.mark.parametrize(("tier", "preferred"), [("light", ""), ("strong", "gvisor")])
def test_it_is_its_clients_within_the_bound_on_the_backend_of_its_tier(
    tier: str, preferred: str
) -> None:
    service = Service()
    running = running_of(service, most=4)
    running.run(request_of(tier), CONFIG)
    asked = ("acquire", "ann", 4, preferred, {METADATA: "x"})
    assert [asked, ("ended", ExecutionStatus.FAILED)] == service.did
    result = running.future.result(0)
    assert result.error is not None
    assert ("resource_exhausted", 9.0) == (result.error["code"], result.ended_at)


def test_where_it_runs_is_kept_before_it_runs_and_its_sandbox_is_given_back() -> None:
    run = run_of()
    service = Service(SESSION, run=run)
    running = running_of(service)
    service.sandbox = SimpleNamespace(
        stats=lambda: SimpleNamespace(degraded=("cpus",), forks_refused=0)
    )
    running.run(request_of(), CONFIG)
    assert [
        ("save", "one", "sbx-1", ExecutionStatus.PENDING),
        ("start", "live sess-1", False),
        ("note", ExecutionStatus.RUNNING, "exec-1"),
        "release",
        ("ended", ExecutionStatus.COMPLETED),
    ] == service.did[1:]
    result = running.future.result(0)
    assert (("cpus",), b"out", b"err", 9.0) == (
        tuple(result.degraded),
        result.stdout,
        result.stderr,
        result.started_at,
    )
    assert running._sandbox is None


def test_what_cannot_be_kept_does_not_begin() -> None:
    service = Service(SESSION, is_full=True)
    running = running_of(service)
    running.run(request_of(), CONFIG)
    assert ["release", ("ended", ExecutionStatus.FAILED)] == service.did[2:]


@pytest.mark.parametrize(
    ("exit_code", "killed_by", "refused", "code"),
    [
        (3, None, 2, "resource_limit_exceeded"),
        (3, None, 0, None),
        (0, None, 2, None),
        (None, KILLED_BY_CALLER, 2, "execution_killed"),
        (None, "cpu", 2, "resource_limit_exceeded"),
    ],
)
def test_only_a_failure_without_another_reason_is_the_limit_on_processes(
    exit_code: int | None, killed_by: str | None, refused: int, code: str | None
) -> None:
    running = running_of(Service())
    running._sandbox = cast(
        Any,
        SimpleNamespace(stats=lambda: SimpleNamespace(degraded=(), forks_refused=refused)),
    )
    error = running._attend(run_of(exit_code=exit_code, killed_by=killed_by))["error"]
    assert code == (error and error["code"])
    assert killed_by != "cpu" or error["field"] != "max_processes"
    if exit_code and refused:
        assert "max_processes" == error["field"]


def test_a_sandbox_that_is_gone_already_takes_no_result_along() -> None:
    def gone() -> Any:
        raise LifecycleError("it has ended")

    running = running_of(Service())
    running._sandbox = cast(Any, SimpleNamespace(stats=gone))
    fields = running._attend(run_of(exit_code=3))
    assert (ExecutionStatus.FAILED, 3, None) == (
        fields["status"],
        fields["exit_code"],
        fields["error"],
    )


def test_one_that_was_killed_before_its_command_was_there_ends_with_it() -> None:
    running, run = running_of(Service()), run_of(killed_by=KILLED_BY_CALLER, is_over=False)
    running.kill()
    assert ExecutionStatus.KILLED == running._attend(run)["status"]
    assert [1] == run.killed


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("status", [ExecutionStatus.RUNNING, ExecutionStatus.PENDING])
def test_one_that_an_earlier_service_began_ends_and_gives_its_sandbox_back(
    status: ExecutionStatus, is_over: bool
) -> None:
    """Also where that service was killed before it had written down that it runs."""
    service = Service()
    running = running_of(service)
    if status == ExecutionStatus.RUNNING:
        running.result = replace(running.result, status=status, started_at=2.0)
    asked: list[str] = []

    def sandbox(sandbox_id: str) -> Any:
        asked.append(sandbox_id)
        run.kill()
        return SimpleNamespace(stats=lambda: SimpleNamespace(degraded=(), forks_refused=0))

    vars(service)["sandbox"] = sandbox
    run = run_of(is_over=is_over)
    running.go_on(run)
    noted = [("note", ExecutionStatus.RUNNING, "exec-1")] * (status == ExecutionStatus.PENDING)
    ended = ("ended", ExecutionStatus.COMPLETED)
    assert [*noted, ("release", "sbx-1"), ended] == service.did
    assert ([] if is_over else ["sbx-1"]) == asked
    result = running.future.result(0)
    assert (2.0 if status == ExecutionStatus.RUNNING else 4.0, 9.0) == (
        result.started_at,
        result.ended_at,
    )
    assert not noted or ("sbx-1", "exec-1") == (result.sandbox_id, result.exec_id)


def test_a_command_has_all_that_its_request_says() -> None:
    request = ExecutionRequest(
        "make", ("a", "b"), env={"A": "1"}, stdin=b"in", timeout_secs=3.0, work_dir="/w"
    )
    made = _command(request)
    assert (("make", "a", "b"), "/w", {"A": "1"}, b"in", 3.0) == (
        made.argv,
        made.cwd,
        made.env,
        made.stdin,
        made.timeout_s,
    )
