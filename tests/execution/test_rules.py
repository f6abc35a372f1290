"""The rules of the execution service: counts, bounds, owners and errors, over unconfined processes."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.optional import ProfileStore
from ringfence.errors import (
    BackendUnavailable,
    BadJson,
    ExecNotStarted,
    ExecutionNotFound,
    InvalidRequest,
    IoError,
    LifecycleError,
    ResourceExhausted,
    SandboxLost,
    StorageFull,
    Unsupported,
)
from ringfence.execution import endings, service, specs
from ringfence.execution.running import METADATA, Running
from ringfence.execution.service import ExecutionService
from ringfence.execution.settings import Settings
from ringfence.model.acquire import AcquireOptions
from ringfence.model.event import CONFIG
from ringfence.model.execs import exec as execs
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import (
    ExecutionRequest,
    ExecutionResult,
    ExecutionStatus,
)
from ringfence.model.net.network import NetworkPolicy
from ringfence.sessions.clock import Clock
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.store.executions import ExecutionRecord
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

SLEEP = ("sleep", ("1000",))
Make = Callable[..., ExecutionService]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(max_concurrent=1, ...)`: a service, closed when the test is over."""
    with ExitStack() as stack:

        def made(
            state_dir: str | None = None, clock: Clock | None = None, **config: Any
        ) -> ExecutionService:
            manager = SessionManager(
                ManagerConfig(pool=PoolConfig(enabled=False)),
                state_dir=state_dir,
                backends=(Unconfined(),),
                background=False,
                clock=clock,
            )
            stack.enter_context(manager)
            found = ExecutionService(manager, ExecutionConfig(work_dir="/tmp", **config))
            return stack.enter_context(closing(found))

        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def runs(service: ExecutionService, execution_id: str) -> None:
    until(lambda: "running" == service.status(execution_id).status)


def sleeping(service: ExecutionService, name: str, client: str = "a") -> Future[ExecutionResult]:
    return service.submit(ExecutionRequest(*SLEEP, id=name), client_id=client)


# -- how many --------------------------------------------------------------------------------------


