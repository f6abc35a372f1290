"""First message to an agent. For type checkers only: it crosses the socket as a dict.

Kept separate: the backends write it and the agent reads it, and neither imports the other.
"""

from __future__ import annotations

from typing import TypedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .room import Room


class Settings(TypedDict):
    """First message to an agent."""

    own_kernel: bool  # it is root of a kernel of the guest's; else one program under a launcher
    uid: int  # of the guest's user, as the guest sees it
    id_map: str  # of the user namespace that the guest lives in; it has ids 0 and `uid`
    pids: int
    memory_bytes: int  # 0: not watched
    counts_cpu: bool  # gVisor counts also the time in which its host keeps it waiting
    rlimits: list[tuple[int, int, int]]
    seccomp: bytes  # the filter that it starts everything under, and itself; empty: none
    tag_key: int  # with which that filter lets it tag an exec; 0: without a filter
    covered: list[str]  # hidden behind isolation that the agent sets up; empty: it sets up none
    room: Room | None  # behind that isolation, what may be written; None: what the root is
    # Behind it, the size of /dev/shm; 0: as it is. What lies there outlives its program, and must leave
    # memory to the agent, which has the same limit.
    shm_bytes: int
    anew: bool  # the isolation is around processes of their own: the launcher's are not to be seen
    place: str  # the directory that the agent came in: to be removed
