"""Whatever fails on the way to a sandbox, all that was taken for it is given back: each step fails once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.errors import IoError, SandboxLost, Unsupported
from ringfence.model.acquire import AcquireOptions, RequiredCapabilities
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.testing.unconfined.backend import UnconfinedPrebuilt
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox

pytestmark = pytest.mark.anyone

MOST = 3
ERRORS = (
    IoError("the disk is full"),
    Unsupported("not here"),
    SandboxLost("gone"),
    ValueError("x"),
)
QUICK = ERRORS[::3]
"""One that clients are told, and one that is a fault."""
FRESH = AcquireOptions(key="k", use_pool=False, required=RequiredCapabilities(write_access=True))


@pytest.fixture
def backend() -> Iterator[Unconfined]:
    made = Unconfined()
    yield made
    made.close()


@pytest.fixture
def manager(backend: Unconfined) -> Iterator[SessionManager]:
    pool = PoolConfig(min_warm=1, max_warm=MOST)
    config = ManagerConfig(
        max_sandboxes=MOST, max_waiting=0, wait_s=0.0, max_of_client=1, pool=pool
    )
    with SessionManager(config, backends=[backend], background=False, clock=FakeClock()) as made:
        yield made


def held(manager: SessionManager, backend: Unconfined) -> dict[str, int]:
    """Everything that is taken while there is a sandbox, counted."""
    index, store = manager.index, manager.store
    return {
        "slots": manager.slots.taken,
        "callers that wait": manager.slots.waiting,
        "sandboxes": len(backend.sandboxes),
        "warm ones": len(backend.prebuilt),
        "unended records": len(store.unended_sandboxes()),
        "sessions": len(store.sessions(states=("active", "detached", "suspended"))),
        "entries": len(index._sessions) + len(index._sandboxes) + len(index._keys),
        "shares": index._of_client.total() + len(index._making),
        "clients that are counted": len(index._of_client),
        "turns": len(manager.keys._turns),
        "undying": len(manager.maker.undying),
        "on the shelf": manager.pool.size,
        "being built": manager.pool._building.total(),
        "snapshots": len(backend.saved),
        "records of snapshots": len(store.snapshots()),
        "threads": threading.active_count(),
    }


class Way:
    """One thing that a manager does: what must be there first, and the steps that can fail."""

    def prepare(self, manager: SessionManager) -> None:
        """Nothing is needed."""

    def act(self, manager: SessionManager) -> None:
        raise NotImplementedError


class Create(Way):
    steps = (
        ("store", "add_sandbox"),
        ("backend", "provision"),
        ("store", "change_sandbox"),
        ("store", "add_session"),
        ("index", "enter"),
        ("manager", "capabilities"),
    )

    def act(self, manager: SessionManager) -> None:
        manager.acquire(options=FRESH, client_id="ann")


class Restore(Way):
    steps = (("store", "snapshot"), ("backend", "restore"), ("store", "add_session"))
    snapshot = ""

    def prepare(self, manager: SessionManager) -> None:
        with manager.acquire(client_id="ann") as lease:
            self.snapshot = manager.snapshot(lease.id).id

    def act(self, manager: SessionManager) -> None:
        manager.acquire(options=AcquireOptions(snapshot_id=self.snapshot), client_id="ann")


class Claim(Way):
    steps = (
        ("warm", "fits"),
        ("warm", "claim"),
        ("backend", "provision"),
        ("store", "add_session"),
        ("index", "enter"),
    )

    def prepare(self, manager: SessionManager) -> None:
        manager.fill_pool()

    def act(self, manager: SessionManager) -> None:
        try:
            manager.acquire(client_id="ann")
        finally:
            manager.clock.pass_by(100.0)  # type: ignore[attr-defined]
            manager.fill_pool()  # one that was claimed in vain is gone, and another is there


class BuildAhead(Way):
    steps = (("store", "add_sandbox"), ("backend", "prewarm"), ("clock", "wall"))

    def act(self, manager: SessionManager) -> None:
        manager.clock.pass_by(100.0)  # type: ignore[attr-defined]
        manager.fill_pool()


class TakeSnapshot(Way):
    steps = (("sandbox", "snapshot"), ("store", "add_snapshot"))

    def prepare(self, manager: SessionManager) -> None:
        self.session = manager.acquire(client_id="ann").id

    def act(self, manager: SessionManager) -> None:
        manager.snapshot(self.session)


def fail_once(
    manager: SessionManager, step: tuple[str, str], error: Exception, patch: pytest.MonkeyPatch
) -> list[str]:
    """Have one step fail the first time that it is taken; the list says whether it was."""
    where, method = step
    others = {"manager": manager, "backend": manager.maker.backends["unconfined"]}
    others |= {"warm": UnconfinedPrebuilt, "sandbox": UnconfinedSandbox}
    target: Any = others.get(where) or getattr(manager, where)
    original = getattr(target, method)
    taken: list[str] = []

    def once(*args: Any, **options: Any) -> Any:
        if not taken:
            taken.append(method)
            raise error
        return original(*args, **options)

    patch.setattr(target, method, once)
    return taken


WAYS: tuple[type[Any], ...] = (Create, Restore, Claim, BuildAhead, TakeSnapshot)
STEPS = [(way, step) for way in WAYS for step in way.steps]


@pytest.mark.parametrize(
    "error",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.full) for each in ERRORS],
    ids=[type(each).__name__ for each in ERRORS],
)
@pytest.mark.parametrize(
    ("way", "step"), STEPS, ids=[f"{way.__name__}-{'.'.join(step)}" for way, step in STEPS]
)
def test_what_was_taken_is_given_back(
    manager: SessionManager,
    backend: Unconfined,
    way: type[Any],
    step: tuple[str, str],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doing = way()
    doing.prepare(manager)
    before = held(manager, backend)

    taken = fail_once(manager, step, error, monkeypatch)
    try:
        doing.act(manager)
    except type(error):
        pass
    else:
        for session in manager.list():  # it was made otherwise
            manager.release(session.session_id)
    assert taken
    assert before == held(manager, backend)

    doing.act(manager)  # and so it can be done again
