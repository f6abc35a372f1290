"""Output of execs over HTTP: whoever drops, dawdles or waits gets every byte once, or is told what not."""

from __future__ import annotations

import base64
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, metrics_of

pytestmark = pytest.mark.anyone

CHATTER = "for i in $(seq 30); do seq $i 4000; seq $i 2500 >&2; sleep 0.01; done"


class Sandbox:
    """One sandbox's execs, through a client."""

    def __init__(self, client: httpx.Client, sandbox_id: str) -> None:
        self.client, self.id = client, sandbox_id
        self.base = f"/v1/sandboxes/{sandbox_id}/execs"

    def start(self, script: str, **more: Any) -> str:
        made = self.client.post(self.base, json={"script": script, **more})
        assert 201 == made.status_code, made.text
        found: str = made.json()["id"]
        return found

    def wait(self, exec_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"{self.base}/{exec_id}/wait").json()
        return found

    def output(self, exec_id: str, **query: Any) -> httpx.Response:
        return self.client.get(f"{self.base}/{exec_id}/output", params=query)

    def give(self, exec_id: str, data: bytes, **query: Any) -> httpx.Response:
        return self.client.post(f"{self.base}/{exec_id}/stdin", params=query, content=data)


@pytest.fixture
def sandbox(client: httpx.Client, sandbox_id: str) -> Sandbox:
    return Sandbox(client, sandbox_id)


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def data_of(event: dict[str, Any]) -> bytes:
    if "data_base64" in event:
        return base64.b64decode(event["data_base64"])
    return event["data"].encode()  # type: ignore[no-any-return]


# -- drop and go on ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/event-stream"])
def test_a_client_that_drops_fifty_times_gets_what_another_gets(
    daemon: Daemon, sandbox: Sandbox, kind: str
) -> None:
    dice = random.Random(7)
    exec_id = sandbox.start(CHATTER)
    url, cursor, drops = f"{sandbox.base}/{exec_id}/output?follow=true", "", 0
    got = {"stdout": b"", "stderr": b""}
    last: dict[str, Any] = {}
    while not last or drops < 50:
        headers = {"accept": kind, **({"last-event-id": cursor} if cursor else {})}
        most = dice.randint(1, 90_000) if drops < 50 else 10**9
        for event in until_cut(daemon, url, headers, most):
            cursor = event["cursor"]
            if event["type"] == "output":
                assert len(got[event["stream"]]) == event["offset"]
                got[event["stream"]] += data_of(event)
            last = event if event["type"] == "end" else {}
        drops += 1

    assert 0 == last["exec"]["status"]["exit_code"]
    for stream, data in got.items():
        assert sandbox.output(exec_id, stream=stream).content == data
    assert b"".join(b"%d\n" % n for i in range(1, 31) for n in range(i, 4001)) == got["stdout"]


def until_cut(
    daemon: Daemon, url: str, headers: dict[str, str], most: int
) -> Iterator[dict[str, Any]]:
    """Events until the connection is cut, somewhere after `most` bytes; half an event is none."""
    seen = b""
    with daemon.client() as client, client.stream("GET", url, headers=headers) as response:
        for piece in response.iter_raw():
            seen += piece[: most - len(seen)]
            if most <= len(seen):
                break
    for line in seen.split(b"\n")[:-1]:
        if line.startswith((b"{", b"data: ")):
            yield json.loads(line.removeprefix(b"data: "))


@pytest.mark.full
def test_bytes_of_a_client_that_drops_in_the_middle_of_anything(
    daemon: Daemon, sandbox: Sandbox
) -> None:
    """Cut off wherever it pleases the client, by closing its connection."""
    dice = random.Random(8)
    exec_id = sandbox.start(CHATTER)
    path, got = f"{sandbox.base}/{exec_id}/output?stream=stdout&follow=true", b""
    for _ in range(50):
        with daemon.client() as client, client.stream("GET", f"{path}&offset={len(got)}") as answer:
            assert len(got) == int(answer.headers["x-ringfence-offset"])
            left = dice.randint(1, 12_000)
            for piece in answer.iter_raw():
                got += piece[:left]
                left -= len(piece)
                if left <= 0:
                    break
    rest = sandbox.client.get(f"{path}&offset={len(got)}")
    last = sandbox.output(exec_id, stream="stdout", offset=len(got) + len(rest.content))

    assert b"".join(b"%d\n" % n for i in range(1, 31) for n in range(i, 4001)) == got + rest.content
    assert (b"", "true") == (last.content, last.headers["x-ringfence-end"])


