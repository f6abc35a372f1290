"""A Python process that counts in memory is saved, its sandbox is gone, and two of it go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import (
    AcquireOptions,
    ManagerConfig,
    PoolConfig,
    Sandbox,
    SandboxSpec,
    SessionManager,
)
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.errors import SnapshotCorrupt, SnapshotNotFound
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.state import State
from tests.features import require
from tests.images.conftest import small
from tests.images.making import Entry, Made, layer

pytestmark = pytest.mark.root  # runsc restores nothing for an ordinary user

COUNTER = """
import json, os, socket, time
kept = os.urandom(8).hex()
count = 0
while True:
    count += 1
    said = {"count": count, "kept": kept, "hostname": socket.gethostname(), "pid": os.getpid(),
            "random": os.urandom(16).hex(), "time": time.time()}
    with open("said.new", "w") as file:
        json.dump(said, file)
    os.rename("said.new", "said")
    time.sleep(0.02)
"""
PATIENCE_S = 60.0


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend(state_dir=str(tmp_path / "snapshots"))
    yield made
    made.close()


def _wait_for(sandbox: Sandbox, count: int) -> dict[str, Any]:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        text = sandbox.exec(["cat", "said"]).stdout
        said: dict[str, Any] = json.loads(text) if text else {"count": 0}
        if said["count"] >= count:
            return said
    raise AssertionError(f"it did not come as far as {count}")


def _counting(backend: GvisorBackend) -> Sandbox:
    sandbox = Sandbox.create(backend=backend)
    sandbox.files.write("counter.py", COUNTER.encode())
    sandbox.exec(["sh", "-c", "/usr/bin/python3 counter.py >log 2>&1 </dev/null &"])
    return sandbox


def test_two_go_on_from_one(backend: GvisorBackend) -> None:
    sandbox = _counting(backend)
    before = _wait_for(sandbox, 10)

    snapshot = sandbox.checkpoint()

    assert State.TERMINATED is sandbox.session.state
    with (
        Sandbox.restore(snapshot.id, backend=backend) as first,
        Sandbox.restore(snapshot.id, backend=backend) as second,
    ):
        after = [_wait_for(each, before["count"] + 10) for each in (first, second)]
        assert "strong" == first.spec.tier
        assert first.exec(["true"]).ok
    # The same process, with what it had in memory: it did not start again.
    assert {(before["kept"], before["pid"])} == {(said["kept"], said["pid"]) for said in after}
    # And yet each is itself.
    assert 3 == len({said["hostname"] for said in (before, *after)})
    assert 3 == len({said["random"] for said in (before, *after)})
    assert all(abs(said["time"] - time.time()) < PATIENCE_S for said in after)


def test_changed_memory_is_not_continued(backend: GvisorBackend, tmp_path: Path) -> None:
    sandbox = _counting(backend)
    _wait_for(sandbox, 1)
    snapshot = sandbox.checkpoint()
    memory = tmp_path / "snapshots" / snapshot.id / "memory.img"
    content = bytearray(memory.read_bytes())
    content[len(content) // 2] ^= 1
    memory.chmod(0o600)
    memory.write_bytes(content)

    with pytest.raises(SnapshotCorrupt):
        Sandbox.restore(snapshot.id, backend=backend)


def test_a_managers_clients_go_on_too(backend: GvisorBackend) -> None:
    """The session ends with what it saved, and its client gets it back as a session of the same kind."""
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with SessionManager(config, backends=(backend,)) as manager:
        spec = SandboxSpec(tier="strong", labels={"job": "7"})
        first = manager.acquire(spec, client_id="ann")
        first.sandbox.files.write("counter.py", COUNTER.encode())
        first.sandbox.exec(["sh", "-c", "/usr/bin/python3 counter.py >log 2>&1 </dev/null &"])
        before = _wait_for(first.sandbox, 10)

        saved = manager.checkpoint(first.id, client_id="ann")
        assert ("terminated", "checkpoint") == (first.session.state, first.session.reason)
        with pytest.raises(SnapshotNotFound):
            manager.acquire(options=AcquireOptions(snapshot_id=saved.id), client_id="ben")
        again = manager.acquire(spec, AcquireOptions(snapshot_id=saved.id), client_id="ann")

        after = _wait_for(again.sandbox, before["count"] + 5)
        assert before["kept"] == after["kept"]
        assert first.session.sandbox_id != again.session.sandbox_id
        manager.delete_snapshot(saved.id, "ann")


def test_each_has_a_machine_id_of_its_own(
    backend: GvisorBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an image has one; the default root has none, nor has gVisor a boot id."""
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    base, before = small(), b"0123456789abcdef" * 2 + b"\n"
    made = Made([*base.layers, layer(Entry("etc/machine-id", before))], base.config)
    load(made.as_layout(tmp_path / "layout"), "known:1", store=ImageStore())
    sandbox = Sandbox.create(image="known:1", backend=backend)
    read = ["/bin/cat", "/etc/machine-id"]
    assert before == sandbox.exec(read).stdout

    saved = sandbox.checkpoint()

    after = []
    for _ in range(2):
        with Sandbox.restore(saved.id, backend=backend) as again:
            after.append(again.exec(read).stdout)
    assert 3 == len({before, *after})
    assert [33, 33] == [len(each) for each in after]
