"""Warm sandboxes: a claim with anything a client may ask for is a hit, and nothing is shared."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence import Limits, Mount, NetworkPolicy, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.prebuilt.prewarming import NativeWarm
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.egress.host import client
from ringfence.errors import InvalidRequest, ResourceExhausted, SandboxLost
from ringfence.model import capabilities as can
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions import liveness
from ringfence.sessions.config import PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.pools.restored import Restored
from tests.native.outside import cgroups_of, init_pid, pids_with, until
from tests.sessions.conftest import ALLOWED, MakeManager

pytestmark = pytest.mark.anyone

MIB = 1 << 20
WARM = PoolConfig(min_warm=2, max_warm=4)


def warmed(manager: SessionManager, count: int = 2) -> SessionManager:
    assert until(lambda: count == manager.pool.size)
    return manager


def test_everything_a_client_asks_for_is_bound_at_the_claim(
    make_manager: MakeManager, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "given").write_text("from the host")
    manager = warmed(make_manager(pool=WARM))
    spec = SandboxSpec(
        env={"WHOSE": "ann's"},
        labels={"team": "red"},
        mounts=(
            Mount("/workspace", str(tmp_path), "read_write"),
            Mount("/shown", str(tmp_path)),
        ),
        limits=Limits(pids=50, open_files=123, disk_bytes=4 * MIB, memory_bytes=64 * MIB, cpus=0.5),
        workdir="/workspace",
        ttl_s=600,
        allow_degraded=ALLOWED,
    )

    lease = manager.acquire(spec, client_id="ann")

    assert (1, 0) == (manager.stats().pool_hits, manager.stats().pool_misses)
    said = lease.sandbox.shell('echo "$WHOSE"; pwd -P; cat given; ulimit -n; touch made').text
    assert "ann's\n/workspace\nfrom the host123\n" == said
    assert not lease.sandbox.shell("touch /shown/x").ok
    assert (tmp_path / "made").exists()
    assert "red" == lease.sandbox.session.metadata["team"]
    found = lease.capabilities()
    assert 123 == found.limits.open_files
    assert 4 * MIB == found.limits.disk_bytes
    assert 64 * MIB == found.limits.memory_bytes


@pytest.fixture
def with_egress(tmp_path: Path) -> Iterator[NativeBackend]:
    backend = NativeBackend(state_dir=str(tmp_path / "snapshots"), egress=client.shared)
    if not backend.report().can(can.NETWORK_HOSTS):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no nf_tables here")
    yield backend
    backend.close()
    client.close_shared()


def test_a_network_policy_is_bound_at_the_claim(
    make_manager: MakeManager, with_egress: NativeBackend
) -> None:
    """Each client's own, from the same shelf: a name is known to whom it was allowed."""
    manager = warmed(make_manager(backends=(with_egress,), pool=WARM))
    names = (
        "getent hosts one.test >/dev/null && echo one; getent hosts two.test >/dev/null && echo two"
    )

    said = []
    for hosts in (("one.test:80",), ("two.test:80",), ()):
        spec = SandboxSpec(network=NetworkPolicy(allowed_hosts=hosts))
        lease = manager.acquire(spec, client_id="ann")
        said.append(lease.sandbox.shell(names).text)
        assert hosts == lease.capabilities().allowed_destinations
        assert bool(hosts) == lease.capabilities().has_network
        assert until(lambda: 2 == manager.pool.size)

    assert ["one\n", "two\n", ""] == said
    assert 3 == manager.stats().pool_hits


def test_a_warm_sandbox_of_a_template_has_the_network_of_its_claim(
    with_egress: NativeBackend,
) -> None:
    """Whatever network it was built with: a claim without one has none."""
    some = NetworkPolicy(allowed_hosts=("one.test:80",))
    none = NetworkPolicy.none()
    for built, claimed in ((some, none), (none, some), (some, some), (none, none)):
        warm = Restored(with_egress.provision(SandboxSpec(network=built)), SandboxSpec())
        got = warm.claim(SandboxSpec(network=claimed))
        try:
            found = got.granted()
            assert claimed.allowed_hosts == found.allowed_destinations
            assert bool(claimed.allowed_hosts) == found.has_network
        finally:
            warm.discard()


def test_the_default_pool_is_filled_at_once(make_manager: MakeManager) -> None:
    manager = make_manager(pool=PoolConfig())

    assert until(lambda: 2 == manager.stats().pool_size)
    lease = manager.acquire(client_id="ann")
    assert 1.0 == manager.stats().pool_hit_rate
    assert lease.session.sandbox_id.startswith("sbx-")
    assert until(lambda: 2 == manager.stats().pool_size)