def test_killing_one_that_waits_lets_no_other_begin(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MOST_THREADS", 2)
    one = make(max_concurrent=1)
    first = sleeping(one, "first")
    runs(one, "first")
    sleeping(one, "second")
    assert "killed" == one.kill("second").result(20).status
    one._threads.submit(int).result(20)  # the second thread is done with what it ran
    assert 1 == one._running
    third = sleeping(one, "third")

    assert "pending" == one.status("third").status
    assert not first.done()
    assert "killed" == one.kill("first").result(20).status
    runs(one, "third")
    assert not third.done()
    one.kill("third").result(20)
    one._threads.submit(int).result(20)
    assert 0 == one._running


def test_as_many_run_and_wait_as_may(make: Make) -> None:
    one = make(max_concurrent=2, max_pending=1)
    for name in ("one", "two", "three"):
        sleeping(one, name)
    runs(one, "one")
    runs(one, "two")
    assert "pending" == one.status("three").status
    with pytest.raises(ResourceExhausted, match="2 executions run and 1 wait"):
        sleeping(one, "four")
    with pytest.raises(ExecutionNotFound):
        one.status("four")
    one.change({"max_concurrent": 3})
    runs(one, "three")
    one.kill("one").result(20)
    assert "completed" == one.execute(ExecutionRequest("true"), client_id="a").status


def test_those_that_run_and_wait_are_counted_for_their_client(make: Make) -> None:
    one = make(max_concurrent=1)
    for name, client in (("1", "her"), ("2", "her"), ("3", "him")):
        sleeping(one, name, client)
    runs(one, "1")

    def counts(client: str | None) -> tuple[int, int]:
        return (info := one.info(client)).running, info.pending

    assert [(1, 1), (0, 1), (1, 2), (0, 0)] == [counts(c) for c in ("her", "him", None, "it")]


def test_a_clients_bound_on_sandboxes_holds_for_executions(make: Make) -> None:
    one = make()
    sleeping(one, "one")
    runs(one, "one")
    request = ExecutionRequest("true")
    refused = one.submit(request, client_id="a", most_sandboxes=1).result(20)

    assert ("failed", "quota_exceeded") == (refused.status, (refused.error or {})["code"])
    assert "completed" == one.submit(request, client_id="a", most_sandboxes=2).result(20).status
    assert "completed" == one.submit(request, client_id="b", most_sandboxes=1).result(20).status


def test_a_service_that_is_closed_takes_nothing_more(make: Make) -> None:
    one = make(max_concurrent=1)
    running, waiting = sleeping(one, "one"), sleeping(one, "two")
    one.close()
    assert ["killed", "killed"] == [each.result(0).status for each in (running, waiting)]
    with pytest.raises(LifecycleError):
        one.submit(ExecutionRequest("true", id="x"), client_id="a")
    with pytest.raises(ExecutionNotFound):
        one.status("x")
    assert [] == one.manager.list()


# -- whose -----------------------------------------------------------------------------------------


def test_an_id_is_its_owners_and_its_requests(make: Make) -> None:
    one = make(max_concurrent=1)
    request = ExecutionRequest("sh", ("-c", "read x"), stdin=b"", id="same")
    first = one.execute(request, client_id="a")
    again = one.submit(request, client_id="a", wait=False)
    assert first == again.result(0)
    live = sleeping(one, "live")
    assert live is sleeping(one, "live")
    assert one.submit(ExecutionRequest(*SLEEP, id="live"), client_id="a", wait=False) is not live
    for wrong, client in ((request, "b"), (ExecutionRequest("true", id="same"), "a")):
        with pytest.raises(InvalidRequest) as refused:
            one.submit(wrong, client_id=client)
        assert "id" == refused.value.field
    runs(one, "live")
    for name in ("live", "same"):
        for ask in (one.status, one.kill):
            with pytest.raises(ExecutionNotFound):
                ask(name, "b")
    assert "running" == one.status("live", "a").status
    assert "killed" == one.kill("live").result(20).status, "an administrator may"


def test_what_could_not_be_written_is_still_its_owners(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise StorageFull("full")

        save = one.save
        full.setattr(one._table, "change", refuse)
        full.setattr(one, "save", lambda r: None if r.status == "pending" else save(r))
        ended = one.execute(ExecutionRequest("true", id="mine"), client_id="a")
        assert "completed" == ended.status, "no note that cannot be written stops it"
        assert ended == one.status("mine", "a")
        with pytest.raises(ExecutionNotFound):
            one.status("mine", "b")
        one._prune()
        assert {"mine"} == one._unsaved.keys()
    one._prune()
    assert {} == one._unsaved
    assert "completed" == one.status("mine", "a").status


def test_a_session_of_an_execution_ends_with_it_and_says_whose_it_is(make: Make) -> None:
    one = make()
    sleeping(one, "one", "her")
    runs(one, "one")
    (session,) = one.manager.list()

    assert ("one", "her") == (session.metadata[METADATA], session.client_id)
    result = one.status("one")
    assert (session.sandbox_id, session.backend) == (result.sandbox_id, result.backend)
    one.kill("one").result(20)
    until(lambda: [] == one.manager.list())


# -- in time ---------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_lets_none_end_before_it_began(make: Make) -> None:
    class Set(Clock):
        wall_s = 2_000_000_000.0

        def wall(self) -> float:
            return self.wall_s

    clock = Set()
    one = make(clock=clock)
    sleeping(one, "one")
    runs(one, "one")
    clock.wall_s -= 1000
    ended = one.kill("one").result(20)

    assert (2_000_000_000.0,) * 3 == (ended.created_at, ended.started_at, ended.ended_at)


def test_results_are_kept_as_long_as_the_config_says(make: Make) -> None:
    one = make(keep_results_secs=1000.0)
    one.execute(ExecutionRequest("true", id="old"), client_id="a")
    for _ in range(2):
        one._pruned = float("-inf")
        one.execute(ExecutionRequest("true"), client_id="a")
    assert "completed" == one.status("old").status
    one.change({"keep_results_secs": 0.0})
    one.execute(ExecutionRequest("true"), client_id="a")
    assert "completed" == one.status("old").status, "it looks once a minute"
    one._pruned = float("-inf")
    one.execute(ExecutionRequest("true"), client_id="a")
    with pytest.raises(ExecutionNotFound):
        one.status("old")


# -- meanwhile -------------------------------------------------------------------------------------


class Refusing:
    """A sandbox whose network policy cannot be replaced."""

    def __init__(self) -> None:
        self.policies: list[NetworkPolicy] = []

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        self.policies.append(policy)
        raise Unsupported("not here")


@pytest.mark.parametrize(
    ("policy", "is_killed"),
    [(NetworkPolicy.none(), True), (NetworkPolicy(allowed_hosts=("example.org",)), False)],
)
def test_a_command_that_keeps_its_network_against_the_config_is_killed(
    make: Make, policy: NetworkPolicy, is_killed: bool
) -> None:
    result = ExecutionResult("x", ExecutionStatus.RUNNING, command="x")
    running, killed, sandbox = Running(make(), "a", result), [], Refusing()
    running.apply_network(policy)
    assert not running._killed, "it has no sandbox yet"
    running._sandbox, running._run = (
        sandbox,  # type: ignore[assignment]
        SimpleNamespace(kill=lambda: killed.append(1)),  # type: ignore[assignment]
    )
    running.apply_network(policy)

    assert [policy] == sandbox.policies
    assert (is_killed, [1] * is_killed) == (running._killed, killed)


def test_each_change_of_the_config_is_told_once_without_paths(make: Make, tmp_path: Path) -> None:
    one, heard = make(), list[Any]()
    one.manager.events.listen(heard.append)
    one.change({"max_processes": 9, "allowed_paths": [str(tmp_path)]})
    one.change({"max_processes": 9})

    (event,) = (each for each in heard if each.kind == CONFIG)
    assert {"max_processes", "allowed_paths"} == {*event.details["changed"].split(",")}
    assert {"changed", "network_enabled"} == event.details.keys()
    assert "false" == event.details["network_enabled"]


def test_a_hook_may_be_taken_back_twice(make: Make) -> None:
    one = make()
    stop = one.on_config(lambda _: None)
    stop()
    stop()


# -- what an earlier service left ------------------------------------------------------------------


def test_an_execution_of_which_nothing_is_known_is_lost_and_one_that_never_began_is_not(
    make: Make, tmp_path: Path
) -> None:
    one = make(str(tmp_path))
    table = one.manager.store.executions
    one.execute(ExecutionRequest("true", id="done"), client_id="a")
    record = table.get("done")
    assert record is not None
    form = json.loads(record.result)
    for name, changes in {
        "gone": {"sandbox_id": "sbx-gone", "exec_id": "exec-gone"},
        "before": {"sandbox_id": "", "exec_id": ""},
        "late": {"sandbox_id": "sbx-gone", "exec_id": ""},
    }.items():
        text = json.dumps({**form, "id": name, "status": "running", "ended_at": None, **changes})
        table.add(replace(record, id=name, status="running", result=text, ended_at=None))
    with closing(ExecutionService(one.manager)) as again:
        found = {name: again.status(name) for name in ("gone", "before", "late")}
    assert {"gone": SandboxLost.code, "before": ExecNotStarted.code, "late": SandboxLost.code} == {
        name: (each.error or {})["code"] for name, each in found.items()
    }
    assert {"failed"} == {str(each.status) for each in found.values()}
    assert all(each.ended_at for each in found.values())
    assert [] == [each.id for each in table.unended()]


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most"), [("timeout_secs", 300.0), ("memory_mb", 4096), ("cpus", 4.0)]
)
def test_a_request_may_ask_for_the_maximum_and_no_more(name: str, most: Any) -> None:
    config = ExecutionConfig()
    asked: Any = {name: most}
    assert most == getattr(specs.completed(ExecutionRequest("x", **asked), config), name)
    asked[name] += 1
    with pytest.raises(InvalidRequest) as refused:
        specs.completed(ExecutionRequest("x", **asked), config)
    assert (name, True) == (refused.value.field, f"max_{name}" in refused.value.hint)


def test_what_a_request_leaves_out_has_the_defaults_of_its_tier() -> None:
    config = ExecutionConfig(
        default_timeout_secs=7.0,
        default_memory_mb=70,
        default_cpus=0.7,
        work_dir="/srv",
        strong_runtime={"memory_mb": "80", "cpus": "0.8"},
    )
    light, strong = (
        specs.completed(ExecutionRequest("x", tier=tier), config) for tier in ("light", "strong")
    )
    assert (7.0, 70, 0.7, "/srv") == (
        light.timeout_secs,
        light.memory_mb,
        light.cpus,
        light.work_dir,
    )
    assert (7.0, 80, 0.8) == (strong.timeout_secs, strong.memory_mb, strong.cpus)
    assert int is type(strong.memory_mb)
    other = ExecutionRequest("x", timeout_secs=1.0, memory_mb=1, cpus=0.1, work_dir="/x")
    assert other == specs.completed(other, config)


@pytest.mark.parametrize(
    ("work_dir", "is_denied"),
    [("/srv", True), ("/srv/x/y", True), ("/srv2", False), ("/", False), ("/x/srv", False)],
)
def test_no_command_begins_in_a_denied_path(work_dir: str, is_denied: bool) -> None:
    config = ExecutionConfig(denied_paths=("/etc/x", "/srv"))
    if is_denied:
        with pytest.raises(InvalidRequest) as refused:
            specs.completed(ExecutionRequest("x", work_dir=work_dir), config)
        assert "work_dir" == refused.value.field
    else:
        specs.completed(ExecutionRequest("x", work_dir=work_dir), config)


class Least(Unconfined):
    least: Any = {"memory_bytes": (64 << 20, "a kernel")}  # noqa: RUF012


def test_less_memory_than_anything_runs_with_is_refused() -> None:
    specs.check_least(ExecutionRequest("x", memory_mb=64), Least())
    with pytest.raises(InvalidRequest, match="at least 64: a kernel") as refused:
        specs.check_least(ExecutionRequest("x", memory_mb=63), Least())
    assert "memory_mb" == refused.value.field
    specs.check_least(ExecutionRequest("x", memory_mb=1), Unconfined())


def test_every_key_of_the_config_reaches_the_sandbox() -> None:
    config = ExecutionConfig(
        max_processes=9,
        max_output_bytes=99,
        allow_degraded=("pids_limit",),
        allowed_paths=("/srv:rw",),
        denied_paths=("/srv/x",),
        seccomp={"default_action": "allow", "rules": []},
    )
    request = ExecutionRequest(
        "x", id="the-id", timeout_secs=3.0, memory_mb=5, cpus=0.5, work_dir="/tmp"
    )
    found = specs.spec_for(specs.completed(request, config), config)

    limits = found.limits
    assert (3.0, 0.5, 5 << 20, 9, 99) == (
        limits.wall_time_s,
        limits.cpus,
        limits.memory_bytes,
        limits.pids,
        limits.output_bytes,
    )
    assert ({"execution": "the-id"}, ("pids_limit",)) == (found.labels, found.allow_degraded)
    assert ([("/srv", "/srv")], ("/srv/x",)) == (
        [(each.source, each.target) for each in found.mounts],
        found.deny,
    )
    assert (specs.PROFILE, "light", True) == (found.profile, found.tier, found.network.is_none)
    on = config.changed({"network_enabled": True, "seccomp": None})
    open_ = specs.spec_for(specs.completed(request, on), on)
    assert (False, "os_hardened") == (open_.network.is_none, open_.profile)
    strong = specs.completed(ExecutionRequest("x", id="y", tier="strong"), config)
    assert ("os_hardened", "strong") == (
        (spec := specs.spec_for(strong, config)).profile,
        spec.tier,
    )


def test_denied_paths_are_denied_under_each_name_that_they_have(tmp_path: Path) -> None:
    for name in ("a/x", "b", "ab"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "way").symlink_to(tmp_path / "a" / "x")

    def denied(allowed: Sequence[str], paths: Sequence[str]) -> set[str]:
        config = ExecutionConfig(
            allowed_paths=tuple(f"{tmp_path}/{each}" for each in allowed),
            denied_paths=tuple(f"{tmp_path}/{each}" for each in paths),
        )
        found = specs.denied_inside(config)
        assert len(found) == len({*found})
        return {each.removeprefix(f"{tmp_path}/") for each in found}

    assert {"b"} == denied(["a"], ["b"])
    assert {"a/x"} == denied(["a"], ["a/x"])
    assert {"a/x", "link/x"} == denied(["link"], ["a/x"])
    assert {"link/x", "a/x"} == denied(["a"], ["link/x"])
    assert {"way", "a/x"} == denied(["a"], ["way"])
    assert {"ab"} == denied(["a"], ["ab"])
    for allowed, path in (("way", "a"), ("way", "a/x"), ("link", "a")):
        with pytest.raises(InvalidRequest) as refused:
            denied([allowed], [path])
        assert "allowed_paths" == refused.value.field


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"exit_code": 0}, "completed", None),
        ({"exit_code": 1}, "failed", None),
        ({"signal": 9}, "failed", None),
        ({"signal": 9, "killed_by": execs.KILLED_BY_TIMEOUT}, "timeout", "execution_timeout"),
        ({"signal": 9, "oom_killed": True}, "failed", "resource_limit_exceeded"),
        ({"signal": 9, "killed_by": execs.KILLED_BY_CALLER}, "killed", "execution_killed"),
        ({"signal": 9, "killed_by": execs.KILLED_BY_TERMINATE}, "killed", "execution_killed"),
        ({"signal": 9, "killed_by": "wall_time"}, "failed", "resource_limit_exceeded"),
        ({"exit_code": 0, "killed_by": execs.KILLED_BY_CALLER}, "killed", "execution_killed"),
    ],
)
def test_each_end_of_a_process_has_one_status(
    changes: dict[str, Any], status: str, code: str | None
) -> None:
    ended = SimpleNamespace(
        exit_code=None,
        signal=None,
        timed_out=changes.get("killed_by") == execs.KILLED_BY_TIMEOUT,
        oom_killed=False,
        killed_by=None,
        duration_s=1.0,
        ok=changes.get("exit_code") == 0,
    )
    vars(ended).update(changes)
    found, error = endings.judge(ended)  # type: ignore[arg-type]

    assert (status, code) == (str(found), error and error.code)


