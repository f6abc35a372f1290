"""Many threads, full disks, closing in the middle: every count is right in the end."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence import AsyncSandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import IsolationError, LifecycleError, RingfenceError
from ringfence.model.acquire import AcquireOptions, AttachRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.features import require
from tests.native.callers import Caller
from tests.native.outside import PATIENCE_S, cgroups_of, descendants_of, pin, survivors, until
from tests.sessions.conftest import MakeManager
from tests.sessions.test_restart import BY_HAND, records
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

NOTHING = PoolConfig(enabled=False)


def test_one_key_at_once_makes_one_session(manager: SessionManager) -> None:
    barrier = threading.Barrier(10)

    def ask(_: int) -> tuple[str, bool]:
        barrier.wait(PATIENCE_S)
        lease = manager.acquire(options=AcquireOptions(key="k"), client_id="ann")
        return lease.id, lease.newly_created

    with ThreadPoolExecutor(10) as hands:
        found = list(hands.map(ask, range(10)))

    assert 1 == len({session for session, _ in found})
    assert 1 == sum(new for _, new in found)
    assert 1 == manager.slots.taken == manager.stats().created


def test_one_id_at_once_is_one_clients(manager: SessionManager) -> None:
    barrier = threading.Barrier(10)

    def ask(number: int) -> str:
        barrier.wait(PATIENCE_S)
        request = AttachRequest("the-box", f"client-{number % 5}", create_if_missing=True)
        try:
            return manager.attach(request).session.client_id
        except RingfenceError as error:
            return error.code

    with ThreadPoolExecutor(10) as hands:
        found = list(hands.map(ask, range(10)))

    (owner,) = set(found) - {"sandbox_not_found"}
    assert 2 == found.count(owner)
    assert until(lambda: 1 == manager.slots.taken)
    assert owner == manager.get("the-box").client_id


def test_ended_by_many_it_ends_once(manager: SessionManager) -> None:
    lease = manager.acquire(client_id="ann")
    barrier = threading.Barrier(8)

    def end(number: int) -> str:
        barrier.wait(PATIENCE_S)
        verb = (manager.terminate, manager.release)[number % 2]
        return verb(lease.id).state

    with ThreadPoolExecutor(8) as hands:
        assert {"terminated"} == set(hands.map(end, range(8)))

    assert 1 == manager.stats().terminated
    assert 0 == manager.slots.taken
    assert until(lambda: [] == cgroups_of(lease.session.sandbox_id))


def test_every_verb_at_once_on_one_session(manager: SessionManager) -> None:
    """Whatever the order, the session and its sandbox agree in the end."""
    lease = manager.acquire(client_id="ann")
    verbs = (manager.suspend, manager.resume, manager.detach, manager.touch)

    def hammer(number: int) -> None:
        chosen = random.Random(number)
        for _ in range(25):
            try:
                chosen.choice(verbs)(lease.id)
            except LifecycleError:
                continue

    with ThreadPoolExecutor(6) as hands:
        list(hands.map(hammer, range(6)))

    state = manager.resume(lease.id).state
    assert "active" == state
    assert lease.sandbox.exec(["true"]).ok
    assert {state} == {record.state for record in manager.store.sessions()}


def test_closing_while_clients_come(native: NativeBackend) -> None:
    """Whoever gets a lease, or does not: nothing is left of it."""
    before = set(native._live) | set(native.prewarming.ids())
    manager = SessionManager(
        ManagerConfig(max_sandboxes=6, max_waiting=50, pool=PoolConfig(min_warm=1, max_warm=2)),
        backends=[native],
    )
    begun = threading.Semaphore(0)

    def come(number: int) -> None:
        while True:
            try:
                lease = manager.acquire(client_id=f"client-{number}")
                begun.release()
                lease.sandbox.exec(["true"])
                lease.release()
            except (LifecycleError, RingfenceError) as error:
                if error.code == "lifecycle" and "closed" in str(error):
                    return

    with ThreadPoolExecutor(10) as hands:
        coming = [hands.submit(come, number) for number in range(10)]
        for _ in range(10):
            begun.acquire()
        manager.close()
        for each in coming:
            each.result(60)

    assert until(lambda: before >= set(native._live) | set(native.prewarming.ids()))
    assert 0 == manager.slots.taken


def test_a_forked_child_cannot_use_it(tmp_path: Path) -> None:
    """And what it does at its end touches nothing of its parent's."""
    code = """
from ringfence.sessions import SessionManager
from ringfence.errors import LifecycleError
manager = SessionManager(state_dir=sys.argv[1])
lease = manager.acquire(client_id="ann")
child = os.fork()
if child == 0:
    status = 1
    try:
        manager.acquire(client_id="bob")
    except LifecycleError as exc:
        status = 0 if "after fork" in str(exc) else 2
    manager.close()
    os._exit(status)
said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
say([said, lease.sandbox.exec(["echo", "alive"]).text, lease.session.state])
manager.close()
say()
"""
    with Caller(code, tmp_path / "state") as caller:
        assert [0, "alive\n", "active"] == caller.hear()
        assert caller.hear() is None


def test_with_asyncio(manager: SessionManager) -> None:
    lease = manager.acquire(client_id="ann")

    async def run() -> str:
        async with AsyncSandbox(lease.sandbox) as sandbox:
            return (await sandbox.exec(["echo", "hello"])).text

    assert "hello\n" == asyncio.run(run())
    assert "terminated" == lease.session.state


def test_a_backend_that_comes_back_is_asked_again(make_manager: MakeManager) -> None:
    class Moody(Unconfined):
        is_away = True

        def report(self):  # type: ignore[no-untyped-def]
            from dataclasses import replace

            found = super().report()
            return replace(found, available=False, reason="away") if self.is_away else found

    backend = Moody()
    manager = make_manager(backends=(backend,))
    with pytest.raises(RingfenceError) as refusal:
        manager.acquire(client_id="ann")
    assert "away" in str(refusal.value)
    assert not manager.health().ok

    backend.is_away = False

    assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok
    assert manager.health().ok


