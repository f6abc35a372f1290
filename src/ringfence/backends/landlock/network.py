"""The network of a sandbox in the host's: loopback addresses of its own, and a way to the egress process."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_network

from ...errors import NetworkPolicyError, ResourceExhausted
from ...policy.redirects import redirects_of
from ..local.network import SandboxNetwork
from . import filters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...guest.without_namespaces.sockets import Network, Way
    from ...model.net.network import NetworkPolicy
    from ...policy.redirects import Redirect
    from ..local.agents.guest import GuestSandbox
    from ..local.mounts.trusted import Trusted

_FIRST = 127 << 24 | 64 << 16  # 127.64.0.0/10: nobody's by custom
_BLOCKS = 1 << 20  # of four addresses each
_ATTEMPTS = 64
_BACKLOG = 1024
_TOKEN_BYTES = 16


class Loopback:
    """Addresses of one sandbox's own in the host's loopback network, claimed as long as this lives.

    Attributes:
        v4, v6: For servers inside, by the family of their sockets.
        way: Where the egress process accepts.
    """

    def __init__(self) -> None:
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for _ in range(_ATTEMPTS):
            block = _FIRST + 4 * (int.from_bytes(os.urandom(4), "big") % _BLOCKS)
            try:
                # An abstract name is free when its holder has ended, whatever the end was.
                self._claim.bind(f"\0ringfence-loopback-{block:08x}")
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    self.close()
                    raise
                continue
            self.v4, self.v6, self.way = ((block + i).to_bytes(4, "big") for i in range(3))
            return
        self.close()
        raise ResourceExhausted("no free loopback address was found for the sandbox")

    def network(self, unix: list[str], *, is_scoped: bool) -> Network:
        """Return what the agent is told: no way out as yet.

        Args:
            unix: Directories whose Unix sockets programs may connect to by path.
            is_scoped: Landlock keeps the agent itself from abstract sockets of the host.
        """
        calls = filters.socket_calls()
        return {
            "calls": calls,
            "v4": self.v4,
            "v6": self.v6,
            "unix": unix,
            "is_scoped": is_scoped,
            "way": None,
        }

    def close(self) -> None:
        self._claim.close()


class LandlockNetwork(SandboxNetwork):
    """See `SandboxNetwork`. The agent leads connections to the listener, in place of the kernel."""

    _sandbox: GuestSandbox

    def __init__(self, sandbox: GuestSandbox, loopback: Loopback, trusted: Trusted | None) -> None:
        super().__init__(sandbox, [], trusted)
        self._loopback = loopback
        self._at = "", 0

    def serve(self) -> None:
        if not self._policy.is_none:
            self.have(self._listen())
            super().serve()
            self._tell(self._policy)

    def change(self, policy: NetworkPolicy) -> None:
        old = self._policy
        if old.is_none:
            self.have(self._listen())
            try:
                self._serve(policy)
                self._tell(policy)
            except BaseException:
                self.close()
                raise
        elif policy.is_none:
            self._tell(policy)
            self._stop_serving()
        else:
            self._change(policy)
            self._tell(policy)

    def _listen(self) -> list[int]:
        """The listener, and in the resolver's place a socket at which nothing arrives: there is no UDP."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((socket.inet_ntoa(self._loopback.way), 0))
                listener.listen(_BACKLOG)
            except OSError as exc:
                raise NetworkPolicyError(
                    f"no listener on the loopback: {exc.strerror}", field="network"
                ) from exc
            self._at = listener.getsockname()
            self.token = os.urandom(_TOKEN_BYTES).hex()
            resolver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            return [listener.detach(), resolver.detach()]

    def _tell(self, policy: NetworkPolicy) -> None:
        """Tell the agent which destinations may be allowed: it refuses others at once."""
        way: Way | None = None
        if not policy.is_none:
            needs = redirects_of(policy)
            way = {
                "at": self._at,
                "token": bytes.fromhex(self.token),
                "loopback": _turns(needs.loopback),
                "others": _turns(needs.others),
            }
        self._sandbox.ask("network", way)


def _turns(redirects: Sequence[Redirect]) -> list[tuple[bytes, int, int, int]]:
    found = []
    for each in redirects:
        network = ip_network(each.network)
        found.append((network.network_address.packed, network.prefixlen, each.first, each.last))
    return found