@pytest.mark.parametrize(
    ("exc", "code", "field"),
    [
        (BackendUnavailable("x"), "sandbox_not_supported", ""),
        (Unsupported("x", field="seccomp"), "sandbox_not_supported", "seccomp"),
        (ValueError("x"), "task_failed", ""),
        (ResourceExhausted("x"), "resource_exhausted", ""),
        *(
            (InvalidRequest("x", field=field), "invalid_request", told)
            for field, told in {
                "limits.memory_bytes": "memory_mb",
                "limits.cpus": "cpus",
                "limits.wall_time_s": "timeout_secs",
                "limits.pids": "max_processes",
                "argv": "command",
                "cwd": "work_dir",
                "workdir": "work_dir",
                "stdin": "stdin",
            }.items()
        ),
    ],
)
def test_what_could_not_run_is_told_in_the_words_of_requests(
    exc: Exception, code: str, field: str
) -> None:
    found = endings.failure(exc)

    assert ("failed", code, field) == (
        found["status"],
        found["error"]["code"],
        found["error"]["field"],
    )
    assert "x" in found["error"]["message"]


# -- the file of the config ------------------------------------------------------------------------


def test_a_config_is_kept_in_a_file_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "execution.json"
    settings = Settings(str(path), ExecutionConfig(max_processes=5))
    assert 5 == settings.now.max_processes, "a missing file means the default"
    mask = os.umask(0)
    try:
        settings.write(ExecutionConfig(max_processes=6))
    finally:
        os.umask(mask)
    assert 0o600 == path.stat().st_mode & 0o777
    assert (6, ["execution.json"]) == (settings.read().max_processes, os.listdir(tmp_path))
    in_memory = Settings(None)
    in_memory.write(ExecutionConfig(max_processes=7))
    assert 7 == in_memory.read().max_processes


