"""The state table: Hypothesis walks it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ringfence.errors import InvalidRequest, LifecycleError
from ringfence.model import NEXT, State, check_transition
from ringfence.model.base import jsonform

pytestmark = pytest.mark.anyone

STATES = st.sampled_from(tuple(State))


@given(STATES, STATES)
def test_the_table_is_the_truth(now: State, then: State) -> None:
    if then in NEXT[now]:
        assert then == check_transition(now, then)
        return
    with pytest.raises(LifecycleError):
        check_transition(now, then)


def test_every_state_is_in_the_table() -> None:
    assert set(State) == set(NEXT)
    assert {"provisioned", "running", "suspended", "terminated"} == {str(state) for state in State}


@given(STATES)
def test_terminating_is_legal_everywhere_and_for_good(state: State) -> None:
    assert State.TERMINATED in NEXT[state]
    assert {State.TERMINATED} == NEXT[State.TERMINATED]


@given(STATES)
def test_nothing_becomes_new_again(state: State) -> None:
    assert (state == State.PROVISIONED) == (State.PROVISIONED in NEXT[state])


@given(STATES)
def test_verbs_are_idempotent(state: State) -> None:
    assert state in NEXT[state]


def test_words_of_json() -> None:
    assert State.RUNNING == jsonform.word(State, "running")
    words: list[object] = ["Running", "", 7, None, []]
    for word in words:
        with pytest.raises(InvalidRequest):
            jsonform.word(State, word)


class Walk(RuleBasedStateMachine):
    """Any sequence of legal and illegal steps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = State.PROVISIONED
        self.has_ended = False

    @rule(then=STATES)
    def step(self, then: State) -> None:
        try:
            self.now = check_transition(self.now, then)
        except LifecycleError:
            assert then not in NEXT[self.now]
        self.has_ended = self.has_ended or then == State.TERMINATED

    @invariant()
    def the_end_is_the_end(self) -> None:
        assert self.has_ended == (self.now == State.TERMINATED)


TestWalk = Walk.TestCase
