"""Hypothesis walks a manager: no sandbox is ever given to two clients, and no count lies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence import SandboxSpec
from ringfence.errors import LifecycleError, ResourceExhausted, SandboxNotFound
from ringfence.model.acquire import AcquireOptions, AttachRequest
from ringfence.model.client_session import SESSION_NEXT, SessionState, SessionTimeouts
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

MOST, WARM = 4, 2
TIMEOUTS = SessionTimeouts(idle_s=300, detach_s=3600, suspend_s=86_400)
CONFIG = ManagerConfig(
    max_sandboxes=MOST,
    timeouts=TIMEOUTS,
    pool=PoolConfig(min_warm=WARM, max_warm=3, warm_ttl_s=600),
)
CLIENTS = st.sampled_from(["ann", "bob"])
LIMITS = {"active": 300.0, "detached": 3600.0, "suspended": 86_400.0}


@dataclass
class Known:
    """What a session should be."""

    id: str
    sandbox: str
    client: str
    state: str
    used: float
    expires: float | None = None
    key: str = ""

    @property
    def lives(self) -> bool:
        return "terminated" != self.state


class Machine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.backend = FakeClock(), Unconfined()
        self.manager = SessionManager(
            CONFIG, backends=[self.backend], background=False, clock=self.clock
        )
        self.known: list[Known] = []
        self.whose: dict[str, str] = {}
        self.created = self.ended_by_time = self.lost = 0

    def teardown(self) -> None:
        self.manager.close()
        assert {} == self.backend.sandboxes
        assert {} == self.backend.prebuilt

    # -- what should be -------------------------------------------------------------------------

    def living(self) -> list[Known]:
        return [each for each in self.known if each.lives]

    def note(self, client: str, session_id: str, sandbox_id: str, key: str = "") -> Known:
        assert self.whose.setdefault(sandbox_id, client) == client, "given to two clients"
        assert sandbox_id not in {each.sandbox for each in self.known}, "used before"
        known = Known(session_id, sandbox_id, client, "active", self.clock.moment, key=key)
        self.known.append(known)
        self.created += 1
        return known

    # -- getting one ------------------------------------------------------------------------------

    @rule(target=sessions, client=CLIENTS, use_pool=st.booleans(), ttl=st.sampled_from([None, 500]))
    def acquire(self, client: str, use_pool: bool, ttl: float | None) -> object:
        options = AcquireOptions(use_pool=use_pool)
        if len(self.living()) == MOST:
            with pytest.raises(ResourceExhausted) as refusal:
                self.manager.acquire(options=options, client_id=client)
            assert refusal.value.retryable
            return multiple()
        lease = self.manager.acquire(SandboxSpec(ttl_s=ttl), options, client_id=client)
        assert lease.newly_created
        known = self.note(client, lease.id, lease.session.sandbox_id)
        if ttl is not None:
            known.expires = self.clock.moment + ttl
        return known

    @rule(target=sessions, client=CLIENTS, key=st.sampled_from(["k1", "k2"]))
    @precondition(lambda self: len(self.living()) < MOST)
    def acquire_under_a_key(self, client: str, key: str) -> object:
        lease = self.manager.acquire(options=AcquireOptions(key=key), client_id=client)
        for each in self.living():
            if (each.client, each.key) == (client, key):
                assert each.id == lease.id
                assert not lease.newly_created
                return multiple()
        assert lease.newly_created
        return self.note(client, lease.id, lease.session.sandbox_id, key)

    @rule(target=sessions, known=sessions, client=CLIENTS, fresh=st.booleans())
    @precondition(lambda self: len(self.living()) < MOST)
    def acquire_the_same_again(self, known: Known, client: str, fresh: bool) -> object:
        options = AcquireOptions(preferred_id=known.sandbox, require_fresh=fresh)
        lease = self.manager.acquire(options=options, client_id=client)
        if known.lives and known.client == client and not fresh:
            assert known.id == lease.id
            known.state, known.used = "active", self.clock.moment
            return multiple()
        assert known.sandbox != lease.session.sandbox_id
        return self.note(client, lease.id, lease.session.sandbox_id)

    @rule(target=sessions, client=CLIENTS, name=st.sampled_from(["mine", "yours"]))
    @precondition(lambda self: len(self.living()) < MOST)
    def attach_or_create(self, client: str, name: str) -> object:
        request = AttachRequest(name, client, create_if_missing=True)
        mine = [each for each in self.living() if (name, client) == (each.sandbox, each.client)]
        if not mine and name in self.whose:
            with pytest.raises(SandboxNotFound):
                self.manager.attach(request)
            return multiple()
        lease = self.manager.attach(request)
        assert name == lease.session.sandbox_id
        assert lease.newly_created != bool(mine)
        if mine:
            mine[0].state, mine[0].used = "active", self.clock.moment
            return multiple()
        return self.note(client, lease.id, name)

    # -- what clients do ----------------------------------------------------------------------------

    @rule(known=sessions, client=CLIENTS)
    def attach(self, known: Known, client: str) -> None:
        request = AttachRequest(known.sandbox, client)
        if not known.lives or known.client != client:
            with pytest.raises(SandboxNotFound):
                self.manager.attach(request)
            return
        assert known.id == self.manager.attach(request).id
        known.state, known.used = "active", self.clock.moment

    @rule(known=sessions, client=CLIENTS, verb=st.sampled_from(["detach", "suspend", "resume"]))
    def change(self, known: Known, client: str, verb: str) -> None:
        call = getattr(self.manager, verb)
        then = {"detach": "detached", "suspend": "suspended", "resume": "active"}[verb]
        if known.client != client:
            with pytest.raises(SandboxNotFound):
                call(known.id, client)
            return
        if SessionState(then) not in SESSION_NEXT[SessionState(known.state)]:
            with pytest.raises(LifecycleError):
                call(known.id, client)
            return
        assert then == call(known.id, client).state
        known.state, known.used = then, self.clock.moment

    @rule(known=sessions, client=CLIENTS, verb=st.sampled_from(["terminate", "release"]))
    def end(self, known: Known, client: str, verb: str) -> None:
        call = getattr(self.manager, verb)
        if known.client != client:
            with pytest.raises(SandboxNotFound):
                call(known.id, client_id=client)
            return
        assert "terminated" == call(known.sandbox, client_id=client).state
        known.state = "terminated"

    @rule(known=consumes(sessions))
    def end_by_the_sandbox(self, known: Known) -> None:
        """Whoever holds the sandbox itself can end it: the session is over too."""
        if known.lives:
            self.manager.sandbox(known.id).terminate()
            known.state = "terminated"

    @rule(known=sessions)
    def use(self, known: Known) -> None:
        if "active" != known.state:
            return
        assert self.manager.sandbox(known.id).exec(["true"]).ok
        known.used = self.clock.moment

    @rule(known=sessions, seconds=st.integers(1, 5000))
    def extend(self, known: Known, seconds: int) -> None:
        if not known.lives:
            with pytest.raises(LifecycleError):
                self.manager.extend(known.id, seconds)
            return
        assert seconds == pytest.approx(self.manager.extend(known.id, seconds).expires_in_s)
        known.expires = self.clock.moment + seconds

    @rule(known=sessions)
    def lose(self, known: Known) -> None:
        """It goes away by itself."""
        if known.lives:
            self.backend.sandboxes[known.sandbox].terminate()
            assert "lost" == self.manager.get(known.id).reason
            known.state = "terminated"
            self.lost += 1

    # -- what time does -----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 100, 299, 301, 700, 3601, 90_000]), jump=st.booleans())
    def pass_by(self, seconds: int, jump: bool) -> None:
        """Sessions end in time, whatever anybody sets the clock on the wall to."""
        self.clock.pass_by(seconds)
        if jump:
            self.clock.on_the_wall += 3600.0 * (1 if seconds % 2 else -1)
        over = [each for each in self.living() if self.is_over(each)]

        ended = self.manager.cleanup_expired()

        assert {each.id for each in over} == {session.session_id for session in ended}
        for each in over:
            each.state = "terminated"
        self.ended_by_time += len(over)

    def is_over(self, known: Known) -> bool:
        if known.expires is not None and known.expires <= self.clock.moment:
            return True
        return self.clock.moment - known.used >= LIMITS[known.state]

    @rule()
    def fill_the_pool(self) -> None:
        self.clock.pass_by(31)  # beyond any pause after a full house
        self.manager.fill_pool()
        expected = min(WARM, MOST - len(self.living()))
        assert expected <= self.manager.pool.size <= 3

    @rule(known=sessions)
    def keep_one_warm(self, known: Known) -> None:
        self.manager.release(known.id, keep_alive=True)
        known.state = "terminated"

    # -- what always holds --------------------------------------------------------------------------

    @invariant()
    def counts_are_true(self) -> None:
        stats = self.manager.stats()
        of = [each.state for each in self.living()]
        assert of.count("active") == stats.active_sessions
        assert of.count("detached") == stats.detached_sessions
        assert of.count("suspended") == stats.suspended_sessions
        assert len(of) == stats.active_sandboxes
        assert self.created == stats.created
        assert self.ended_by_time == stats.timeout_destroys
        assert self.lost == stats.lost
        assert len(self.known) - len(of) == stats.terminated

    @invariant()
    def what_exists_is_what_is_known(self) -> None:
        living = {each.sandbox for each in self.living()}
        warm = {kept.warm.id for kept in self.manager.pool._shelf}
        assert living == self.backend.sandboxes.keys()
        assert warm == self.backend.prebuilt.keys()
        assert not warm & self.whose.keys()
        assert len(living) + len(warm) == self.manager.slots.taken <= MOST
        unended = {record.id for record in self.manager.store.unended_sandboxes()}
        assert living | warm == unended

    @invariant()
    def every_session_can_be_found(self) -> None:
        for each in self.known:
            seen = self.manager.get(each.id, each.client)
            assert (each.state, each.sandbox) == (seen.state, seen.sandbox_id)
        listed = {session.session_id for session in self.manager.list()}
        assert {each.id for each in self.living()} == listed


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