def test_a_file_that_cannot_be_read_is_no_default(tmp_path: Path) -> None:
    path = tmp_path / "execution.json"
    path.mkdir()
    with pytest.raises(IoError) as unreadable:
        Settings(str(path))
    assert "config" == unreadable.value.field
    path.rmdir()
    path.write_text("{")
    with pytest.raises(BadJson, match=str(path)):
        Settings(str(path))
    path.write_text('{"max_processes": 0}')
    with pytest.raises(InvalidRequest, match=str(path)) as invalid:
        Settings(str(path))
    assert "max_processes" == invalid.value.field


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, IoError)],
)
def test_a_config_that_cannot_be_written_is_not_in_force(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type
) -> None:
    one = make(str(tmp_path))
    one.change({"max_processes": 5})

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(Exception, match="was not changed") as refused:
            one.change({"max_processes": 6})
    assert error is type(refused.value)
    assert (5, 5) == (one.config.max_processes, one.reload().max_processes)


def test_a_reload_is_told_as_a_change_is_and_a_bad_one_changes_nothing(
    make: Make, tmp_path: Path
) -> None:
    one, heard = make(str(tmp_path)), list[ExecutionConfig]()
    one.on_config(heard.append)
    one.change({"max_processes": 5})
    path = tmp_path / "execution.json"
    form = json.loads(path.read_text())
    path.write_text(json.dumps({**form, "max_processes": 6}))
    one.reload()
    for wrong in ({"strong_runtime": {"backend": "none"}}, {"max_processes": 0}):
        path.write_text(json.dumps({**form, **wrong}))
        with pytest.raises(InvalidRequest):
            one.reload()
    assert [5, 6] == [each.max_processes for each in heard]
    assert 6 == one.config.max_processes