def test_health_tells_what_is_wrong(make_manager: MakeManager) -> None:
    class Broken(Unconfined):
        def prewarm(self, spec: SandboxSpec):  # type: ignore[no-untyped-def]
            raise IsolationError("no room for the unborn")

    manager = make_manager(backends=(Broken(),), pool=PoolConfig(min_warm=1))

    assert until(lambda: not all(check.ok for check in manager.health().checks))
    health = manager.health()
    (wrong,) = [check for check in health.checks if not check.ok]
    assert ("pool", True) == (wrong.name, "no room for the unborn" in wrong.detail)
    assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok  # cold
    assert health.ok  # for that reason


def test_a_failing_backend_keeps_no_slot(make_manager: MakeManager) -> None:
    class Failing(Unconfined):
        def provision(self, spec: SandboxSpec):  # type: ignore[no-untyped-def]
            raise IsolationError("not today")

    manager = make_manager(backends=(Failing(),))
    for _ in range(5):
        with pytest.raises(IsolationError):
            manager.acquire(client_id="ann")

    assert 0 == manager.slots.taken
    assert [] == manager.store.unended_sandboxes()
    assert 0 == manager.stats().created


# -- a full disk -----------------------------------------------------------------------------------

_FULL = """
import ctypes, tempfile
from tests.unconfined import Unconfined
from ringfence.errors import ResourceExhausted
from ringfence.sessions import ManagerConfig, PoolConfig, SessionManager
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, sys.argv[1].encode())
backend = Unconfined()
config = ManagerConfig(pool=PoolConfig(enabled=False))
manager = SessionManager(config, state_dir=place + "/state", backends=[backend])
old = manager.acquire(client_id="ann")
kept = manager.acquire(client_id="ann")
fill = open(place + "/filler", "wb", buffering=0)
try:
    while True:
        fill.write(b"x" * 4096)
except OSError:
    pass
refused, made = None, []
for number in range(500):
    try:
        made.append(manager.acquire(client_id="ann"))
    except ResourceExhausted as exc:
        refused = exc.to_json()["code"]
        break
ended = manager.terminate(old.id).state
for lease in made:
    lease.release()
is_alone = sorted(backend.sandboxes) == [kept.session.sandbox_id]
counted = [manager.stats().active_sandboxes, manager.slots.taken, is_alone]
# Room for one record, and not for a sandbox.
os.ftruncate(fill.fileno(), fill.tell() - 2 * 4096)
is_well = manager.health().ok
fill.close()
os.unlink(place + "/filler")
again = manager.acquire(client_id="ann").sandbox.exec(["true"]).ok
manager.close()
later = SessionManager(config, state_dir=place + "/state", backends=[Unconfined()])
say([refused, ended, counted, is_well, again, later.get(old.id).state, len(later.store.unended_sandboxes())])
later.close()
libc.umount2(place.encode(), 2)
os.rmdir(place)
say()
"""


def test_a_full_disk_stops_beginnings_and_no_endings() -> None:
    require("user namespaces")
    under = ("unshare", "--user", "--map-root-user", "--mount")
    with Caller(_FULL, "size=600k", under=under) as caller:
        refused, ended, counted, is_well, again, later, unended = caller.hear()
        assert caller.hear() is None  # it has removed what it made

    assert "storage_full" == refused
    assert "terminated" == ended == later
    assert [1, 1, True] == counted
    assert not is_well
    assert again
    assert 0 == unended


# -- killed at any moment --------------------------------------------------------------------------

_BUSY = """
import random
from concurrent.futures import ThreadPoolExecutor
from ringfence import SandboxSpec
from ringfence.errors import RingfenceError
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions import ManagerConfig, PoolConfig, SessionManager
state, seed = sys.argv[1], int(sys.argv[2])
manager = SessionManager(
    ManagerConfig(max_sandboxes=12, pool=PoolConfig(min_warm=2, max_warm=4)), state_dir=state
)

def work(number):
    chosen = random.Random(seed * 100 + number)
    while True:
        try:
            options = AcquireOptions(use_pool=chosen.random() < 0.5)
            lease = manager.acquire(SandboxSpec(env={"A": "1"}), options, client_id=f"c{number}")
            for _ in range(chosen.randrange(4)):
                verb = chosen.choice(["exec", "suspend", "resume", "detach", "snapshot"])
                if verb == "exec":
                    lease.sandbox.start(["sleep", "600"])
                elif verb == "snapshot":
                    lease.sandbox.snapshot()
                else:
                    getattr(manager, verb)(lease.id)
            if chosen.random() < 0.8:
                lease.release(keep_alive=chosen.random() < 0.5)
        except RingfenceError:
            pass

hands = ThreadPoolExecutor(5)
for number in range(5):
    hands.submit(work, number)
say()
listen()
"""


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    state = str(tmp_path / "state")
    with Caller(_BUSY, state, seed) as caller:
        caller.hear()
        time.sleep(random.Random(seed).uniform(0.05, 1.5))
        family = pin(descendants_of(caller.pid))
        caller.kill(signal.SIGKILL)
    with SessionManager(BY_HAND, state_dir=state, background=False) as manager:
        assert [] == survivors(family, PATIENCE_S)
        assert [] == manager.store.unended_sandboxes() == manager.list()
        for sandbox, _phase, session, _state in records(state):
            assert until(lambda sandbox=sandbox: [] == cgroups_of(sandbox))  # type: ignore[misc]
            if session:
                assert "terminated" == manager.get(session).state
        assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok
