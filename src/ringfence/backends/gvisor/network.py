"""How the network of a gVisor sandbox is changed from outside: in the jail, where no guest is."""

from __future__ import annotations

from ...errors import NetworkPolicyError
from ..local.network import SandboxNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.plan import NetworkPlan
    from ...model.net.network import NetworkPolicy
    from .sandbox import GvisorSandbox


class GvisorNetwork(SandboxNetwork):
    """See `SandboxNetwork`."""

    _sandbox: GvisorSandbox

    def check(self, policy: NetworkPolicy) -> None:
        super().check(policy)
        if not self._sandbox.has_network and not policy.is_none:
            raise NetworkPolicyError(
                "gVisor was started without any way out of this sandbox, and gets none later",
                field="network",
                hint="create a sandbox with a list of hosts; that list can be changed",
            )

    def _enter(self, plan: NetworkPlan) -> list[int]:
        _said, sockets = self._sandbox.enter("network", {"network": plan}, [])
        return sockets
