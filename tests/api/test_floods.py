"""What a guest or a client sends holds neither the daemon's loop nor its memory.

Each door is attacked by a program of its own, while two clients go on asking. They may wait for 50 ms
longer than on a machine that is as busy with something else: neighbours' load is not the daemon's.
"""

from __future__ import annotations

import pytest

from ringfence.bench.flooding import DOORS
from ringfence.bench.measures.floods import EXEC, INFO, Attack, Clients
from ringfence.daemon.memory import resident_bytes
from tests.api.conftest import Daemon, StartDaemon

MOST_MS = 50.0
MEASURED_S = 1.5
TRIES = 3  # of a measure on a machine with neighbours
ATTACKED = (
    "preview-interim", "preview-chunks", "preview-headers", "preview-upload",
    "ws-messages", "ws-pings", "ws-fragments", "ws-sent", "tcp-much", "tcp-sent",
    "attach-input", "attach-bytes", "attach-resize-unread", "attach-pings", "attach-unread",
    "stream-events", "stream-unread", "upload-bytes", "tree-in", "list", "watch",
    "labels", "body-deep", "body-exec", "body-replace", "pipelined",
)  # fmt: skip


@pytest.fixture(name="flooded", scope="module")
def fixture_flooded(start_daemon: StartDaemon) -> Daemon:
    """A daemon of its own: others' output is not measured with it."""
    return start_daemon("--log-level", "error")


@pytest.fixture(name="clients", scope="module")
def fixture_clients(flooded: Daemon) -> Clients:
    with flooded.client() as client:
        at = "/v1/sandboxes/" + client.post("/v1/sandboxes", json={}).json()["id"]
    made = Clients(f"unix:{flooded.socket}", flooded.process.pid, at)
    made.p99_ms(0.5)  # what is imported when it is first needed
    return made


@pytest.fixture(name="before", scope="module")
def fixture_before(flooded: Daemon, clients: Clients) -> int:
    """The daemon's memory when it has done a little of everything."""
    del clients
    return resident_bytes(flooded.process.pid)


@pytest.mark.parametrize("door", ATTACKED)
def test_others_are_answered_while_a_door_is_attacked(
    door: str, clients: Clients, before: int
) -> None:
    assert before
    assert door in DOORS
    for _attempt in range(TRIES):
        control = clients.control_ms(MEASURED_S / 2)
        with Attack(clients.address, door):
            found = clients.p99_ms(MEASURED_S)
        over = {
            kind: (ms, control[kind]) for kind, ms in found.items() if ms > MOST_MS + control[kind]
        }
        print(f"{door}: info {found[INFO]:.1f} ms, exec {found[EXEC]:.1f} ms; control {control}")
        if not over:
            return
    assert not over
