"""From the host into a sandbox: a client's connection joined with one to a server inside."""

from __future__ import annotations

from ..model.net.netlimits import NetworkLimits
from .io.relay import Relay
from .io.streams import prepare
from .meter import Meter

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket as socket
    from typing import Any

    from .commons import Commons
    from .rules import Ruled


class Unruled:
    """A sandbox that may reach nothing, and is reached all the same."""

    def __init__(self, commons: Commons) -> None:
        self.commons, self.meter, self.limits = commons, Meter(commons.loop), NetworkLimits()
        self.connections: set[Inbound] = set()

    def close(self) -> None:
        for connection in list(self.connections):
            connection.cut("the sandbox is gone")


class Inbound:
    """A pair of joined connections; the sandbox's policy and record do not apply to it."""

    is_recorded = False
    address = ""

    def __init__(
        self, sandbox: Ruled | Unruled, client: socket.socket, server: socket.socket
    ) -> None:
        self._sandbox = sandbox
        for sock in (client, server):
            prepare(sock)
        commons = sandbox.commons
        self._relay = Relay(
            commons.loop,
            commons.pipes,
            client,
            server,
            meter=sandbox.meter,
            idle_s=sandbox.limits.idle_s,
            on_end=self._end,
        )

    def start(self) -> None:
        self._sandbox.connections.add(self)
        self._sandbox.commons.connections += 1
        self._relay.start()

    def cut(self, reason: str) -> None:
        self._relay.cut(reason)

    def event(self) -> dict[str, Any]:
        """Nothing: who asked for it knows."""
        return {}

    def judge_again(self) -> None:
        """It stays, whatever the policy says now."""

    def _end(self, _reason: str) -> None:
        self._sandbox.connections.discard(self)
        self._sandbox.commons.connections -= 1
