"""The execution service of the contract, row by row: tiers, requests, statuses, results, errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ringfence.errors import (
    ExecutionNotFound,
    InvalidRequest,
    ResourceExhausted,
    SandboxNotSupported,
    StorageFull,
)
from ringfence.execution.running import METADATA
from ringfence.execution.service import ExecutionService
from ringfence.model.acquire import AcquireOptions
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import EXECUTION_NEXT, ExecutionRequest, ExecutionResult
from ringfence.model.spec import SandboxSpec
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.execution.conftest import MakeService, Run
from tests.features import has

pytestmark = pytest.mark.anyone

SLEEP = ("sleep", ("60",))


def wait_until_it_runs(service: ExecutionService, execution_id: str) -> None:
    """Its first output is the event: polled, because nobody is told of it."""
    import time

    deadline = time.monotonic() + 20
    while service.status(execution_id).status != "running" and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "running" == service.status(execution_id).status


def test_every_part_of_a_request_arrives(run: Run) -> None:
    script = 'echo "$1 $WORD $PWD"; cat; echo err >&2'
    result = run(
        "sh",
        *("-c", script, "sh", "a b"),
        env={"WORD": "w"},
        work_dir="/tmp",
        stdin=b"fed\xff",
        id="mine-1",
    )

    assert ("mine-1", "completed", 0) == (result.id, result.status, result.exit_code)
    assert b"a b w /tmp\nfed\xff" == result.stdout
    assert b"err\n" == result.stderr
    assert result.created_at <= (result.started_at or 0) <= (result.ended_at or 0)
    assert 0 < (result.duration_s or 0) < 20
    assert result == ExecutionResult.from_json(result.to_json())


def test_what_it_used_is_counted(run: Run) -> None:
    used = run("sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done").resource_usage

    assert (used.cpu_time_ns or 0) > 1_000_000
    assert (used.peak_memory_bytes or 0) > 100_000
    assert set(used.to_json()) == {
        "cpu_time_ns",
        "peak_memory_bytes",
        "io_read_bytes",
        "io_write_bytes",
    }


@pytest.mark.parametrize(
    ("request_", "status", "code", "exit_code"),
    [
        (("true", ()), "completed", None, 0),
        (("sh", ("-c", "exit 3")), "failed", None, 3),
        (("no-such-program", ()), "failed", None, 127),
        (("sh", ("-c", "kill -9 $$")), "failed", None, None),
    ],
)
def test_how_it_ended_is_a_status(
    service: ExecutionService, request_: Any, status: str, code: str | None, exit_code: int | None
) -> None:
    result = service.execute(ExecutionRequest(*request_), client_id="a")

    assert (status, exit_code) == (result.status, result.exit_code)
    assert code == (result.error or {}).get("code")


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(run: Run) -> None:
    result = run("sh", "-c", "echo early; sleep 60 & sleep 60", timeout_secs=0.3)

    assert ("timeout", b"early\n") == (result.status, result.stdout)
    assert "execution_timeout" == (result.error or {})["code"]


@pytest.mark.skipif(not has("cgroup"), reason="nobody bounds memory here")
def test_too_much_memory_is_a_limit_that_was_exceeded(run: Run) -> None:
    allocate = "x = bytearray(200 << 20); print(len(x))"
    control = run("python3", "-c", allocate, memory_mb=400)
    result = run("python3", "-c", allocate, memory_mb=64)

    assert "completed" == control.status
    assert "failed" == result.status
    assert "resource_limit_exceeded" == (result.error or {})["code"]


def test_output_is_bounded_and_says_so(make_service: MakeService) -> None:
    service = make_service(max_output_bytes=1000)
    request = ExecutionRequest("sh", ("-c", "head -c 5000 /dev/zero"))
    result = service.execute(request, client_id="a")

    assert (1000, 4000) == (len(result.stdout), result.stdout_dropped_bytes)


def test_killing_what_runs_waits_and_has_ended(make_service: MakeService) -> None:
    service = make_service(max_concurrent=1)
    first = service.submit(ExecutionRequest(*SLEEP, id="first"), client_id="a")
    wait_until_it_runs(service, "first")
    second = service.submit(ExecutionRequest(*SLEEP, id="second"), client_id="a")
    assert "pending" == service.status("second").status

    assert "killed" == service.kill("second").result(20).status
    assert not first.done()
    killed = service.kill("first").result(20)
    assert ("killed", "execution_killed") == (killed.status, (killed.error or {})["code"])
    assert second.result().started_at is None
    assert killed == service.kill("first").result(20)


def test_only_so_many_may_wait(make_service: MakeService) -> None:
    service = make_service(max_concurrent=1, max_pending=1)
    for name in ("one", "two"):
        service.submit(ExecutionRequest(*SLEEP, id=name), client_id="a")
        if name == "one":
            wait_until_it_runs(service, name)

    with pytest.raises(ResourceExhausted) as refused:
        service.submit(ExecutionRequest("true"), client_id="a")
    assert refused.value.retryable


def test_the_next_begins_when_one_ends(make_service: MakeService) -> None:
    service = make_service(max_concurrent=1, max_pending=2)
    futures = [service.submit(ExecutionRequest("true"), client_id="a") for _ in range(3)]

    assert ["completed"] * 3 == [each.result(60).status for each in futures]


def test_an_end_that_a_full_disk_refuses_is_written_later(
    service: ExecutionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = service.manager.store.executions
    change = table.change

    def refuse_ends(execution_id: str, **columns: Any) -> None:
        if columns.get("ended_at"):
            raise StorageFull("database or disk is full")
        change(execution_id, **columns)

    with monkeypatch.context() as full:
        full.setattr(table, "change", refuse_ends)
        ended = service.execute(ExecutionRequest("sh", ("-c", "exit 7"), id="one"), client_id="a")
        assert ended == service.status("one", "a")
    service.execute(ExecutionRequest("true"), client_id="a")

    record = table.get("one")
    assert record is not None
    assert (7, "failed") == (json.loads(record.result)["exit_code"], record.status)


def test_one_id_is_one_execution(service: ExecutionService) -> None:
    request = ExecutionRequest("sh", ("-c", "date +%N"), id="same")
    first = service.execute(request, client_id="a")

    assert first == service.execute(request, client_id="a")
    with pytest.raises(InvalidRequest) as refused:
        service.execute(ExecutionRequest("true", id="same"), client_id="a")
    assert "id" == refused.value.field


def test_another_clients_execution_is_not_found(service: ExecutionService) -> None:
    service.execute(ExecutionRequest("true", id="hers"), client_id="her")

    assert "completed" == service.status("hers", "her").status
    for ask in (service.status, service.kill):
        with pytest.raises(ExecutionNotFound):
            ask("hers", "him")
        with pytest.raises(ExecutionNotFound):
            ask("nobodys")
    with pytest.raises(InvalidRequest):
        service.execute(ExecutionRequest("true", id="hers"), client_id="him")


def test_another_clients_execution_is_not_found_while_it_runs(service: ExecutionService) -> None:
    service.submit(ExecutionRequest(*SLEEP, id="hers"), client_id="her", wait=False)

    for ask in (service.status, service.kill):
        with pytest.raises(ExecutionNotFound):
            ask("hers", "him")
    assert "killed" == service.kill("hers", "her").result().status


def test_a_client_is_told_how_many_of_its_own_run(service: ExecutionService) -> None:
    service.submit(ExecutionRequest(*SLEEP, id="hers"), client_id="her", wait=False)
    wait_until_it_runs(service, "hers")

    assert (1, 0, 1) == tuple(service.info(who).running for who in ("her", "him", None))


def test_sandboxes_of_executions_that_are_over_end_when_a_service_starts(
    make_service: MakeService,
) -> None:
    """A service killed between an end and the release of its sandbox leaves one."""
    manager = make_service().manager
    kept, left = (
        manager.acquire(SandboxSpec(), AcquireOptions(metadata=metadata), client_id="a").id
        for metadata in ({}, {METADATA: "execution-gone"})
    )
    with closing(ExecutionService(manager)):
        assert [kept] == [each.session_id for each in manager.list()]
    assert kept != left


def test_a_tier_that_cannot_be_had_is_refused_in_words(service: ExecutionService) -> None:
    light, strong = service.tiers()

    assert ("light", True, ("native",)) == (light.tier, light.supported, light.backends)
    assert ("strong", False) == (strong.tier, strong.supported)
    assert "native" in strong.reason
    with pytest.raises(SandboxNotSupported) as refused:
        service.execute(ExecutionRequest("true", tier="strong"), client_id="a")
    assert strong.reason == refused.value.message


def test_results_survive_the_service_and_what_ran_is_lost(
    make_service: MakeService, tmp_path: Any
) -> None:
    state = str(tmp_path / "state")
    service = make_service(state)
    done = service.execute(ExecutionRequest("echo", ("kept",), id="done"), client_id="a")
    service.submit(ExecutionRequest(*SLEEP, id="cut"), client_id="a")
    wait_until_it_runs(service, "cut")
    table = service.manager.store.executions
    record = table.get("cut")
    assert record is not None
    service.close()
    # As a kill -9 would have left it: after its command had begun, before that was written down, of a
    # sandbox that is forgotten, and before there was one.
    table.change("cut", status="running", result=record.result, ended_at=None)
    states = {
        "begun": {"exec_id": ""},
        "gone": {"exec_id": "", "sandbox_id": "sbx-forgotten"},
        "early": {"exec_id": "", "sandbox_id": "", "status": "pending"},
    }
    for name, changes in states.items():
        left = json.loads(record.result) | {"id": name, **changes}
        table.add(replace(record, id=name, result=json.dumps(left)))
    service.manager.close()

    again = make_service(state)
    assert done == again.status("done", "a")
    assert "killed" == again.kill("cut", "a").result(20).status  # what is known of it is told
    assert "killed" == again.kill("begun", "a").result(20).status
    for name, code in (("gone", "sandbox_lost"), ("early", "exec_not_started")):
        lost = again.status(name, "a")
        assert ("failed", None) == (lost.status, lost.exit_code)
        assert code == (lost.error or {})["code"]
    for name in ("gone", "early"):
        again.submit(ExecutionRequest(*SLEEP, id=name), client_id="a", wait=False)
    wait_until_it_runs(again, "early")  # begun under its id; what is lost stays lost
    assert "failed" == again.status("gone", "a").status


def test_results_are_forgotten_in_time(make_service: MakeService) -> None:
    service = make_service(keep_results_secs=0.0)
    service.execute(ExecutionRequest("true", id="old"), client_id="a")
    service._pruned = float("-inf")
    service.execute(ExecutionRequest("true"), client_id="a")

    with pytest.raises(ExecutionNotFound):
        service.status("old")


def test_closing_kills_what_runs(make_service: MakeService) -> None:
    service = make_service()
    future = service.submit(ExecutionRequest(*SLEEP, id="x"), client_id="a")
    wait_until_it_runs(service, "x")
    service.close()

    assert "killed" == future.result(0).status
    assert [] == service.manager.list()


def test_a_status_that_is_final_stays() -> None:
    assert {"completed", "failed", "timeout", "killed"} == {
        str(status) for status, then in EXECUTION_NEXT.items() if not then
    }


def test_nothing_of_it_is_left(service: ExecutionService, run: Run) -> None:
    run("sh", "-c", "echo x > /tmp/left; (sleep 60 &) ")

    assert [] == service.manager.list()
    assert b"" == run("sh", "-c", "ls /tmp").stdout
    assert os.getpid() != 1


def test_the_strong_tier_runs_where_it_can(require: Callable[[str], None]) -> None:
    require("runsc")
    with SessionManager(
        ManagerConfig(pool=PoolConfig(enabled=False)), backends=("native", "gvisor")
    ) as manager:
        service = ExecutionService(manager, ExecutionConfig(strong_runtime={"backend": "gvisor"}))
        try:
            strong = service.tiers()[1]
            assert ("strong", True, ("gvisor",)) == (
                strong.tier,
                strong.supported,
                strong.backends,
            ), strong.reason
            request = ExecutionRequest("sh", ("-c", "dmesg | head -n 5; exit 3"), tier="strong")
            result = service.execute(request, client_id="a")
        finally:
            service.close()

    assert ("failed", 3, "gvisor") == (result.status, result.exit_code, result.backend)
    assert b"gVisor" in result.stdout
