"""The host's side of the zygote."""

from __future__ import annotations

from ...launcher.spawn import ZYGOTE
from ..local.launched import Launched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.spawn import Started


class Zygote(Launched):
    """A zygote process of this process; see `Launched`."""

    def __init__(self, started: Started | None = None) -> None:
        super().__init__("zygote", ZYGOTE, started)