def test_a_cursor_that_is_none_or_beyond_the_present_is_refused(sandbox: Sandbox) -> None:
    exec_id = sandbox.start("echo hello")
    sandbox.wait(exec_id)
    for query in (
        {"offset": "x"},
        {"offset": "3"},
        {"offset": "1.2.3"},
        {"offset": "7.0"},
        {"offset": "0.1"},
        {"offset": "9" * 30 + ".0"},
        {"stream": "stdout", "offset": "7"},
        {"stream": "stdout", "offset": "1.0"},
        {"stream": "stdout", "offset": "²"},
        {"stream": "stdin"},
    ):
        answer = sandbox.output(exec_id, **query)
        assert (422, "invalid_request") == (answer.status_code, answer.json()["code"]), query

    assert b"lo\n" == sandbox.output(exec_id, stream="stdout", offset="3").content
    assert 404 == sandbox.output("exec-none").status_code


# -- slow and quiet ------------------------------------------------------------------------------------


def test_a_slow_reader_neither_stops_the_command_nor_grows_the_daemon(
    daemon: Daemon, sandbox: Sandbox
) -> None:
    pid, total = daemon.process.pid, 400 << 20
    before = resident_bytes(pid)
    exec_id = sandbox.start(f"head -c {total} /dev/zero")
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(daemon.socket)
        path = f"{sandbox.base}/{exec_id}/output?stream=stdout&follow=true"
        slow.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        slow.recv(1)  # it has begun, and then the reader falls asleep
        view = sandbox.wait(exec_id)
        grown = resident_bytes(pid) - before
        kept = sum(each.stat().st_size for each in daemon.state_dir.glob(f"spool/*/{exec_id}/*"))
    again = sandbox.output(exec_id, stream="stdout")
    after_gap = sandbox.output(exec_id, stream="stdout", offset=len(again.content))

    assert (0, total) == (view["status"]["exit_code"], view["stdout_bytes"])
    assert grown < 48 << 20
    assert kept <= view["kept_bytes"] + (8 << 20)
    assert total - kept == view["stdout_dropped_bytes"]
    assert view["kept_bytes"] // 2 == len(again.content)
    assert "false" == again.headers["x-ringfence-end"]
    assert total - kept == int(after_gap.headers["x-ringfence-dropped-bytes"])
    assert total == int(after_gap.headers["x-ringfence-next-offset"])
    assert "true" == after_gap.headers["x-ringfence-end"]


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def test_what_was_dropped_is_an_event(sandbox: Sandbox) -> None:
    exec_id = sandbox.start("seq 200000", max_output_bytes=1000)
    result = sandbox.wait(exec_id)["result"]
    events = list(events_of(sandbox.output(exec_id, heartbeat_s=5).iter_lines()))
    dropped = next(each for each in events if each["type"] == "dropped")
    tail = b"".join(data_of(each) for each in events if each.get("offset", 0) > dropped["offset"])

    assert (500, 500) == (dropped["offset"], len(data_of(events[0])))
    assert 1288895 == 1000 + result["stdout_dropped_bytes"] == 500 + dropped["bytes"] + len(tail)
    assert tail.endswith(b"199999\n200000\n")
    assert result["truncated"]


def test_a_quiet_stream_stays_open_by_heartbeats(sandbox: Sandbox) -> None:
    exec_id = sandbox.start("cat", stream_stdin=True)
    url, kinds = f"{sandbox.base}/{exec_id}/output", list[str]()
    with sandbox.client.stream(
        "GET", url, params={"follow": True, "heartbeat_s": 0.05}
    ) as response:
        for event in events_of(response.iter_lines()):
            kinds.append(event["type"])
            if 5 == len(kinds):
                sandbox.give(exec_id, b"awake", eof=True)

    assert ["heartbeat"] * 5 == kinds[:5]
    assert ["output", "end"] == [each for each in kinds if each != "heartbeat"]


# -- clocks, and clients that leave --------------------------------------------------------------------


