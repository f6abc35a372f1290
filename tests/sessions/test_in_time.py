"""Sessions end in time, and never while they are in use: real processes, real clocks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import pytest

from ringfence import SandboxSpec
from ringfence.errors import LifecycleError, SandboxLost
from ringfence.model.acquire import AcquireOptions
from ringfence.model.client_session import SessionTimeouts
from ringfence.model.limits import Limits
from ringfence.sessions.lease import Lease
from ringfence.sessions.manager import SessionManager
from tests.native.outside import PATIENCE_S, cgroups_of, init_pid, pin, survivors, until
from tests.sessions.conftest import MakeManager

pytestmark = pytest.mark.anyone

IDLE_S = 0.6
SPIN = ["/usr/bin/python3", "-I", "-S", "-c", "while True: pass"]


def is_over(lease: Lease) -> bool:
    return "terminated" == lease.session.state


def stays(lease: Lease, seconds: float) -> bool:
    """Whether the session lives for all of that time. It must be waited out: nothing announces it."""
    return not until(lambda: is_over(lease), seconds)


def test_an_idle_one_ends_and_nothing_is_left(make_manager: MakeManager) -> None:
    manager = make_manager(idle_s=IDLE_S)
    lease = manager.acquire(client_id="ann")
    lease.sandbox.shell("setsid sleep 600 >/dev/null 2>&1 &")  # a daemon that does nothing
    pinned = pin([init_pid(lease.sandbox)])
    began = time.monotonic()

    assert until(lambda: is_over(lease))

    assert time.monotonic() - began >= IDLE_S - 0.01
    assert "idle" == lease.session.reason == manager.get(lease.id).reason
    assert [] == survivors(pinned, PATIENCE_S)
    assert until(lambda: not cgroups_of(lease.session.sandbox_id))
    assert until(lambda: 0 == manager.slots.taken)
    stats = manager.stats()
    assert (1, 1, 0) == (stats.timeout_destroys, stats.terminated, stats.active_sandboxes)


def test_a_running_exec_is_use(make_manager: MakeManager) -> None:
    lease = make_manager(idle_s=IDLE_S).acquire(client_id="ann")
    process = lease.sandbox.start(["sleep", "600"])

    assert stays(lease, 3 * IDLE_S)
    process.kill()

    assert until(lambda: is_over(lease))


@pytest.mark.parametrize("how", ["open_read", pytest.param("open_write", marks=pytest.mark.full)])
def test_an_open_file_is_use(make_manager: MakeManager, how: str) -> None:
    lease = make_manager(idle_s=IDLE_S).acquire(client_id="ann")
    lease.sandbox.files.write("note", b"text")
    with getattr(lease.sandbox.files, how)("note"):
        assert stays(lease, 3 * IDLE_S)

    assert until(lambda: is_over(lease))


@pytest.mark.full
def test_processor_time_is_use(make_manager: MakeManager) -> None:
    """Of a process that nobody watches: its exec is long over."""
    lease = make_manager(idle_s=IDLE_S).acquire(client_id="ann")
    lease.sandbox.shell(f"setsid {SPIN[0]} -c 'while True: pass' >/dev/null 2>&1 &")

    assert stays(lease, 4 * IDLE_S)
    lease.sandbox.shell("pkill -f 'while True' || kill -9 -1")

    assert until(lambda: is_over(lease))


@pytest.mark.full
def test_touching_is_use(make_manager: MakeManager) -> None:
    manager = make_manager(idle_s=2.0)
    lease = manager.acquire(client_id="ann")
    for _ in range(10):
        time.sleep(0.25)
        manager.touch(lease.id)

    assert not is_over(lease)
    assert until(lambda: is_over(lease))


def test_a_session_s_own_timeouts(make_manager: MakeManager) -> None:
    manager = make_manager(idle_s=600)
    timeouts = SessionTimeouts(idle_s=IDLE_S)
    by_option = manager.acquire(options=AcquireOptions(timeouts=timeouts), client_id="ann")
    limits = Limits(idle_timeout_s=IDLE_S)
    by_spec = manager.acquire(SandboxSpec(limits=limits), client_id="ann")
    neither = manager.acquire(client_id="ann")

    assert until(lambda: is_over(by_option) and is_over(by_spec))
    assert not is_over(neither)
    assert IDLE_S == by_spec.session.timeouts.idle_s


def test_for_ever(make_manager: MakeManager) -> None:
    lease = make_manager(idle_s=None, cleanup_interval_s=0.05).acquire(client_id="ann")

    assert stays(lease, 1.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "then", "reason"),
    [("suspend", "suspended", "suspended"), ("detach", "detached", "detached")],
)
def test_what_becomes_of_an_idle_one(
    make_manager: MakeManager, action: str, then: str, reason: str
) -> None:
    manager = make_manager(idle_s=IDLE_S, on_idle=action, detach_s=1.0, suspend_s=1.0)
    lease = manager.acquire(client_id="ann")

    assert until(lambda: then == lease.session.state)
    assert 0 == manager.stats().timeout_destroys
    assert until(lambda: is_over(lease))

    assert reason == lease.session.reason
    assert 1 == manager.stats().timeout_destroys


def test_a_detached_one_runs_on_and_ends_in_its_own_time(make_manager: MakeManager) -> None:
    manager = make_manager(idle_s=0.2, detach_s=IDLE_S)
    lease = manager.acquire(client_id="ann")
    process = lease.sandbox.start(["sh", "-c", "sleep 1.5; echo done > proof"])
    manager.detach(lease.id)

    process.wait(PATIENCE_S)

    assert b"done\n" == lease.sandbox.files.read("proof")
    assert until(lambda: is_over(lease))
    assert "detached" == lease.session.reason


def test_a_suspended_one_stands_still(make_manager: MakeManager) -> None:
    manager = make_manager(idle_s=0.3, suspend_s=600)
    lease = manager.acquire(client_id="ann")
    lease.sandbox.shell(
        "setsid sh -c 'while :; do echo x >> ticks; sleep 0.02; done' >/dev/null 2>&1 &"
    )
    assert until(lambda: lease.sandbox.files.exists("ticks"))
    manager.suspend(lease.id)
    assert "suspended" == manager.suspend(lease.id).state  # twice is once
    with pytest.raises(LifecycleError):
        lease.sandbox.exec(["true"])
    with pytest.raises(LifecycleError):
        manager.detach(lease.id)
    time.sleep(1.0)  # far beyond idle_s

    assert "active" == manager.resume(lease.id).state
    before = len(lease.sandbox.files.read("ticks"))
    assert until(lambda: len(lease.sandbox.files.read("ticks")) > before)


@pytest.mark.full
def test_the_time_to_live_is_absolute(make_manager: MakeManager) -> None:
    manager = make_manager()
    lease = manager.acquire(SandboxSpec(ttl_s=1.0), client_id="ann")
    process = lease.sandbox.start(["sleep", "600"])
    longer = manager.acquire(SandboxSpec(ttl_s=3.0), client_id="ann")
    manager.extend(longer.id, 600)

    assert "terminate" == process.wait(PATIENCE_S).killed_by
    assert until(lambda: is_over(lease))
    assert "ttl" == lease.session.reason
    assert stays(longer, 3.0)
    manager.extend(longer.id, 0.1)
    assert until(lambda: is_over(longer))


def test_what_goes_away_by_itself_is_lost(make_manager: MakeManager) -> None:
    manager = make_manager(cleanup_interval_s=600)
    lease = manager.acquire(client_id="ann")
    other = manager.acquire(client_id="ann")

    os.kill(init_pid(lease.sandbox), signal.SIGKILL)

    assert until(lambda: ["lost"] == [manager.get(lease.id).reason])
    assert [other.id] == [session.session_id for session in manager.list()]
    assert (1, 1) == (manager.stats().lost, manager.slots.taken)
    with pytest.raises((SandboxLost, LifecycleError)):
        lease.sandbox.exec(["true"])
    assert "lost" == manager.terminate(lease.id).reason


def test_the_sandbox_s_own_verbs_are_the_session_s(manager: SessionManager) -> None:
    lease = manager.acquire(client_id="ann")

    lease.sandbox.suspend()
    assert "suspended" == lease.session.state
    lease.sandbox.resume()
    assert "active" == lease.session.state
    lease.sandbox.terminate()
    assert ("terminated", "terminated") == (lease.session.state, lease.session.reason)
    assert 0 == manager.slots.taken


def test_nobody_waits_for_one_that_is_stuck(make_manager: MakeManager) -> None:
    """Somebody holds a session's lock for as long as it likes: expiry of the others goes on."""
    manager = make_manager(idle_s=600.0)
    soon = SessionTimeouts(idle_s=IDLE_S)
    stuck = [manager.acquire(client_id="ann") for _ in range(2)]
    held, go = threading.Barrier(len(stuck) + 1), threading.Event()

    def hold(live: Any) -> None:
        with live.lock:
            held.wait(60)
            go.wait(60)

    holders = [threading.Thread(target=hold, args=(lease._live,)) for lease in stuck]
    for holder in holders:
        holder.start()
    held.wait(60)
    for lease in stuck:  # only now: on a busy machine they would else be over before they are held
        lease._live.timeouts = soon
        manager.reaper.expect(lease._live)
    options = AcquireOptions(timeouts=soon)
    others = [manager.acquire(options=options, client_id="bob") for _ in range(4)]
    try:
        assert until(lambda: all(is_over(lease) for lease in others))
        assert not any(is_over(lease) for lease in stuck)
    finally:
        go.set()
    for holder in holders:
        holder.join()
    assert until(lambda: all(is_over(lease) for lease in stuck))


def test_what_has_ended_is_not_kept_in_memory(manager: SessionManager) -> None:
    """Not even until it would have been looked at: many short lives must not add up."""
    lease = manager.acquire(client_id="ann")
    kept = weakref.ref(lease._live)
    lease.release()
    del lease
    gc.collect()

    assert kept() is None
