"""A Python process that counts in memory is saved, its sandbox is gone, and two of it go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from ringfence.errors import RingfenceError, SnapshotCorrupt, SnapshotNotFound
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.state import State
from tests.features import require
from tests.images.conftest import small
from tests.images.making import Entry, Made, layer
from tests.strong.counting import check_two, start_counting, wait_for

pytestmark = [pytest.mark.root, pytest.mark.full]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend(state_dir=str(tmp_path / "snapshots"))
    yield made
    made.close()


def _counting(backend: GvisorBackend) -> Sandbox:
    sandbox = Sandbox.create(backend=backend)
    start_counting(sandbox)
    return sandbox


def test_two_go_on_from_one(backend: GvisorBackend) -> None:
    sandbox = _counting(backend)
    before = wait_for(sandbox, 10)

    snapshot = sandbox.checkpoint()

    assert State.TERMINATED is sandbox.session.state
    with (
        Sandbox.restore(snapshot.id, backend=backend) as first,
        Sandbox.restore(snapshot.id, backend=backend) as second,
    ):
        after = [wait_for(each, before["count"] + 10) for each in (first, second)]
        assert "strong" == first.spec.tier
        assert first.exec(["true"]).ok
    check_two(before, after)


def test_changed_memory_is_not_continued(backend: GvisorBackend, tmp_path: Path) -> None:
    sandbox = _counting(backend)
    wait_for(sandbox, 1)
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
        start_counting(first.sandbox)
        before = wait_for(first.sandbox, 10)

        saved = manager.checkpoint(first.id, client_id="ann")
        assert ("terminated", "checkpoint") == (first.session.state, first.session.reason)
        with pytest.raises(SnapshotNotFound):
            manager.acquire(options=AcquireOptions(snapshot_id=saved.id), client_id="ben")
        again = manager.acquire(spec, AcquireOptions(snapshot_id=saved.id), client_id="ann")

        after = wait_for(again.sandbox, before["count"] + 5)
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


def test_forks_of_several_threads_harm_no_one(backend: GvisorBackend) -> None:
    """Who comes while another thread saves it is refused, or gets files only; what runs goes on."""
    with Sandbox.create(backend=backend) as sandbox:
        echo = sandbox.start(["sh", "-c", "while read -r x; do echo $x; done"], stream_stdin=True)
        with ThreadPoolExecutor(4) as pool:
            forking = [pool.submit(sandbox.fork) for _ in range(4)]
        problems = [each.exception() for each in forking]
        made = [each.result()[0] for each in forking if each.exception() is None]
        for fork in made:
            fork.terminate()
        assert all(isinstance(each, RingfenceError) for each in problems if each is not None)
        assert any(each.fork_report is not None and each.fork_report.has_processes for each in made)
        assert echo.stdin is not None
        echo.stdin.write(b"here\n")
        assert b"here\n" == next(iter(echo.stdout))
        assert sandbox.exec(["true"]).ok
