"""The states of a sandbox, and the table of what may follow what."""

from __future__ import annotations

from ..errors import LifecycleError
from .base.helpful import knows_keywords

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enum import StrEnum
else:
    from .base.words import StrEnum


class State(StrEnum):
    """Where a sandbox is in its life.

    `provisioned`: built and locked down, nothing has run. `running`: at least one exec was
    started. `suspended`: every process is frozen. `terminated`: gone, for good.
    """

    PROVISIONED = "provisioned"
    RUNNING = "running"
    SUSPENDED = "suspended"
    TERMINATED = "terminated"


NEXT: dict[State, frozenset[State]] = {
    State.PROVISIONED: frozenset(State),
    State.RUNNING: frozenset({State.RUNNING, State.SUSPENDED, State.TERMINATED}),
    State.SUSPENDED: frozenset({State.SUSPENDED, State.RUNNING, State.TERMINATED}),
    State.TERMINATED: frozenset({State.TERMINATED}),
}
"""Staying put is legal, because the verbs are idempotent; terminating is legal everywhere."""


@knows_keywords
def check_transition(now: State, then: State) -> State:
    """`then`, when a sandbox in `now` may go there.

    Raises:
        LifecycleError: The table has no such step.
    """
    if then not in NEXT[now]:
        raise LifecycleError(f"a {now} sandbox cannot become {then}")
    return then
