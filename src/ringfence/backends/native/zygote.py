"""The host's side of the zygote."""

from __future__ import annotations

from ...errors import SandboxLost
from ...launcher import cgroups
from ...launcher.spawn import ZYGOTE
from ..local.launched import Launched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.spawn import Started


class Zygote(Launched):
    """A zygote process of this process; see `Launched`."""

    def __init__(self, started: Started | None = None, *, outlives: bool = False) -> None:
        super().__init__("zygote", ZYGOTE, started, outlives=outlives)

    def clear_up(self, sandbox_id: str, directories: list[str], fds: list[int]) -> None:
        """Have it remove the cgroups of a sandbox that is no more, and close its copies of `fds`.

        It does so soon, and before anything else that it is told; where it is gone, it is done here.
        """
        try:
            self.note("bury", sandbox_id, fds)
        except SandboxLost:
            cgroups.remove(directories)
