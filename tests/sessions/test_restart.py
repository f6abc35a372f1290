"""A manager goes and another one comes: taken over or ended, told truly, nothing left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import SandboxSpec
from ringfence.backends.local.host.owner import start_time
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import LifecycleError, StateInUse
from ringfence.model.acquire import AcquireOptions, AttachRequest
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.store.store import FILE
from tests.native.callers import Caller
from tests.native.outside import (
    PATIENCE_S,
    cgroups_of,
    descendants_of,
    pids_with,
    pin,
    survivors,
    until,
)

pytestmark = [pytest.mark.full, pytest.mark.anyone]

BY_HAND = ManagerConfig(pool=PoolConfig(enabled=False))


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state")


# -- a backend that lives on -----------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[NativeBackend]:
    backend = NativeBackend(state_dir=str(tmp_path / "snapshots"))
    yield backend
    backend.close()


def manage(state: str, backend: NativeBackend, **timeouts: Any) -> SessionManager:
    config = ManagerConfig(
        timeouts=SessionTimeouts(**timeouts),
        pool=PoolConfig(enabled=False),
        cleanup_interval_s=0.2,
    )
    return SessionManager(config, state_dir=state, backends=[backend])


def test_sandboxes_that_live_on_are_taken_over(state: str, kept: NativeBackend) -> None:
    first = manage(state, kept)
    options = AcquireOptions(key="k", metadata={"a": "b"})
    lease = first.acquire(SandboxSpec(labels={"x": "y"}), options, client_id="ann")
    other = first.acquire(client_id="bob")
    first.detach(other.id)
    lease.sandbox.files.write("note", b"before")
    process = lease.sandbox.start(["sh", "-c", "echo one; read x; echo two"], stream_stdin=True)
    before = lease.session
    first.close(keep=True)

    with manage(state, kept) as second:
        after = second.get(lease.id)
        assert (before.sandbox_id, "ann", "active") == (
            after.sandbox_id,
            after.client_id,
            after.state,
        )
        assert (before.created_at, {"a": "b"}) == (after.created_at, after.metadata)
        assert "detached" == second.get(other.id).state
        sandbox = second.sandbox(lease.id)
        assert b"before" == sandbox.files.read("note")
        assert (
            lease.id == second.acquire(SandboxSpec(labels={"x": "y"}), options, client_id="ann").id
        )  # under its key
        assert other.id == second.attach(AttachRequest(other.session.sandbox_id, "bob")).id
        assert 2 == second.stats().active_sandboxes == second.slots.taken

        # What ran before runs on, and none of its output is lost.
        assert process.stdin is not None
        process.stdin.write(b"\n")
        assert b"one\ntwo\n" == process.wait(20).stdout

        second.terminate(lease.id)
        assert until(lambda: [] == cgroups_of(lease.session.sandbox_id))


def test_expiry_goes_on_counting_while_nobody_manages(state: str, kept: NativeBackend) -> None:
    first = manage(state, kept, idle_s=1.0)
    idle = first.acquire(client_id="ann")
    short = first.acquire(
        SandboxSpec(ttl_s=1.0),
        AcquireOptions(timeouts=SessionTimeouts(idle_s=None)),
        client_id="ann",
    )
    longer = first.acquire(
        SandboxSpec(ttl_s=600),
        AcquireOptions(timeouts=SessionTimeouts(idle_s=600)),
        client_id="ann",
    )
    left = longer.session.expires_in_s
    assert left is not None
    first.close(keep=True)
    time.sleep(1.2)

    with manage(state, kept, idle_s=1.0) as second:
        assert until(lambda: "idle" == second.get(idle.id).reason)
        assert until(lambda: "ttl" == second.get(short.id).reason)
        after = second.get(longer.id)
        assert "active" == after.state
        assert after.expires_in_s is not None
        assert left - 60 < after.expires_in_s < left - 1.1
        assert 2 == second.stats().timeout_destroys


def test_what_ended_meanwhile_has_ended(state: str, kept: NativeBackend) -> None:
    first = manage(state, kept)
    lease = first.acquire(client_id="ann")
    first.close(keep=True)
    kept.adopt(lease.session.sandbox_id).terminate()  # type: ignore[union-attr]

    with manage(state, kept) as second:
        assert ("terminated", "restart") == (
            second.get(lease.id).state,
            second.get(lease.id).reason,
        )
        assert [] == second.list()
        assert 0 == second.slots.taken


# -- a process that is gone ------------------------------------------------------------------------

_PRELUDE = """
from ringfence import SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.backends.native.prebuilt.prewarming import NativeWarm
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions import ManagerConfig, PoolConfig, SessionManager
from ringfence.sessions.catalogue.index import SessionIndex
from ringfence.store.store import Store
state, step, marker = sys.argv[1:]

def halt():
    say(["halted", os.getpid()])
    signal.pause()

