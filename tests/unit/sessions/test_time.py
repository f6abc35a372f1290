"""When a session is in use, and when it is over: pure judgement, attacked with numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import InvalidRequest, LifecycleError
from ringfence.model.base import jsonform
from ringfence.model.client_session import (
    SESSION_NEXT,
    SessionState,
    SessionTimeouts,
    check_session_step,
)
from ringfence.sessions.expiry import Activity, next_look_s, verdict

pytestmark = pytest.mark.anyone

STATES = st.sampled_from(tuple(SessionState))
SECONDS = st.floats(0.001, 1e6, allow_nan=False)
TIMEOUTS = st.builds(
    SessionTimeouts,
    idle_s=st.none() | SECONDS,
    detach_s=st.none() | SECONDS,
    suspend_s=st.none() | SECONDS,
    on_idle=st.sampled_from(["terminate", "suspend", "detach"]),
)


@given(STATES, STATES)
def test_the_table_is_the_truth(now: SessionState, then: SessionState) -> None:
    if then in SESSION_NEXT[now]:
        assert then == check_session_step(now, then)
        return
    with pytest.raises(LifecycleError):
        check_session_step(now, then)


def test_every_state_is_in_the_table_and_ends() -> None:
    assert {"active", "detached", "suspended", "terminated"} == {str(s) for s in SESSION_NEXT}
    for state in SessionState:
        assert SessionState.TERMINATED in SESSION_NEXT[state]
        assert state in SESSION_NEXT[state]
        with pytest.raises(InvalidRequest):
            jsonform.word(SessionState, f"{state}s")


def test_the_defaults_are_the_contract() -> None:
    assert (300.0, 3600.0, 86_400.0) == (
        SessionTimeouts().idle_s,
        SessionTimeouts().detach_s,
        SessionTimeouts().suspend_s,
    )
    assert 0.0 == SessionTimeouts().of(SessionState.TERMINATED)


@given(STATES, TIMEOUTS, st.floats(0, 2e6), st.none() | st.floats(-1e6, 1e6))
def test_never_early_and_never_late(
    state: SessionState, timeouts: SessionTimeouts, unused: float, left: float | None
) -> None:
    found = verdict(state, timeouts, unused, left)
    limit = timeouts.of(state)

    if left is not None and left <= 0:
        assert ("terminate", "ttl") == found
    elif state == SessionState.TERMINATED or limit is None or unused < limit:
        assert found is None
    else:
        assert found is not None
        action, reason = found
        is_active = state == SessionState.ACTIVE
        assert (timeouts.on_idle if is_active else "terminate") == action
        assert ("idle" if is_active else str(state)) == reason


@given(STATES, TIMEOUTS, st.floats(0, 2e6), st.none() | st.floats(-1e6, 1e6), SECONDS)
def test_looked_at_when_something_is_due(
    state: SessionState, timeouts: SessionTimeouts, unused: float, left: float | None, most: float
) -> None:
    """Whatever is due before the next look would come too late."""
    wait = next_look_s(state, timeouts, unused, left, most)

    assert 0 <= wait <= most
    if left is not None:
        assert wait <= max(0.0, left)
    limit = timeouts.of(state)
    if limit is not None:
        assert wait <= max(0.0, limit - unused)


class Seen:
    """A sandbox that spends processor time as it is told."""

    def __init__(self) -> None:
        self.now, self.cpu_ns = 100.0, 0
        self.activity = Activity(self.now)

    def look(self, seconds: float, cores: float = 0.0, *, busy: bool = False) -> float:
        self.now += seconds
        self.cpu_ns += int(seconds * cores * 1e9)
        self.activity.look(self.now, busy=busy, cpu_ns=self.cpu_ns)
        return self.activity.unused_s(self.now)


def test_what_runs_is_in_use() -> None:
    seen = Seen()

    assert 10.0 == seen.look(10)
    assert 0.0 == seen.look(10, busy=True)
    assert 5.0 == seen.look(5)


def test_processor_time_is_use_and_looking_is_not() -> None:
    seen = Seen()
    seen.look(1)

    assert 0.0 == seen.look(10, cores=0.05)
    assert 10.0 == seen.look(10, cores=0.0001)
    assert 70.0 == seen.look(60, cores=0.0005)


def test_a_counter_that_cannot_be_read_says_nothing() -> None:
    activity = Activity(0.0)
    activity.look(1.0, busy=False, cpu_ns=None)
    activity.look(2.0, busy=False, cpu_ns=10**12)
    activity.look(3.0, busy=False, cpu_ns=None)

    assert 3.0 == activity.unused_s(3.0)


def test_use_is_seen_across_a_reading_that_failed() -> None:
    activity = Activity(0.0)
    activity.look(1.0, busy=False, cpu_ns=0)
    activity.look(2.0, busy=False, cpu_ns=None)
    activity.look(3.0, busy=False, cpu_ns=10**9)

    assert 0.0 == activity.unused_s(3.0)


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans(), st.floats(0, 2)), max_size=30))
def test_it_was_never_used_later_than_now(looks: list[tuple[float, bool, float]]) -> None:
    seen = Seen()
    for seconds, busy, cores in looks:
        before = seen.activity.last
        assert seen.look(seconds, cores, busy=busy) >= 0
        assert before <= seen.activity.last <= seen.now