def test_three_clocks_of_their_own(sandbox: Sandbox) -> None:
    """The command's, the request's, and the stream's: none ends what another is about."""
    exec_id = sandbox.start("cat", stream_stdin=True)
    url = f"{sandbox.base}/{exec_id}"
    waited = sandbox.client.get(f"{url}/wait", params={"timeout_s": 0.05}).json()
    started = sandbox.client.post(
        sandbox.base, json={"argv": ["sleep", "1000"], "wait": True, "wait_s": 0.05}
    )
    late = sandbox.client.post(
        sandbox.base, json={"script": "sleep 1000 & sleep 1000", "wait": True, "timeout_s": 0.1}
    ).json()
    sandbox.give(exec_id, b"", eof=True)

    assert ("running", None) == (waited["state"], waited["status"])
    assert (201, "running") == (started.status_code, started.json()["state"])
    assert ("ended", True, "timeout") == (
        late["state"],
        late["status"]["timed_out"],
        late["status"]["killed_by"],
    )
    assert "ended" == sandbox.wait(exec_id)["state"]
    killed = sandbox.client.post(f"{sandbox.base}/{started.json()['id']}/kill")
    assert 200 == killed.status_code
    assert "caller" == sandbox.wait(started.json()["id"])["status"]["killed_by"]