def test_nothing_of_one_client_is_there_for_the_next(make_manager: MakeManager) -> None:
    """The whole pool is used up, dirtied and given back; whoever comes next finds nothing of it."""
    manager = warmed(make_manager(pool=WARM))
    seen: set[str] = set()
    for turn in range(8):
        lease = manager.acquire(SandboxSpec(env={"SECRET": "s3"}), client_id=f"client-{turn}")
        box = lease.sandbox
        assert lease.session.sandbox_id not in seen
        seen.add(lease.session.sandbox_id)
        found = box.shell(
            "ls -A /tmp /var/tmp /home/sandbox /dev/shm /mnt/memory /mnt/session/outputs;"
            " ls -d /proc/[0-9]* | wc -l; id -u"
        ).text
        for name in ("dirt", "s3cret"):
            assert name not in found
        box.shell(
            "for d in /tmp /var/tmp ~ /dev/shm /mnt/memory /mnt/session/outputs; do"
            " echo s3cret > $d/dirt; done; setsid sleep 600 >/dev/null 2>&1 &"
        )
        lease.release(keep_alive=bool(turn % 2))


def test_it_is_one_whose_use_it_was(make_manager: MakeManager) -> None:
    manager = make_manager(pool=WARM)
    manager.acquire(client_id="ann").release(keep_alive=True)

    assert until(lambda: 2 <= manager.pool.size)
    first = manager.acquire(client_id="bob")
    assert not first.sandbox.files.list(".")


def test_keep_alive_grows_the_pool_up_to_the_most(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM))
    leases = [manager.acquire(client_id="ann") for _ in range(6)]
    assert until(lambda: 2 == manager.pool.size)

    for lease in leases:
        lease.release(keep_alive=True)

    assert until(lambda: 4 == manager.pool.size)
    manager.fill_pool()
    assert 4 == manager.pool.size
    assert 0 == manager.stats().active_sandboxes


def test_without_keep_alive_it_stays_as_it_is(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM))
    manager.acquire(client_id="ann").release()

    assert until(lambda: 2 == manager.pool.size)
    manager.fill_pool()
    assert 2 == manager.pool.size


def test_the_pool_is_left_alone_when_asked(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM))

    manager.acquire(options=AcquireOptions(use_pool=False), client_id="ann")
    manager.acquire(options=AcquireOptions(preferred_id="my-box"), client_id="ann")

    stats = manager.stats()
    assert (0, 0, None, 2) == (
        stats.pool_hits,
        stats.pool_misses,
        stats.pool_hit_rate,
        stats.pool_size,
    )


def test_what_does_not_fit_is_a_miss(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM))

    lease = manager.acquire(SandboxSpec(user="nobody"), client_id="ann")

    assert "nobody" in lease.sandbox.exec(["id"]).text
    assert (0, 1) == (manager.stats().pool_hits, manager.stats().pool_misses)


def test_other_profiles_can_be_kept_warm(make_manager: MakeManager) -> None:
    nobody = SandboxSpec(user="nobody")
    pool = PoolConfig(min_warm=1, warm_profiles=("as-nobody",), profiles={"as-nobody": nobody})
    manager = warmed(make_manager(pool=pool), 1)

    lease = manager.acquire(nobody, client_id="ann")

    assert "nobody" in lease.sandbox.exec(["id"]).text
    assert 1 == manager.stats().pool_hits


def test_warm_ones_expire_and_are_replaced(make_manager: MakeManager) -> None:
    manager = make_manager(pool=PoolConfig(min_warm=2, warm_ttl_s=2.0))
    assert until(lambda: 2 == manager.pool.size)
    old = {kept.warm.id for kept in manager.pool._shelf}

    assert until(lambda: not old & {kept.warm.id for kept in manager.pool._shelf})
    assert until(lambda: 2 == manager.pool.size)
    assert until(lambda: not [each for name in old for each in cgroups_of(name)])


def test_a_dead_one_is_nobody_s(make_manager: MakeManager) -> None:
    """All that are warm are killed: the next client gets a good one all the same."""
    manager = warmed(make_manager(pool=WARM))
    for kept in list(manager.pool._shelf):
        os.kill(kept.warm.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    lease = manager.acquire(client_id="ann")

    assert lease.sandbox.exec(["true"]).ok
    assert until(lambda: 2 == manager.pool.size)
    assert 3 == manager.slots.taken


def test_a_claim_that_fails_leaves_nothing(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM))
    bad = SandboxSpec(mounts=(Mount("/data", "/no/such/directory"),))

    with pytest.raises(InvalidRequest) as refusal:
        manager.acquire(bad, client_id="ann")

    assert refusal.value.field.startswith("mounts")
    assert 0 == manager.stats().active_sandboxes
    assert until(lambda: 2 == manager.pool.size == manager.slots.taken)
    assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok


