"""What threads share is read and changed under its lock: while another has that, nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.held import Held, HeldError, state_of
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec
from ringfence.sessions.admission import Slots
from ringfence.sessions.catalogue.ended import EndedSandboxes
from ringfence.sessions.catalogue.index import SessionIndex
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.counts.statistics import Counters, Durations
from ringfence.sessions.events import Events
from ringfence.sessions.keys import Keys
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.pools.pool import Pool, PooledSandbox
from ringfence.sessions.templates.places import Places
from ringfence.sessions.usage import Use

pytestmark = pytest.mark.anyone


class _Thing:
    closed = False


def _live(number: int) -> Any:
    return SimpleNamespace(
        id=f"sess-{number}", sandbox_id=f"sbx-{number}", client_id="ann", key=f"k{number}"
    )


FIRST, SECOND, THING = _live(1), _live(2), _Thing()
GONE: Any = SimpleNamespace(
    id="sbx-1", network_log=list, learned_policy=NetworkPolicy, protections=tuple
)
SPEC = SandboxSpec()


def _index() -> SessionIndex:
    made = SessionIndex()
    made.enter(FIRST)
    return made


def _share(index: SessionIndex) -> None:
    with index.share("ann", 3):
        pass


def _turn(keys: Keys) -> None:
    with keys.turn("ann", "k"):
        pass


def _use() -> Use:
    return Use(lambda: None)


def _pool() -> Pool:
    def build(profile: str) -> PooledSandbox:
        warm: Any = SimpleNamespace(alive=True, fits=lambda _: True)
        return PooledSandbox(warm, "unconfined", profile, 1000.0)

    made = Pool(PoolConfig(min_warm=2), FakeClock(), build, lambda _: None)
    made.tend()
    made._shelf.popleft()  # one is there, and one is wanted
    return made


Case = tuple[Callable[[], Any], str, int, Callable[[Any], object]]
CASES: dict[str, Case] = {
    "share": (_index, "_lock", 0, _share),
    "share that ends": (_index, "_lock", 1, _share),
    "enter": (_index, "_lock", 0, lambda index: index.enter(SECOND)),
    "leave": (_index, "_lock", 0, lambda index: index.leave(FIRST)),
    "find": (_index, "_lock", 0, lambda index: index.find("sess-1")),
    "under key": (_index, "_lock", 0, lambda index: index.under_key("ann", "k1")),
    "all": (_index, "_lock", 0, lambda index: index.all()),
    "try to take": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.try_take()),
    "take again": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.take_again()),
    "take": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.take()),
    "drain": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.drain(draining=True)),
    "close slots": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.close()),
    "give back": (lambda: Slots(2, 2, 1.0), "_changed", 0, lambda slots: slots.give_back()),
    "count": (Counters, "_lock", 0, lambda counters: counters.add("x")),
    "counted": (Counters, "_lock", 0, lambda counters: counters["x"]),
    "duration": (Durations, "_lock", 0, lambda durations: durations.add(1.0)),
    "average": (Durations, "_lock", 0, lambda durations: durations.average_ms),
    "percentiles": (Durations, "_lock", 0, lambda durations: durations.percentiles()),
    "event": (Events, "_lock", 0, lambda events: events.add("created", None)),
    "last event": (Events, "_lock", 0, lambda events: events.last),
    "events since": (Events, "_lock", 0, lambda events: events.since(0)),
    "listen": (Events, "_lock", 0, lambda events: events.listen(print)),
    "listen no more": (Events, "_lock", 1, lambda events: events.listen(print)()),
    "keep": (EndedSandboxes, "_lock", 0, lambda ended: ended.keep(GONE)),
    "find ended": (EndedSandboxes, "_lock", 0, lambda ended: ended.find("sbx-1")),
    "begin a call": (_use, "_lock", 0, lambda use: use.__enter__()),
    "end a call": (_use, "_lock", 0, lambda use: use.__exit__()),
    "exec": (_use, "_lock", 0, lambda use: use.started(THING)),
    "stream": (_use, "_lock", 0, lambda use: use.opened(THING)),
    "running": (_use, "_lock", 0, lambda use: use.running),
    "running no more": (_use, "_lock", 1, lambda use: use.running),
    "attended": (_use, "_lock", 0, lambda use: use.is_attended),
    "turn": (Keys, "_lock", 0, _turn),
    "turn that ends": (Keys, "_lock", 1, _turn),
    "incoming": (lambda: Places(None), "_lock", 0, lambda places: places.count_incoming("ann", 1)),
    "place": (lambda: Places(None), "_lock", 0, lambda places: places.path("x")),
    "size": (_pool, "_changed", 0, lambda pool: pool.size),
    "claim": (_pool, "_changed", 0, lambda pool: pool.claim(SPEC, "unconfined")),
    "take any": (_pool, "_changed", 0, lambda pool: pool.take_any()),
    "profile": (_pool, "_changed", 0, lambda pool: pool.profile_for(SPEC, "unconfined")),
    "order": (_pool, "_changed", 0, lambda pool: pool.order("default")),
    "change": (_pool, "_changed", 0, lambda pool: pool.change(PoolConfig(enabled=False))),
    "wake": (_pool, "_changed", 0, lambda pool: pool.wake()),
    "close pool": (_pool, "_changed", 0, lambda pool: pool.close()),
    "close its timer": (_pool, "_changed", 1, lambda pool: pool.close()),
    "expire": (_pool, "_changed", 0, lambda pool: pool._take_expired()),
    "begin": (_pool, "_changed", 0, lambda pool: pool._begin(False)),
    "finish": (_pool, "_changed", 0, lambda pool: pool._finish("default", None)),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_happens_while_another_has_the_lock(case: str) -> None:
    make, lock, free, call = CASES[case]
    thing = make()
    held = Held(getattr(thing, lock), free)
    setattr(thing, lock, held)
    before = state_of(thing, lock)
    with pytest.raises(HeldError):
        call(thing)
    assert free or before == state_of(thing, lock)

    setattr(thing, lock, held._inner)
    if case not in ("give back", "place"):  # nothing was taken; its directory would stay
        call(thing)


@pytest.fixture
def manager() -> Iterator[SessionManager]:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    backend = Unconfined()
    with SessionManager(config, backends=[backend], background=False, clock=FakeClock()) as made:
        yield made
    backend.close()


VERBS: dict[str, Callable[[SessionManager, Live], object]] = {
    "detach": lambda manager, live: manager.detach(live.id),
    "suspend": lambda manager, live: manager.suspend(live.id),
    "resume": lambda manager, live: manager.resume(live.id),
    "extend": lambda manager, live: manager.extend(live.id, 5.0),
    "change": lambda manager, live: manager.change(live.id, name="x"),
    "checkpoint": lambda manager, live: manager.checkpoint(live.id),
    "terminate": lambda manager, live: manager.terminate(live.id),
    "move": lambda _, live: live.move().__enter__(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_changes_a_session_while_another_does(manager: SessionManager, verb: str) -> None:
    live = manager.index.find(manager.acquire(client_id="ann").id)
    assert live is not None
    live.lock, before = Held(live.lock), live.lock  # type: ignore[assignment]
    was, record, state = live.view(), manager.store.session(live.id), live.inner.session.state
    with pytest.raises(HeldError):
        VERBS[verb](manager, live)
    assert was == live.view()
    assert live.moving is None
    assert record == manager.store.session(live.id)
    assert state == live.inner.session.state

    live.lock = before
    manager.terminate(live.id)


@pytest.mark.parametrize("verb", ["expect", "close", "_wake", "listen", "templates close"])
def test_threads_of_a_manager_are_told_under_their_lock(
    manager: SessionManager, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = manager.index.find(manager.acquire(client_id="ann").id)
    assert live is not None
    thing, lock, calls = manager.reaper, "_changed", {"expect": lambda: manager.reaper.expect(live)}
    calls["close"] = manager.reaper.close
    if verb not in calls:
        templates: Any = manager.templates
        thing, lock = templates, "changed"
        calls = {"_wake": templates._wake, "listen": lambda: templates.listen(list)}
        calls["templates close"] = templates.close
    with monkeypatch.context() as patch:
        patch.setattr(thing, lock, Held(getattr(thing, lock)))
        before = state_of(thing, lock)
        with pytest.raises(HeldError):
            calls[verb]()
        assert before == state_of(thing, lock)