def halting(cls, name, when):
    whole, calls = getattr(cls, name), []
    def call(self, *args, **options):
        calls.append(1)
        is_it = len(calls) == 1
        if is_it and when == "before":
            halt()
        result = whole(self, *args, **options)
        if is_it and when == "after":
            halt()
        return result
    setattr(cls, name, call)

def open_manager(warm=0):
    pool = PoolConfig(enabled=bool(warm), min_warm=warm, max_warm=max(10, warm))
    return SessionManager(ManagerConfig(pool=pool), state_dir=state, background=False)

def busy(manager):
    lease = manager.acquire(client_id="ann")
    lease.sandbox.start(["sh", "-c", f"setsid sleep {marker} & sleep {marker}"])
    return lease

"""
_ONE = "m = open_manager(); l = busy(m); "
_WARM = "m = open_manager(2); m.fill_pool(); "


def halting(what: str, when: str) -> str:
    """Code that halts before or after the next call of a method."""
    cls, _, name = what.partition(".")
    return f"halting({cls}, {name!r}, {when!r}); "


def creating(what: str, when: str) -> str:
    """The same while a sandbox is made; the backend's report, which makes some, is there by then."""
    return f"m = open_manager(); m.maker.report('native'); {halting(what, when)}busy(m)"


STEPS: dict[str, str] = {
    "create: before it is written down": creating("Store.add_sandbox", "before"),
    "create: written down": creating("Store.add_sandbox", "after"),
    "create: before the backend": creating("NativeBackend.provision", "before"),
    "create: made": creating("NativeBackend.provision", "after"),
    "create: before the session": creating("Store.add_session", "before"),
    "create: in the transaction": creating("Store.add_session", "after"),
    "create: committed": creating("SessionIndex.enter", "before"),
    "create: in the index": creating("SessionIndex.enter", "after"),
    "exec: before": creating("NativeSandbox.start", "before"),
    "exec: runs": _ONE + "halt()",
    "exec: many run": "m = open_manager(); [busy(m) for _ in range(5)]; halt()",
    "prewarm: before": halting("NativeBackend.prewarm", "before") + _WARM,
    "prewarm: made": halting("NativeBackend.prewarm", "after") + _WARM,
    "prewarm: two are warm": _WARM + "halt()",
    "claim: before": _WARM + halting("NativeWarm.claim", "before") + "busy(m)",
    "claim: claimed": _WARM + halting("NativeWarm.claim", "after") + "busy(m)",
    "claim: before the session": _WARM + halting("Store.add_session", "before") + "busy(m)",
    "claim: leased": _WARM + "busy(m); halt()",
    "suspend: before": _ONE + halting("NativeSandbox.suspend", "before") + "m.suspend(l.id)",
    "suspend: frozen": _ONE + halting("NativeSandbox.suspend", "after") + "m.suspend(l.id)",
    "suspend: suspended": _ONE + "m.suspend(l.id); halt()",
    "resume: thawed": _ONE
    + "m.suspend(l.id); "
    + halting("NativeSandbox.resume", "after")
    + "m.resume(l.id)",
    "snapshot: before": _ONE + halting("NativeSandbox.snapshot", "before") + "l.sandbox.snapshot()",
    "snapshot: saved": _ONE + halting("NativeSandbox.snapshot", "after") + "l.sandbox.snapshot()",
    "detach: detached": _ONE + "m.detach(l.id); halt()",
    "delete: before": _ONE + halting("NativeSandbox.terminate", "before") + "m.terminate(l.id)",
    "delete: gone": _ONE + halting("NativeSandbox.terminate", "after") + "m.terminate(l.id)",
    "delete: unwritten": _ONE + halting("Store.change_sandbox", "before") + "m.terminate(l.id)",
    "delete: half written": _ONE + halting("Store.change_sandbox", "after") + "m.terminate(l.id)",
    "delete: written": _ONE + halting("SessionIndex.leave", "before") + "m.terminate(l.id)",
    "delete: done": _ONE + "m.terminate(l.id); halt()",
    "closing: half way": _WARM
    + "l = busy(m); "
    + halting("NativeSandbox.terminate", "after")
    + "m.close()",
}
"""Label to code: thirty-two moments at which the process is killed."""


def records(state: str) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(Path(state) / FILE)
    try:
        return connection.execute(
            "SELECT b.id, b.phase, coalesce(s.id, ''), coalesce(s.state, '')"
            " FROM sandboxes b LEFT JOIN sessions s ON s.sandbox = b.id"
        ).fetchall()
    finally:
        connection.close()


def assert_nothing_is_left(state: str, marker: str, family: dict[int, int]) -> None:
    """Of any sandbox that was ever written down; and every one was, before it was made."""
    assert [] == survivors(family, PATIENCE_S)
    assert [] == pids_with(marker)
    for sandbox_id, *_ in records(state):
        assert [] == cgroups_of(sandbox_id)