# -- what goes on and what begins ------------------------------------------------------------------


def left_running(one: ExecutionService, name: str) -> None:
    """Leave an execution as a service leaves it that was killed."""
    config = one.config
    spec = specs.spec_for(specs.completed(ExecutionRequest("x", id=name), config), config)
    options = AcquireOptions(metadata={METADATA: name})
    lease = one.manager.acquire(spec, options, client_id="a")
    live = one.manager.index.find(lease.id)
    assert live is not None
    run = one.execs.start(live, execs.ExecRequest(("sleep", "1000")), is_forked=False)
    result = ExecutionResult(
        name,
        ExecutionStatus.RUNNING,
        command="sleep",
        created_at=1.0,
        started_at=2.0,
        sandbox_id=lease.session.sandbox_id,
        exec_id=run.id,
    )
    text = json.dumps(result.to_json())
    assert one.manager.store.executions.add(
        ExecutionRecord(name, "a", "running", "digest", text, 1.0)
    )


def test_one_that_an_earlier_service_left_counts_and_gives_its_sandbox_back(make: Make) -> None:
    one = make()
    left_running(one, "left")
    config = ExecutionConfig(work_dir="/tmp", max_concurrent=1)
    with closing(ExecutionService(one.manager, config, execs=one.execs)) as again:
        assert "running" == again.status("left", "a").status
        with pytest.raises(ExecutionNotFound):
            again.kill("left", "b")
        sleeping(again, "next")
        assert "pending" == again.status("next").status, "it takes the place of one"
        ended = again.kill("left", "a").result(20)
        assert ("killed", 1.0, 2.0) == (ended.status, ended.created_at, ended.started_at)
        runs(again, "next")
        (session,) = one.manager.list()
        assert "next" == session.metadata[METADATA]
        assert 1 == again._running
        again.kill("next").result(20)


def test_one_whose_start_was_refused_never_began_and_may_be_asked_for_again(make: Make) -> None:
    one = make()
    problem = SimpleNamespace(
        code=ExecNotStarted.code, error=lambda: ExecNotStarted("the disk was full")
    )
    view = SimpleNamespace(problem=problem, id="exec-1")
    left_running(one, "left")
    known: Any = SimpleNamespace(
        find=lambda *_: SimpleNamespace(view=lambda: view), list=lambda _id: [view]
    )
    again = ExecutionService(one.manager, execs=known)
    ended = again.status("left")
    again._threads.shutdown()
    assert ("failed", ExecNotStarted.code, "the disk was full") == (
        ended.status,
        (ended.error or {})["code"],
        (ended.error or {})["message"],
    )
    assert [] == one.manager.list(), "its sandbox is nobody's"


def test_a_request_that_never_began_runs_when_it_is_asked_for_again(make: Make) -> None:
    one = make()
    request = ExecutionRequest("true", id="same")
    one.execute(request, client_id="a")
    table = one.manager.store.executions
    record = table.get("same")
    assert record is not None
    form = json.loads(record.result)
    for code, runs_again in ((ExecNotStarted.code, True), (SandboxLost.code, False)):
        error = {"code": code, "message": "x"}
        text = json.dumps({**form, "status": "failed", "error": error})
        table.change("same", status="failed", result=text)
        found = one.execute(request, client_id="a")
        assert runs_again == (found.status == "completed"), code
        with pytest.raises(InvalidRequest):
            one.execute(replace(request, args=("other",)), client_id="a")


def test_one_that_is_killed_while_it_waits_makes_room_for_another(make: Make) -> None:
    one = make(max_concurrent=1, max_pending=1)
    sleeping(one, "first")
    runs(one, "first")
    for name in ("second", "third"):
        sleeping(one, name)
        with pytest.raises(ResourceExhausted):
            sleeping(one, "more")
        assert "killed" == one.kill(name).result(20).status
    assert "killed" == one.kill("first").result(20).status
    until(lambda: one._running == 0)


def test_commands_are_closed_by_the_service_that_made_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, closed = make(), list[Any]()
    real = type(one.execs).close

    def close(each: Any) -> None:
        closed.append(each)
        real(each)

    monkeypatch.setattr(type(one.execs), "close", close)
    ExecutionService(one.manager, execs=one.execs).close()
    assert [] == closed
    own = ExecutionService(one.manager)
    own.close()
    own.close()
    assert [own.execs] == closed


class Profiled(Unconfined, ProfileStore):
    """Notes what profiles it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: dict[str, Any] = {}

    def define_profile(self, name: str, policy: Any) -> None:
        self.profiles[name] = policy


def test_a_policy_is_tried_under_a_profile_of_its_own_that_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, why = Profiled(), {specs.TRIAL: "", "os_hardened": ""}
    tried: list[tuple[str, bool]] = []

    def trial(_backend: Any, profile: str) -> str:
        tried.append((profile, backend.profiles.get(specs.TRIAL) is not None))
        return why[profile]

    monkeypatch.setattr(service, "trial", trial)
    with SessionManager(backends=(backend,), background=False, state_dir=str(tmp_path)) as manager:
        one = ExecutionService(manager)
        policies = [{"default_action": "allow", "rules": []}]
        policies.append({"extends": "os_hardened", "rules": []})
        one.change({"seccomp": policies[0]})
        one.change({"seccomp": policies[0], "max_processes": 9})
        assert [(specs.TRIAL, True)] == tried, "only a policy that is new"
        kept = backend.profiles[specs.PROFILE]
        why[specs.TRIAL] = "it is killed"
        with pytest.raises(InvalidRequest, match="it is killed"):
            one.change({"seccomp": policies[1]})
        assert (kept, None) == (
            backend.profiles[specs.PROFILE],
            backend.profiles[specs.TRIAL],
        )
        path = tmp_path / "execution.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "seccomp": policies[1]}))
        with pytest.raises(InvalidRequest, match="it is killed"):
            one.reload()
        assert kept == backend.profiles[specs.PROFILE]
        why["os_hardened"] = "nothing runs here"
        one.change({"seccomp": policies[1]})
        assert None is backend.profiles[specs.TRIAL]
        assert kept != backend.profiles[specs.PROFILE]
        one.change({"seccomp": None})
        assert None is backend.profiles[specs.PROFILE]
        one.close()


@pytest.mark.parametrize("moment", ["before", "while it gets a sandbox"])
def test_one_that_is_killed_before_its_command_is_killed_and_no_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    one, asked = make(), list[str]()
    result = ExecutionResult("x", ExecutionStatus.PENDING, command="true")
    running = Running(one, "a", result)

    def acquire(*_: Any, **__: Any) -> Any:
        asked.append("sandbox")
        running.kill()
        raise ResourceExhausted("no room")

    monkeypatch.setattr(one.manager, "acquire", acquire)
    if moment == "before":
        running.kill()
    request = specs.completed(ExecutionRequest("true", id="x"), one.config)
    running.run(request, one.config)

    assert "killed" == running.future.result(0).status
    assert (moment != "before") == (asked == ["sandbox"])


def test_a_network_is_held_by_backends_that_are_there(make: Make) -> None:
    for is_there in (True, False):
        report: Any = SimpleNamespace(available=is_there, can=lambda _names: True)
        assert is_there == make()._holds_network(report)
