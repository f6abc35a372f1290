"""What an agent is told first. For type checkers only: it crosses the socket as a dict."""

from __future__ import annotations

from typing import TypedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .room import Room


class Settings(TypedDict):
    """What the agent is told first."""

    own_kernel: bool  # it is root of a kernel of the guest's; else one program under a launcher
    uid: int  # of the guest's user, as the guest sees it
    id_map: str  # of the user namespace that the guest lives in; it has ids 0 and `uid`
    pids: int
    memory_bytes: int  # 0: not watched
    counts_cpu: bool  # gVisor counts also the time in which its host keeps it waiting
    rlimits: list[tuple[int, int, int]]
    seccomp: bytes  # the filter that it starts everything under, and itself; empty: none
    tag_key: int  # with which that filter lets it tag an exec; 0: without a filter
    covered: list[str]  # hidden behind walls that the agent puts up; empty: it puts up none
    room: Room | None  # behind those walls, what may be written; None: what the root is
    anew: bool  # the walls are around processes of their own: the launcher's are not to be seen
    place: str  # the directory that the agent came in: to be removed
