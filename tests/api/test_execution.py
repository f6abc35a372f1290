"""The five routes of the execution service."""

from __future__ import annotations

import base64
import json
import signal
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from ringfence.client import Client
from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone

BASE = "/api/v1/sandbox"


def test_a_command_and_its_result(client: httpx.Client) -> None:
    form = {
        "command": "sh",
        "args": ["-c", 'echo "$1 $W $PWD"; cat', "sh", "one"],
        "env": {"W": "two"},
        "work_dir": "/tmp",
        "stdin": "three",
        "timeout_secs": 20,
        "memory_mb": 256,
    }
    ran = client.post(f"{BASE}/execute", json=form)
    told = ran.json()

    assert (200, "completed", 0) == (ran.status_code, told["status"], told["exit_code"])
    assert "one two /tmp\nthree" == told["stdout"]
    assert told == client.get(f"{BASE}/status/{told['id']}").json()
    assert told == client.post(f"{BASE}/kill/{told['id']}").json()


def test_one_that_runs_on_is_looked_at_and_killed(client: httpx.Client) -> None:
    form = {"command": "sleep", "args": ["60"], "id": "runs-on"}
    taken = client.post(f"{BASE}/execute?wait=false", json=form)
    again = client.post(f"{BASE}/execute?wait=false", json=form)
    killed = client.post(f"{BASE}/kill/runs-on")

    assert (202, 202) == (taken.status_code, again.status_code)
    assert taken.json()["status"] in ("pending", "running")
    assert (200, "killed") == (killed.status_code, killed.json()["status"])


@pytest.mark.parametrize(
    ("form", "status", "field"),
    [
        ({}, 422, "command"),
        ({"command": ""}, 422, "command"),
        ({"command": "true", "shell": True}, 422, "shell"),
        ({"command": "true", "timeout_secs": -1}, 422, "timeout_secs"),
        ({"command": "true", "memory_mb": 10**6}, 422, "memory_mb"),
        ({"command": "true", "env": {"1A": ""}}, 422, "env.1A"),
        ({"command": "true", "tier": "strong"}, 422, "tier"),
    ],
)
def test_what_is_not_a_request_is_refused(
    client: httpx.Client, form: dict[str, object], status: int, field: str
) -> None:
    refused = client.post(f"{BASE}/execute", json=form)

    assert (status, field) == (refused.status_code, refused.json()["field"])
    assert "application/problem+json" == refused.headers["content-type"]


def test_what_is_not_there_is_not_found(client: httpx.Client) -> None:
    for ask in (client.get(f"{BASE}/status/nothing"), client.post(f"{BASE}/kill/nothing")):
        assert (404, "execution_not_found") == (ask.status_code, ask.json()["code"])


def test_info_tells_tiers_config_and_filter(client: httpx.Client) -> None:
    told = client.get(f"{BASE}/info").json()

    light, strong = told["tiers"]
    assert ("light", True) == (light["tier"], light["supported"])
    assert strong["supported"] or strong["reason"]
    assert "light" == told["default_tier"]
    assert {"default_timeout_secs", "denied_paths", "network_enabled"} <= set(told["config"])
    assert told["seccomp"]["default_action"]
    assert told["seccomp"]["rules"][0]["names"]


