"""Sandboxes that one server evicts with their memory, and another one restores from the shared store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.errors import IoError, LifecycleError, Unsupported
from ringfence.execs.evicted import EvictedExecs, come_back
from ringfence.execs.execs import Execs
from ringfence.model.acquire import AcquireOptions
from ringfence.model.calls import make_request
from ringfence.model.mount import Mount
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.sessions import eviction, snapshots
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.snapshots.shared import SharedSnapshots
from tests.features import require
from tests.machines import machine_backend, require_machines

_SECRET = b"of the cluster"


class Server:
    """A node's manager and execs."""

    def __init__(self, stack: ExitStack, place: Path, store: Path, backend: Any) -> None:
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        stack.enter_context(closing(backend))
        self.manager = stack.enter_context(
            SessionManager(
                config,
                backends=(backend,),
                state_dir=str(place),
                shared=SharedSnapshots(str(store), _SECRET),
            )
        )
        self.execs = stack.enter_context(closing(Execs(self.manager)))

    def create(self, **changes: Any) -> Live:
        lease = self.manager.acquire(SandboxSpec(tier=STRONG, **changes), client_id="ann")
        return self.live(lease.session.sandbox_id)

    def live(self, sandbox_id: str) -> Live:
        found = self.manager.index.find(sandbox_id)
        assert found is not None
        return found

    def evict(self, live: Live) -> str:
        carry = EvictedExecs(self.execs, live.sandbox_id, "", lambda: None)
        return eviction.evict(self.manager, live, {}, carry)

    def restore(self, sandbox_id: str, snapshot_id: str) -> Live:
        form = eviction.find(self.manager, sandbox_id, snapshot_id, "ann")
        assert form is not None
        record = snapshots.need(self.manager, snapshot_id, "ann")
        options = AcquireOptions(preferred_id=sandbox_id, snapshot_id=snapshot_id)
        spec = snapshots.spec_of(record).altered(id=None)
        lease = self.manager.acquire(spec, options, client_id="ann")
        assert sandbox_id == lease.session.sandbox_id
        live = self.live(sandbox_id)
        come_back(self.manager, self.execs, live, form)
        return live


def _backend(name: str, place: Path) -> Any:
    return machine_backend(str(place)) if "microvm" == name else GvisorBackend(state_dir=str(place))


@pytest.fixture(
    params=[
        # gVisor restores no memory for an ordinary user.
        pytest.param("gvisor", marks=pytest.mark.as_root),
        "microvm",
    ]
)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Start servers that share a store."""
    require("user namespaces")
    if "microvm" == request.param:
        require_machines()
    else:
        require("runsc")
    with ExitStack() as stack:

        def start(name: str) -> Server:
            place = tmp_path / name
            backend = _backend(request.param, place / "snapshots")
            return Server(stack, place, tmp_path / "store", backend)

        yield start


def test_execs_go_on_with_their_ids_and_offsets(servers: Callable[[str], Server]) -> None:
    """There and back: input and output count on, and nothing is left in store or catalogue."""
    first, second = servers("a"), servers("b")
    live = first.create()
    run = first.execs.start(live, make_request(["cat"], stream_stdin=True))
    run.append(memoryview(b"one\n"))
    _until(lambda: 4 == run.view().stdout_bytes)

    snapshot = first.evict(live)

    assert ("terminated", "evicted") == (str(live.state), live.reason)
    assert snapshot == eviction.snapshot_of(first.manager, live.sandbox_id)
    assert [] == first.manager.snapshots()
    there = second.restore(live.sandbox_id, snapshot)
    again = second.execs.find(there.sandbox_id, run.id)
    assert 8 == again.give(4, memoryview(b"two\n"))
    _until(lambda: 8 == again.view().stdout_bytes)
    assert (b"two\n", 4) == again.spool.tracks[0].ends(100)
    assert None is eviction.snapshot_of(first.manager, live.sandbox_id)
    back = first.restore(live.sandbox_id, second.evict(there))
    last = first.execs.find(back.sandbox_id, run.id)
    last.give(8, memoryview(b"three\n"))
    last.end_input()
    last.done.result(60)
    assert 14 == last.view().stdout_bytes
    assert 0 == last.result().exit_code
    assert [] == first.manager.snapshots() == second.manager.snapshots()


def test_what_cannot_go_on_elsewhere_is_refused_and_goes_on(
    servers: Callable[[str], Server],
) -> None:
    server = servers("a")
    mounted = server.create(mounts=(Mount("/mnt/host", str(Path(__file__).parent)),))
    waited = server.create()
    run = server.execs.start(waited, make_request(["sleep", "1000"]), attend_s=0.01)

    with pytest.raises(Unsupported, match="host directories"):
        server.evict(mounted)
    with pytest.raises(Unsupported, match="its caller waits"):
        server.evict(waited)
    with waited.use.call(), pytest.raises(LifecycleError, match="a client is being served"):
        server.evict(waited)

    assert run.running
    assert mounted.sandbox.exec(["true"]).ok


def test_without_the_store_it_is_restored_in_its_place(
    servers: Callable[[str], Server], tmp_path: Path
) -> None:
    server = servers("a")
    live = server.create()
    run = server.execs.start(live, make_request(["cat"], stream_stdin=True))
    (tmp_path / "store").write_text("no directory")

    with pytest.raises(IoError, match="snapshot_store"):
        server.evict(live)

    assert "active" == str(live.state)
    run.append(memoryview(b"on\n"))
    _until(lambda: 3 == run.view().stdout_bytes)
    assert [] == server.manager.snapshots()


def test_what_cannot_be_restored_either_is_left_as_a_snapshot(
    servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved is the only copy then: its owner has it."""
    server = servers("a")
    live = server.create()
    live.sandbox.files.write("/tmp/kept", b"kept")
    (tmp_path / "store").write_text("no directory")

    def fail(*_args: object) -> None:
        raise IoError("this restore failed")

    monkeypatch.setattr(server.manager.maker, "restore_again", fail)

    with pytest.raises(IoError, match="this restore failed"):
        server.evict(live)

    assert ("terminated", "not restored") == (str(live.state), live.reason)
    (saved,) = server.manager.snapshots("ann")
    (tmp_path / "store").unlink()
    options = AcquireOptions(snapshot_id=saved.id)
    again = server.manager.acquire(SandboxSpec(tier=STRONG), options, client_id="ann")
    assert b"kept" == again.sandbox.files.read("/tmp/kept")


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 300.0
    while not holds():
        assert time.monotonic() < ends, "it never held"
        time.sleep(0.02)
