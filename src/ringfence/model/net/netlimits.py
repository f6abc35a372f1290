"""How much of the network a sandbox may use."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.model import Model
from ..base.record import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DAY_S = 86_400.0


@dataclass(frozen=True, eq=False, repr=False)
class NetworkLimits(Model):
    """How much of the network one sandbox may use; `Limits.network_bytes` bounds its total.

    Attributes:
        connections: At the same time.
        connections_per_s: New ones, on average; None is unbounded.
        bytes_per_s: Both directions of all connections together; None is unbounded.
        header_bytes: The head of one HTTP message, and the first bytes of a TLS connection.
        header_s: How long those may take to arrive.
        connect_s: How long reaching a server may take, its name's resolution included.
        idle_s: After how long without a byte in either direction a connection is cut.
    """

    connections: int = 1024
    connections_per_s: float | None = None
    bytes_per_s: int | None = None
    header_bytes: int = 16_384
    header_s: float = 5.0
    connect_s: float = 10.0
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        checks.integer(self.connections, "connections", 1, 65_536)
        checks.integer(self.header_bytes, "header_bytes", 256, 2**20)
        if self.bytes_per_s is not None:
            checks.integer(self.bytes_per_s, "bytes_per_s", 1, 2**50)
        for name in ("connections_per_s", "header_s", "connect_s", "idle_s"):
            given = getattr(self, name)
            if given is not None or name != "connections_per_s":
                object.__setattr__(self, name, checks.number(given, name, 0.001, _DAY_S))

    def to_json(self) -> dict[str, Any]:
        """The JSON object of what differs from the defaults."""
        form = jsonform.dump(self)
        return {name: value for name, value in form.items() if value != getattr(DEFAULT, name)}


DEFAULT = NetworkLimits()
