"""The network of one machine: held by the tables of its hull, made known to its own kernel.

The hull's namespace is that of any sandbox, and decides. The guest's kernel gets the same tables, so that
programs find the usual answers, at once; what it turns to its listener comes over a line of its own,
and is connected to in the hull: see `launcher.ferry`.
"""

from __future__ import annotations

import os
import socket

from ...errors import NetworkPolicyError, SandboxLost
from ...launcher import wire
from ...policy.filters import load_egress_filter
from ..local.answers import answer
from ..local.network import SandboxNetwork
from . import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.plan import NetworkPlan
    from ...model.network import NetworkPolicy
    from ..local.trusted import Trusted
    from .sandbox import MicrovmSandbox

_ANSWER_S = 120.0  # a machine may have a tenth of a processor, and emulate the rest


class MicrovmNetwork(SandboxNetwork):
    """See `SandboxNetwork`.

    Args:
        line: Our end of the one that the machine's connections come over.

    Attributes:
        ferry_pid: Of the process in the hull that carries them, as the host sees it; 0: none was needed yet.
    """

    _sandbox: MicrovmSandbox

    def __init__(
        self, sandbox: MicrovmSandbox, line: socket.socket, trusted: Trusted | None
    ) -> None:
        super().__init__(sandbox, [], trusted)
        self._line: socket.socket | None = line
        self._ferry: wire.Socket | None = None
        self.ferry_pid = 0
        self._leads = not sandbox.spec.network.is_none  # anywhere at all

    @property
    def is_ferried(self) -> bool:
        """Whether there is, or has been, anywhere to connect to."""
        return self._ferry is not None

    def serve(self) -> None:
        from ..local.routes import plan_for

        if plan := plan_for(self._policy):
            self._sockets = self._tell_kernel(plan)
            self.inodes = [os.fstat(fd).st_ino for fd in self._sockets]
        super().serve()

    def check(self, policy: NetworkPolicy) -> None:
        super().check(policy)
        check_kernel(policy, self._sandbox.owner.machines().kernel)

    def change(self, policy: NetworkPolicy) -> None:
        self._leads = not policy.is_none
        super().change(policy)

    def _enter(self, plan: NetworkPlan) -> list[int]:
        with self._sandbox.awake():
            _said, sockets = self._sandbox.enter("network", {"network": plan}, [])
            try:
                self._tell_guest(plan)
            except BaseException:
                for fd in sockets:
                    os.close(fd)
                raise
        return sockets

    def _tell_guest(self, plan: NetworkPlan) -> None:
        try:
            control = self._ferry or self._begin_to_ferry()
            wire.send(control, (plan, self._leads))
            answer(control, _ANSWER_S)
        except (BrokenPipeError, ConnectionResetError, SandboxLost) as exc:
            raise NetworkPolicyError(
                "the machine's connections are not carried any more: it reaches nothing",
                field="network",
                hint="create a new sandbox with this policy",
            ) from exc

    def _begin_to_ferry(self) -> wire.Socket:
        """From the first policy that leads somewhere on, a process in the hull has the line; we have not."""
        assert self._line is not None
        ours, theirs = wire.socketpair()
        group = self._sandbox.group
        request = {
            "filter": load_egress_filter(),
            "cgroup_dirs": group.directories,
            "cgroup_version": group.version,
        }
        try:
            fds = [self._line.fileno(), theirs.fileno()]
            said, _fds = self._sandbox.enter("ferry", request, fds)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.ferry_pid = int(said)
        self._line.close()
        self._line, self._ferry = None, ours
        return ours

    def close(self) -> None:
        super().close()
        for sock in (self._line, self._ferry):
            if sock is not None:
                sock.close()
        self._line = self._ferry = None


def check_kernel(policy: NetworkPolicy, guest: kernel.Kernel) -> None:
    """Raises NetworkPolicyError where a guest's kernel cannot turn connections to who decides on them."""
    if not (policy.is_none or guest.has_rules):
        raise NetworkPolicyError(
            f"{guest.path} lacks modules of nf_tables", field="network", hint=kernel.HINT
        )
