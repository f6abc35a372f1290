"""What a guest or a client sends holds neither the daemon's loop nor its memory.

Each door is attacked by a program of its own, while two clients go on asking. Here they must be answered
at all: a held loop answers nobody for seconds. How soon, `ringfence bench --floods` judges: p99 within 50 ms.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from ringfence.bench.flooding import DOORS, SANDBOX
from ringfence.bench.measures.floods import EXEC, INFO, Attack, Clients
from ringfence.daemon.memory import resident_bytes
from tests.api.conftest import Daemon, StartDaemon

pytestmark = [pytest.mark.full, pytest.mark.anyone]

# Beyond what the same requests take without an attack; no measure of speed, on any machine.
STALLED_MS = {INFO: 1000.0, EXEC: 3000.0}
MEASURED_S = 1.5
BACK_S = 60.0
MOST_LATER, CODE_BYTES = (
    1.2,
    4 << 20,
)  # of the memory before; code that is read when it is first needed
OF_BYTES = (
    "preview-interim", "preview-chunks", "preview-headers", "preview-upload",
    "ws-messages", "ws-pings", "ws-fragments", "ws-sent", "tcp-much", "tcp-sent",
    "attach-input", "attach-bytes", "attach-resize-unread", "attach-pings", "attach-unread",
    "stream-events", "stream-unread", "upload-bytes", "tree-in", "heads-slow", "frames-slow",
)  # fmt: skip
OF_OBJECTS = (
    "list", "watch", "labels", "body-deep", "body-exec", "body-replace", "pipelined",
    "snapshots-list", "metrics", "openapi",
)  # fmt: skip


@pytest.fixture(name="flooded", scope="module")
def fixture_flooded(start_daemon: StartDaemon) -> Daemon:
    """A daemon of its own: others' output is not measured with it."""
    return start_daemon("--log-level", "error")


@pytest.fixture(name="clients", scope="module")
def fixture_clients(flooded: Daemon) -> Clients:
    with flooded.client() as client:
        at = "/v1/sandboxes/" + client.post("/v1/sandboxes", json={}).json()["id"]
        client.get("/v1/openapi.json").raise_for_status()  # is made once, and kept
    made = Clients(f"unix:{flooded.socket}", flooded.process.pid, at)
    made.p99_ms(0.5)  # what is imported when it is first needed
    return made


@pytest.fixture(name="before", scope="module")
def fixture_before(flooded: Daemon, clients: Clients) -> int:
    """The daemon's memory when it has done a little of everything."""
    del clients
    return resident_bytes(flooded.process.pid)


@pytest.mark.parametrize("door", OF_BYTES)
def test_others_are_answered_while_bytes_come_without_end(
    door: str, clients: Clients, before: int
) -> None:
    assert before
    others_are_answered(door, clients)


def test_their_memory_is_given_back(flooded: Daemon, before: int) -> None:
    assert memory_later(flooded, enough(before)) <= enough(before)


@pytest.mark.parametrize("door", OF_OBJECTS)
def test_others_are_answered_while_objects_come_without_end(door: str, clients: Clients) -> None:
    others_are_answered(door, clients)


def test_so_is_that_of_objects(flooded: Daemon, before: int) -> None:
    """Python's own allocator would keep a MiB for each object that is left in it."""
    assert memory_later(flooded, enough(before)) <= enough(before)


@pytest.mark.parametrize("body", [{}, SANDBOX], ids=["the control", "an attacker's"])
def test_an_attackers_sandbox_has_room_for_a_million_files(flooded: Daemon, body: Any) -> None:
    room = {"argv": ["sh", "-c", "test $(stat -f -c %d .) -gt 1000000"], "wait": True}
    with flooded.client() as client:
        at = "/v1/sandboxes/" + client.post("/v1/sandboxes", json=body).json()["id"]
        ended = client.post(f"{at}/execs", json=room).json()
        client.delete(at)

    assert bool(body) == (0 == ended["status"]["exit_code"])


def enough(before: int) -> float:
    return MOST_LATER * before + CODE_BYTES


def memory_later(flooded: Daemon, enough: float) -> int:
    """The daemon's memory once it is little enough, or when it has had its time."""
    until = time.monotonic() + BACK_S
    while (now := resident_bytes(flooded.process.pid)) > enough and time.monotonic() < until:
        time.sleep(0.2)
    return now


def others_are_answered(door: str, clients: Clients) -> None:
    assert door in DOORS
    control = clients.control_ms(MEASURED_S / 2)
    with Attack(clients.address, door):
        found = clients.p99_ms(MEASURED_S)

    assert {} == {kind: ms for kind, ms in found.items() if ms > STALLED_MS[kind] + control[kind]}