@pytest.mark.parametrize("key", ["", "one-time"])
def test_one_that_is_lost_at_the_claim_was_nobody_s(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The session is written down while the sandbox locks itself down; if that dies, it never was."""
    manager = warmed(make_manager(pool=WARM))
    lost: list[str] = []
    written: list[int] = []
    claim = NativeWarm.claim

    def dies(
        warm: NativeWarm, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> NativeSandbox:
        if lost:
            return claim(warm, spec, meanwhile)
        lost.append(warm.id)

        def then_kill() -> None:
            assert meanwhile is not None
            meanwhile()
            written.append(len(manager.store.sessions(owner="ann")))
            raise SandboxLost("it was killed as it locked itself down")

        return claim(warm, spec, then_kill)

    monkeypatch.setattr(NativeWarm, "claim", dies)

    lease = manager.acquire(options=AcquireOptions(key=key), client_id="ann")

    # Who asks again under a key is not to hear of what never came to be.
    assert [0 if key else 1] == written
    assert [lease.id] == [each.id for each in manager.store.sessions(owner="ann")]
    of_lost = manager.store.sandbox(lost[0])
    assert of_lost is not None
    assert ("", "ended") == (of_lost.owner, of_lost.phase)
    assert lease.sandbox.exec(["true"]).ok
    assert until(lambda: 2 == manager.pool.size)
    assert 3 == manager.slots.taken


def test_warm_ones_make_room_for_clients(make_manager: MakeManager) -> None:
    manager = warmed(make_manager(pool=WARM, max_sandboxes=3))
    other = SandboxSpec(user="nobody")  # fits none that is warm

    leases = [manager.acquire(other, client_id="ann") for _ in range(3)]

    assert 3 == manager.slots.taken == manager.stats().active_sandboxes
    assert 0 == manager.pool.size
    with pytest.raises(ResourceExhausted) as refusal:
        manager.acquire(client_id="bob")
    assert refusal.value.retryable
    assert 1 == manager.stats().refused
    leases[0].release()
    assert manager.acquire(client_id="bob").sandbox.exec(["true"]).ok


def test_who_waits_gets_the_next_one(make_manager: MakeManager) -> None:
    manager = make_manager(max_sandboxes=1, max_waiting=1, wait_s=20)
    lease = manager.acquire(client_id="ann")
    with ThreadPoolExecutor(1) as hands:
        waiting = hands.submit(manager.acquire, client_id="bob")
        assert until(lambda: 1 == manager.stats().waiting)
        with pytest.raises(ResourceExhausted):
            manager.acquire(client_id="eve")

        lease.release()

        assert waiting.result(20).sandbox.exec(["true"]).ok


def test_a_draining_manager_makes_nothing_new_and_ends_nothing(make_manager: MakeManager) -> None:
    """A claim takes no slot: a warm sandbox must be gone before anybody may believe that none is left."""
    manager = warmed(make_manager(pool=WARM, max_sandboxes=4, max_waiting=1, wait_s=20))
    lease = manager.acquire(client_id="ann")

    assert not liveness.drain(manager, draining=True)

    assert until(lambda: not liveness.drain(manager, draining=True) and not manager.pool.size)
    with pytest.raises(ResourceExhausted, match="drains"):
        manager.acquire(client_id="bob")
    assert lease.sandbox.exec(["true"]).ok
    lease.release()
    assert until(lambda: liveness.drain(manager, draining=True))
    assert not liveness.drain(manager, draining=False)
    assert manager.acquire(client_id="bob").sandbox.exec(["true"]).ok


def test_what_is_warm_survives_the_zygote_s_end_as_new_ones(
    make_manager: MakeManager, tmp_path: Path
) -> None:
    backend = NativeBackend(state_dir=str(tmp_path))
    try:
        manager = warmed(make_manager(backends=(backend,), pool=WARM, cleanup_interval_s=0.1))
        lease = manager.acquire(client_id="ann")
        os.kill(backend.zygote().pid, signal.SIGKILL)

        assert until(lambda: "lost" == manager.get(lease.id).reason)
        assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok
        assert until(lambda: 2 == manager.pool.size)
        manager.close()
    finally:
        backend.close()


@pytest.mark.full
def test_many_clients_at_once(make_manager: MakeManager) -> None:
    """No sandbox is given out twice, every count is right in the end, and nothing is left."""
    manager = make_manager(pool=PoolConfig(min_warm=4, max_warm=8), max_sandboxes=40)
    lock, whose = threading.Lock(), dict[str, str]()
    wrong: list[str] = []

    def work(number: int) -> None:
        client = f"client-{number % 6}"
        for turn in range(8):
            lease = manager.acquire(SandboxSpec(env={"ME": client}), client_id=client)
            with lock:
                if whose.setdefault(lease.session.sandbox_id, lease.id) != lease.id:
                    wrong.append(lease.session.sandbox_id)
            if lease.sandbox.shell("cat mine 2>/dev/null; echo $ME > mine; cat mine").text != (
                client + "\n"
            ):
                wrong.append("dirty")
            if turn % 3 == 0:
                manager.detach(lease.id)
            lease.release(keep_alive=turn % 2 == 0)

    with ThreadPoolExecutor(12) as hands:
        for done in [hands.submit(work, number) for number in range(12)]:
            done.result(120)

    stats = manager.stats()
    assert [] == wrong
    assert (96, 96, 0) == (stats.created, stats.terminated, stats.active_sandboxes)
    assert 96 == stats.pool_hits + stats.pool_misses == len(whose)
    assert until(lambda: manager.slots.taken == manager.pool.size)
    manager.close()
    assert until(lambda: not any(cgroups_of(name) for name in whose))


def test_its_processes_are_its_own(manager: SessionManager) -> None:
    leases = [manager.acquire(client_id="ann") for _ in range(2)]

    assert init_pid(leases[0].sandbox) != init_pid(leases[1].sandbox)
    assert [] == pids_with("no-such-marker")