@pytest.mark.anyone
@pytest.mark.parametrize("label", STEPS)
def test_killed_at(label: str, state: str) -> None:
    marker = f"6{os.getpid():07d}{list(STEPS).index(label):04d}"
    with Caller(_PRELUDE + STEPS[label], state, label, marker) as caller:
        assert ["halted", caller.pid] == caller.hear(60)
        family = pin(descendants_of(caller.pid))
        before = records(state)
        assert before or label.startswith("create: before it is written")

        caller.kill(signal.SIGKILL)
    with SessionManager(BY_HAND, state_dir=state, background=False) as manager:
        assert_nothing_is_left(state, marker, family)
        assert [] == manager.list() == manager.store.unended_sandboxes()
        assert 0 == manager.slots.taken
        for _sandbox, _phase, session, _state in records(state):
            if session:
                seen = manager.get(session)
                assert "terminated" == seen.state
                assert seen.reason in ("restart", "terminated", "closed")
                with pytest.raises(LifecycleError):
                    manager.sandbox(session)
        lease = manager.acquire(client_id="ann")
        assert lease.sandbox.exec(["true"]).ok
        assert lease.session.sandbox_id not in {row[0] for row in before}


def test_the_zygote_was_stopped_and_cannot_end_by_itself(state: str) -> None:
    """Nor can its frozen sandbox, after their manager was killed; the next manager sees to both."""
    marker = f"61{os.getpid():07d}"
    code = _ONE + "from time import sleep; sleep(0.2); m.suspend(l.id); halt()"
    with Caller(_PRELUDE + code, state, "", marker) as caller:
        caller.hear()
        assert until(lambda: 2 == len(pids_with(marker)))
        (zygote,) = [pid for pid in descendants_of(caller.pid) if is_zygote(pid, caller.pid)]
        family, pinned = pin(descendants_of(caller.pid)), os.pidfd_open(zygote)
        os.kill(zygote, signal.SIGSTOP)
        try:
            caller.kill(signal.SIGKILL)
            poll = select.poll()
            poll.register(pinned, select.POLLIN)
            # Its sandbox may be: whoever starts first on this machine clears up after dead ones.
            assert not poll.poll(1500), "the control: nothing else ends it"

            with SessionManager(BY_HAND, state_dir=state, background=False) as manager:
                assert_nothing_is_left(state, marker, family)
                assert "restart" == manager.get(records(state)[0][2]).reason
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pinned, signal.SIGKILL)
            os.close(pinned)


def is_zygote(pid: int, parent: int) -> bool:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return False  # it ended while we looked
    return name.endswith("(ringfence") and parent == int(rest.split()[1])


def test_a_pid_that_is_somebody_else_s_is_left_alone(state: str) -> None:
    """An anchor names a process for good: not whoever has its number now."""
    with Caller("say(); listen()") as bystander:
        bystander.hear()
        with SessionManager(BY_HAND, state_dir=state, background=False) as manager:
            anchor = manager.store.anchors
            boot = manager.clock.boot
            from ringfence.store.records import Anchor

            started = start_time(bystander.pid)
            manager.not_ours.append("so that anchors are kept")
            manager.store.add_anchor(Anchor("native", bystander.pid, started + 1, boot))
            manager.store.add_anchor(Anchor("native", bystander.pid, started, "another boot"))
            assert 2 == len(anchor())

        SessionManager(BY_HAND, state_dir=state, background=False).close()

        assert bystander.process.poll() is None


def test_the_directory_is_held_until_the_manager_is_killed(state: str) -> None:
    code = "busy(open_manager()); halt()"
    with Caller(_PRELUDE + code, state, "", "62") as caller:
        caller.hear()
        with pytest.raises(StateInUse):
            SessionManager(state_dir=state)
        caller.kill()
    SessionManager(BY_HAND, state_dir=state, background=False).close()


def test_another_boot_means_that_all_is_gone(state: str) -> None:
    manager = SessionManager(BY_HAND, state_dir=state, background=False)
    lease = manager.acquire(client_id="ann")
    manager.close()
    connection = sqlite3.connect(Path(state) / FILE)
    connection.execute("UPDATE sandboxes SET phase = 'live', boot = 'another', reason = ''")
    connection.execute("UPDATE sessions SET state = 'active', boot = 'another', reason = ''")
    connection.commit()
    connection.close()

    with SessionManager(BY_HAND, state_dir=state, background=False) as again:
        assert ("terminated", "restart") == (again.get(lease.id).state, again.get(lease.id).reason)


def test_what_another_backend_left_is_told_and_left(state: str) -> None:
    from tests.unconfined import Unconfined

    backend = Unconfined()
    manager = SessionManager(BY_HAND, state_dir=state, backends=[backend], background=False)
    lease = manager.acquire(client_id="ann")
    manager.close(keep=True)
    backend.close()

    with SessionManager(BY_HAND, state_dir=state, background=False) as native:
        assert [lease.session.sandbox_id] == native.not_ours
        health = native.health()
        assert not health.ok
        assert lease.session.sandbox_id in str(health.checks)
    with SessionManager(
        BY_HAND, state_dir=state, backends=[Unconfined()], background=False
    ) as again:
        assert "restart" == again.get(lease.id).reason
        assert again.health().ok
