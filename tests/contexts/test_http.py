"""The routes of contexts, as any HTTP client uses them: events, resume, input, interrupts."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, _user_namespaces, common_daemon, daemon, start_daemon
from tests.contexts import forged
from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone

__all__ = ["_user_namespaces", "common_daemon", "daemon", "start_daemon"]


def events_of(
    client: httpx.Client, method: str, path: str, **options: Any
) -> Generator[Any, None, None]:
    with client.stream(method, path, **options) as response:
        if response.status_code >= 400:
            response.read()
        assert 200 == response.status_code, response.text
        yield from map(json.loads, response.iter_lines())


def run(client: httpx.Client, at: str, code: str, **body: Any) -> list[Any]:
    return list(events_of(client, "POST", f"{at}/cells", json={"code": code, **body}))


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.client() as found:
        yield found


@pytest.fixture(scope="module")
def contexts(client: httpx.Client) -> str:
    made = client.post("/v1/sandboxes", json={}).raise_for_status().json()
    return f"/v1/sandboxes/{made['id']}/contexts"


@pytest.fixture(scope="module")
def at(client: httpx.Client, contexts: str) -> str:
    made = client.post(contexts, json={"env": {"A": "b"}}).raise_for_status().json()
    return f"{contexts}/{made['id']}"


@pytest.mark.full
def test_a_cell_is_a_stream_of_events(client: httpx.Client, at: str) -> None:
    start, *rest = run(client, at, "print('o'); x = 41\nx + 1")
    end = rest[-1]

    assert ["stdout", "result", "end"] == [each["type"] for each in rest]
    assert ("o\n", {"text/plain": "42"}) == (rest[0]["text"], rest[1]["data"])
    assert (None, False, True) == (end["error"], end["timed_out"], end["running"])
    assert "ZeroDivisionError" == run(client, at, "1 / 0")[-1]["error"]["name"]
    items = client.get(f"{at}/variables").raise_for_status().json()["items"]
    assert {"name": "x", "type": "int", "value": "41"} in items

    cell = f"{at}/cells/{start['cell']}"
    again = list(events_of(client, "GET", cell))
    assert [each["type"] for each in rest] == [each["type"] for each in again[1:]]
    after = list(events_of(client, "GET", cell, params={"cursor": rest[0]["cursor"]}))
    assert ["start", "result", "end"] == [each["type"] for each in after], "from a cursor on"


def test_input_and_interrupts(client: httpx.Client, at: str) -> None:
    seen = []
    code = "name = input('name? ')\nprint(name)\nwhile True: pass"
    for event in events_of(client, "POST", f"{at}/cells", json={"code": code, "input": True}):
        seen.append(event)
        if event["type"] == "input":
            assert "name? " == event["prompt"]
            client.post(f"{at}/input", json={"text": "ann"}).raise_for_status()
        if event["type"] == "stdout":
            client.post(f"{at}/interrupt").raise_for_status()
    assert "KeyboardInterrupt" == seen[-1]["error"]["name"]


def test_time_limits_hold_without_a_client_and_for_waiting_cells(
    client: httpx.Client, at: str
) -> None:
    code = "import time\nx = 7\nprint(1)\nwhile True: time.sleep(0.01)"
    body = {"code": code, "timeout_s": 0.6}
    stream = events_of(client, "POST", f"{at}/cells", json=body)
    start = next(stream)
    stream.close()
    waits = run(client, at, "y = 1", timeout_s=0.1)[-1]
    ended = list(events_of(client, "GET", f"{at}/cells/{start['cell']}"))[-1]

    assert ("CellTimeout", True) == (waits["error"]["name"], waits["running"])
    assert "KeyboardInterrupt" == ended["error"]["name"]
    assert "7" == run(client, at, "x")[1]["data"]["text/plain"]
    assert "NameError" == run(client, at, "y")[-1]["error"]["name"], "it never had its turn"


@pytest.mark.full
def test_what_does_not_react_is_killed(client: httpx.Client, contexts: str) -> None:
    made = client.post(contexts, json={}).raise_for_status().json()
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    end = run(client, f"{contexts}/{made['id']}", code, timeout_s=0.2)[-1]
    assert ("CellTimeout", False) == (end["error"]["name"], end["running"])
    body = {"language": "bash", "cwd": "/tmp"}
    answer = client.post(f"{contexts}/{made['id']}/restart", json=body).raise_for_status().json()
    assert "/tmp\n" == run(client, f"{contexts}/{answer['id']}", "pwd")[1]["text"]
    client.delete(f"{contexts}/{answer['id']}").raise_for_status()
    refused = client.post(f"{contexts}/{made['id']}/cells", json={"code": "1"})
    assert (409, "lifecycle") == (refused.status_code, refused.json()["code"])
    assert 404 == client.get(f"{contexts}/{made['id']}/cells/{'f' * 32}").status_code


@pytest.mark.parametrize(
    "how", [*forged.ENDS, *(pytest.param(each, marks=pytest.mark.full) for each in forged.LASTS)]
)
def test_forged_frames_end_their_context_at_worst(
    daemon: Daemon, client: httpx.Client, contexts: str, at: str, how: str
) -> None:
    made = client.post(contexts, json={}).raise_for_status().json()
    hostile, before = f"{contexts}/{made['id']}", forged.reset_peak(daemon.process.pid)
    code = f"{forged.PRELUDE}\n{(forged.ENDS | forged.LASTS)[how]}"
    end = run(client, hostile, code, timeout_s=120)[-1]

    assert "end" == end["type"]
    assert "CellTimeout" != (end["error"] or {}).get("name")
    # Each cell is read from the middle of the output: bytes before its first frame are passed over.
    assert end["running"] or how in forged.ENDS
    if end["running"]:
        assert "2" == run(client, hostile, "1 + 1")[1]["data"]["text/plain"]
    assert "2" == run(client, at, "1 + 1")[1]["data"]["text/plain"]
    grown = forged.peak(daemon.process.pid) - before
    print(f"{grown >> 20} MiB")
    assert grown < forged.GROWTH_BYTES
    client.delete(hostile)


def test_suspended_in_a_cell(client: httpx.Client, contexts: str, at: str) -> None:
    waits = (
        "import os, time\nprint(1)\nwhile not os.path.exists('/tmp/on'): time.sleep(0.01)\n'done'"
    )
    sandbox = contexts.removesuffix("/contexts")
    for event in events_of(client, "POST", f"{at}/cells", json={"code": waits}):
        if event["type"] == "stdout":
            client.post(f"{sandbox}/suspend").raise_for_status()
            client.post(f"{sandbox}/resume").raise_for_status()
            query = {"path": "/tmp/on"}
            client.put(f"{sandbox}/files/content", params=query, content=b"").raise_for_status()
    assert (None, True) == (event["error"], event["running"])


def test_none_begins_while_the_sandbox_is_suspended(
    client: httpx.Client, contexts: str, at: str
) -> None:
    """It would only wait, for as long as the client has patience."""
    sandbox = contexts.removesuffix("/contexts")
    client.post(f"{sandbox}/suspend").raise_for_status()
    try:
        for method, path, form in (("POST", "cells", {"code": "1"}), ("GET", "variables", None)):
            refused = client.request(method, f"{at}/{path}", json=form)
            assert (409, "resume it first") == (refused.status_code, refused.json()["hint"])
    finally:
        client.post(f"{sandbox}/resume").raise_for_status()
    assert None is run(client, at, "1")[-1]["error"], "the control"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_events_of_a_cell_that_a_daemon_was_killed_in(tmp_path: Path) -> None:
    server = Server(tmp_path / "state")
    server.start()

    def connect() -> httpx.Client:
        transport = httpx.HTTPTransport(uds=f"{server.state}/ringfence.sock", verify=False)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    try:
        with connect() as client:
            sandbox = f"/v1/sandboxes/{client.post('/v1/sandboxes', json={}).json()['id']}"
            at = f"{sandbox}/contexts/{client.post(f'{sandbox}/contexts', json={}).json()['id']}"
            code = "import os, time\nprint(1)\nwhile not os.path.exists('on'): time.sleep(0.01)\n'last'"
            stream = events_of(client, "POST", f"{at}/cells", json={"code": code})
            start, first = next(stream), next(stream)
            killing = threading.Thread(target=server.kill)
            killing.start()
            with pytest.raises(httpx.RequestError):
                next(stream)
            killing.join(60)
        server.start()
        with connect() as client:
            cell = f"{at}/cells/{start['cell']}"
            client.put(
                f"{sandbox}/files/content", params={"path": "on"}, content=b""
            ).raise_for_status()
            rest = list(events_of(client, "GET", cell, params={"cursor": first["cursor"]}))
            assert ["start", "result", "end"] == [each["type"] for each in rest]
            assert "'last'" == rest[1]["data"]["text/plain"]
            client.delete(sandbox).raise_for_status()
    finally:
        server.stop()