def test_a_process_survives_the_client_that_started_it(daemon: Daemon, sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(daemon.socket)
        body = json.dumps(
            {"script": "echo begun; read x; echo $x", "stream_stdin": True, "wait": True}
        )
        head = f"POST {sandbox.base} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        gone.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        while not (items := sandbox.client.get(sandbox.base).json()["items"]):
            time.sleep(0.01)
    exec_id = items[0]["id"]
    sandbox.give(exec_id, b"still here\n")

    assert "begun\nstill here\n" == sandbox.wait(exec_id)["result"]["stdout"]


@pytest.mark.full
def test_what_runs_or_streams_keeps_its_sandbox(client: httpx.Client) -> None:
    """An idle timeout shorter than the command; then there is nothing left to wait for."""
    body = {"timeouts": {"idle_s": 1.5, "on_idle": "terminate"}}
    sandbox = Sandbox(client, client.post("/v1/sandboxes", json=body).json()["id"])
    view = sandbox.wait(sandbox.start("sleep 3"))
    while "terminated" != (over := client.get(f"/v1/sandboxes/{sandbox.id}").json())["state"]:
        time.sleep(0.05)

    assert ("ended", 0) == (view["state"], view["status"]["exit_code"])
    assert "idle" == over["reason"]
    assert [view["id"]] == [each["id"] for each in client.get(sandbox.base).json()["items"]]


def test_a_suspended_command_keeps_its_streams(client: httpx.Client, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("cat", stream_stdin=True)
    assert 200 == client.post(f"/v1/sandboxes/{sandbox.id}/suspend").status_code
    refused = client.post(sandbox.base, json={"argv": ["true"]})
    given = sandbox.give(exec_id, b"frozen")
    assert 200 == client.post(f"/v1/sandboxes/{sandbox.id}/resume").status_code
    sandbox.give(exec_id, b" and back", offset=6, eof=True)

    assert (409, 200) == (refused.status_code, given.status_code)
    assert "frozen and back" == sandbox.wait(exec_id)["result"]["stdout"]


def test_a_process_that_ends_with_its_sandbox_says_so(client: httpx.Client) -> None:
    sandbox = Sandbox(client, client.post("/v1/sandboxes", json={}).json()["id"])
    exec_id = sandbox.start("echo before; sleep 1000")
    with client.stream("GET", f"{sandbox.base}/{exec_id}/output?follow=true") as response:
        events = events_of(response.iter_lines())
        first = next(events)
        client.delete(f"/v1/sandboxes/{sandbox.id}")
        last = list(events)[-1]
    view = sandbox.wait(exec_id)

    assert "before\n" == first["data"]
    for end in (last["exec"], view):
        assert ("ended", None, 9, "terminate", None) == (
            end["state"],
            end["status"]["exit_code"],
            end["status"]["signal"],
            end["status"]["killed_by"],
            end["problem"],
        )
    assert "before\n" == view["result"]["stdout"]
    assert b"before\n" == sandbox.output(exec_id, stream="stdout").content


def test_what_never_began_is_refused_or_failed(sandbox: Sandbox) -> None:
    body = {"argv": ["true"], "cwd": "/nowhere"}
    waited = sandbox.client.post(sandbox.base, json={**body, "wait": True})
    started = sandbox.client.post(sandbox.base, json=body).json()
    failed = sandbox.wait(started["id"])

    assert (422, "cwd") == (waited.status_code, waited.json()["field"])
    assert ("failed", "invalid_request") == (failed["state"], failed["problem"]["code"])
    wrongs: tuple[dict[str, Any], ...] = (
        {},
        {"argv": []},
        {"argv": "ls"},
        {"script": "x", "argv": ["y"]},
        {"argv": ["x"], "nice": 1},
    )
    for wrong in wrongs:
        assert 422 == sandbox.client.post(sandbox.base, json=wrong).status_code, wrong


def test_many_stuck_commands_delay_nobody(daemon: Daemon, sandbox: Sandbox) -> None:
    body = json.dumps({"argv": ["sleep", "1000"], "wait": True})
    head = f"POST {sandbox.base} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    stuck = []
    try:
        for _ in range(80):
            stuck.append(socket.socket(socket.AF_UNIX))
            stuck[-1].connect(daemon.socket)
            stuck[-1].sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        while 80 != len(sandbox.client.get(sandbox.base).json()["items"]):
            time.sleep(0.02)
        ran = sandbox.client.post(sandbox.base, json={"argv": ["true"], "wait": True}, timeout=20)
        assert 200 == ran.status_code
    finally:
        for each in stuck:
            each.close()


# -- input ---------------------------------------------------------------------------------------------


def test_input_arrives_once_however_often_it_is_sent(sandbox: Sandbox) -> None:
    exec_id = sandbox.start("cat", stream_stdin=True)
    told = [
        sandbox.give(exec_id, b"hello ").json()["offset"],
        sandbox.give(exec_id, b"hello ").json()["offset"],
        sandbox.give(exec_id, b"lo world", offset=3).json()["offset"],
    ]
    gap = sandbox.give(exec_id, b"!", offset=12)
    ended = sandbox.give(exec_id, b"", offset=11, eof=True)
    view = sandbox.wait(exec_id)
    late = sandbox.give(exec_id, b"more", offset=11)

    assert [6, 6, 11] == told
    assert (409, "offset") == (gap.status_code, gap.json()["field"])
    assert 200 == ended.status_code
    assert ("hello world", 11) == (view["result"]["stdout"], view["stdin_bytes"])
    assert 409 == late.status_code


def test_input_that_nobody_reads_is_not_said_to_have_arrived(sandbox: Sandbox) -> None:
    exec_id = sandbox.start("read x; head -c 300000 | wc -c", stream_stdin=True)
    data = b"go\n" + bytes(300_000)
    deaf = sandbox.start("sleep 1000", stream_stdin=True)
    stalled = sandbox.give(deaf, data, stall_s=0.05).json()
    reached = sandbox.give(exec_id, data).json()
    closed = sandbox.start("sleep 1000")

    assert 0 < stalled["offset"] < len(data)
    assert len(data) == reached["offset"]
    assert "300000\n" == sandbox.wait(exec_id)["result"]["stdout"]
    assert 422 == sandbox.give(closed, b"x").status_code


def test_signals_by_name_and_number(sandbox: Sandbox) -> None:
    for given, expected in ((15, 15), ("TERM", 15), ("SIGUSR1", 10), ("int", 2)):
        exec_id = sandbox.start("exec sleep 1000")
        url = f"{sandbox.base}/{exec_id}/signal"
        assert 200 == sandbox.client.post(url, json={"signal": given}).status_code
        assert expected == sandbox.wait(exec_id)["status"]["signal"]
    for wrong in (0, 99, "NOPE", True, None):
        assert 422 == sandbox.client.post(url, json={"signal": wrong}).status_code, wrong


def test_execs_are_listed_in_pages(sandbox: Sandbox) -> None:
    made = [sandbox.start("true") for _ in range(5)]
    first = sandbox.client.get(sandbox.base, params={"limit": 3}).json()
    rest = sandbox.client.get(
        sandbox.base, params={"limit": 3, "cursor": first["next_cursor"]}
    ).json()

    assert made == [each["id"] for each in first["items"] + rest["items"]]
    assert rest["next_cursor"] is None


def test_execs_are_counted(client: httpx.Client, sandbox: Sandbox) -> None:
    before = metrics_of(client)
    running = sandbox.start("cat", stream_stdin=True)
    sandbox.wait(sandbox.start("echo 12345"))
    between = metrics_of(client)
    sandbox.give(running, b"", eof=True)
    sandbox.wait(running)
    after = metrics_of(client)

    assert before["ringfence_execs_running"] + 1 == between["ringfence_execs_running"]
    assert before["ringfence_execs_running"] == after["ringfence_execs_running"]
    ended = 'ringfence_execs_total{state="ended"}'
    assert 2 == after[ended] - before.get(ended, 0)
    name = "ringfence_output_bytes_total"
    assert 6 == between[name] - before[name]