@pytest.mark.full
def test_what_runs_when_the_daemon_is_killed_goes_on(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Its output can be followed while it runs; kill -9, and the next daemon has all of its result."""
    first = start_daemon(state_dir=tmp_path)
    script = "echo before; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo after; exit 3"
    with first.client() as client:
        form = {"command": "sh", "args": ["-c", script], "id": "lasting"}
        client.post(f"{BASE}/execute?wait=false", json=form)
        while (told := client.get(f"{BASE}/status/lasting").json())["status"] == "pending":
            pass
        at = f"/v1/sandboxes/{told['sandbox_id']}"
        output = f"{at}/execs/{told['exec_id']}/output?stream=stdout&follow=true"
        with client.stream("GET", output, headers={"accept": "application/octet-stream"}) as lines:
            assert "before" == next(lines.iter_lines())
    first.process.kill()
    first.stop()
    second = start_daemon(state_dir=tmp_path)
    with second.client() as client:
        assert "running" == client.get(f"{BASE}/status/lasting").json()["status"]
        client.put(f"{at}/files/content?path=/tmp/go", content=b"")
        while (told := client.get(f"{BASE}/status/lasting").json())["status"] == "running":
            pass
        assert ("failed", 3) == (told["status"], told["exit_code"])
        assert "before\nafter\n" == told["stdout"]
        assert [] == client.get("/v1/sandboxes").json()["items"]


def test_results_and_config_survive_a_restart_and_a_file_is_read_again(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    first = start_daemon(state_dir=tmp_path)
    with first.client() as client:
        form = {"command": "sh", "args": ["-c", "printf '\\377'"], "id": "kept"}
        told = client.post(f"{BASE}/execute", json=form).json()
        changed = client.patch(f"{BASE}/config", json={"network_enabled": True})
        refused = client.patch(f"{BASE}/config", json={"max_cpus": 0})
    first.stop()
    second = start_daemon(state_dir=tmp_path)
    with second.client() as client:
        assert told == client.get(f"{BASE}/status/kept").json()
        assert client.get(f"{BASE}/info").json()["config"]["network_enabled"]
        file = tmp_path / "execution.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "network_enabled": False}))
        second.process.send_signal(signal.SIGHUP)
        for _ in range(100):
            if not client.get(f"{BASE}/info").json()["config"]["network_enabled"]:
                break
        else:
            raise AssertionError("it was not read again")

    assert b"\xff" == base64.b64decode(told["stdout_base64"])
    assert (200, True) == (changed.status_code, changed.json()["network_enabled"])
    assert (422, "max_cpus") == (refused.status_code, refused.json()["field"])


def test_what_clients_of_other_services_send_and_read(client: httpx.Client) -> None:
    """A Go client writes zeros for what is not set, and reads `int`, `string` and RFC 3339."""
    unset = {"timeout_secs": 0, "memory_mb": 0, "work_dir": "", "tier": "", "id": "", "stdin": ""}
    form = {"command": "sh", "args": ["-c", "echo $PWD; kill -9 $$"], "env": None, **unset}
    ran = client.post(f"{BASE}/execute?plain=true", json=form)
    told = ran.json()

    assert (200, "failed", -1, "") == (
        ran.status_code,
        told["status"],
        told["exit_code"],
        told["error"],
    )
    assert "/home/sandbox\n" == told["stdout"]
    began, ended = (datetime.fromisoformat(told[name]) for name in ("start_time", "end_time"))
    assert began.timestamp() == pytest.approx(told["started_at"], abs=1e-5)
    assert ended.timestamp() == pytest.approx(told["ended_at"], abs=1e-5)
    assert began.tzinfo
    assert told["duration"] == pytest.approx(told["duration_s"] * 1e9, rel=1e-6)
    assert isinstance(told["duration"], int)
    usage = told["resource_usage"]
    assert usage["memory_peak_bytes"] == usage["peak_memory_bytes"]

    own = client.get(f"{BASE}/status/{told['id']}").json()
    assert (None, None) == (own["exit_code"], own["error"])
    assert {**own, "exit_code": -1, "error": ""} == told
    nulls = {**dict.fromkeys(("args", "env", "tier", "work_dir", "id", "cpus")), "command": "true"}
    assert "completed" == client.post(f"{BASE}/execute", json=nulls).json()["status"]
    late = {"command": "sleep", "args": ["60"], "timeout_secs": 0.1}
    said = client.post(f"{BASE}/execute?plain=true", json=late).json()["error"]
    assert said.startswith("execution timeout: not done after")


def test_one_switch_makes_every_result_plain(client: httpx.Client, daemon: Daemon) -> None:
    form = {"command": "sh", "args": ["-c", "kill -9 $$"]}
    client.patch(f"{BASE}/config", json={"plain_results": True}).raise_for_status()
    try:
        told = client.post(f"{BASE}/execute", json=form).json()
        with Client(f"unix:{daemon.socket}") as sdk:
            result = sdk.execute("sh", "-c", "kill -9 $$")
            assert result == sdk.execution(result.id)
    finally:
        client.patch(f"{BASE}/config", json={"plain_results": False})

    assert (-1, "") == (told["exit_code"], told["error"])
    assert (None, 9) == (result.exit_code, result.signal)
    assert -1 == client.get(f"{BASE}/status/{told['id']}?plain=true").json()["exit_code"]
    assert client.get(f"{BASE}/status/{told['id']}").json()["exit_code"] is None


@pytest.mark.parametrize("memory_mb", [1, 7])
def test_too_little_memory_is_refused_by_the_name_that_was_sent(
    client: httpx.Client, memory_mb: int
) -> None:
    refused = client.post(f"{BASE}/execute", json={"command": "true", "memory_mb": memory_mb})

    assert (422, "memory_mb") == (refused.status_code, refused.json()["field"])
    assert "at least 8" in refused.json()["detail"]


def test_a_changed_config_is_an_event_for_admins(client: httpx.Client) -> None:
    before = client.get("/v1/events").json()["items"]
    last = before[-1]["seq"] if before else 0
    client.patch(f"{BASE}/config", json={"network_enabled": True}).raise_for_status()
    client.patch(f"{BASE}/config", json={"network_enabled": False}).raise_for_status()
    client.patch(f"{BASE}/config", json={"network_enabled": False}).raise_for_status()

    events = client.get(f"/v1/events?since={last}").json()["items"]
    told = [each["details"] for each in events if each["kind"] == "config"]
    assert [
        {"changed": "network_enabled", "network_enabled": "true"},
        {"changed": "network_enabled", "network_enabled": "false"},
    ] == told
    key = client.post("/v1/keys", json={"owner": "ann"}).json()["key"]
    asks = {"authorization": f"Bearer {key}"}
    assert all(
        each["kind"] != "config" for each in client.get("/v1/events", headers=asks).json()["items"]
    )
    info = client.get(f"{BASE}/info").json()
    assert info["supports_network_enabled"] is any(
        each["supports_network_enabled"] for each in info["executors"]
    )
