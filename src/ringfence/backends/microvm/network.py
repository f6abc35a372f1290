"""The network of a machine: enforced by the tables of its jail, and set up in its own kernel.

The jail's namespace is that of any sandbox, and decides. The guest's kernel gets the same tables, so that
programs find the usual answers, at once; what it turns to its listener comes over a line of its own,
and is connected to in the jail: see `launcher.link.connection_relay`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from ...errors import IsolationError, NetworkPolicyError, RingfenceError, SandboxLost
from ...guest import channels
from ...launcher import wire
from ...model.net.network import NetworkPolicy
from ...policy.filters import load_egress_filter
from ..local.answers import Refused, answer
from ..local.network import SandboxNetwork
from . import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.plan import NetworkPlan
    from ..local.mounts.trusted import Trusted
    from .sandbox import MicrovmSandbox

_ANSWER_S = 120.0  # a machine may have a tenth of a processor, and emulate the rest
_ANSWER_UNASKED_S = 30.0  # while whoever wants something of the sandbox waits
_TOKEN = 16  # bytes
_MOST_DEATHS, _WITHIN_S = (
    5,
    60.0,
)  # whatever a guest says that its relay dies of is not heard for ever


class MicrovmNetwork(SandboxNetwork):
    """See `SandboxNetwork`.

    Args:
        line: Our end of the one that the machine's connections come over.
        before: Policy under which the machine was written down, and with it whoever relayed in it; None: it
            is a new one.

    Attributes:
        relay_pid: Of the process in the jail that carries them, as the host sees it; 0: none was needed yet,
            or none stays alive.
    """

    _sandbox: MicrovmSandbox

    def __init__(
        self,
        sandbox: MicrovmSandbox,
        line: socket.socket,
        trusted: Trusted | None,
        *,
        before: NetworkPolicy | None = None,
    ) -> None:
        super().__init__(sandbox, [], trusted)
        self._line: socket.socket | None = line
        self._relay: wire.Socket | None = None
        self.relay_pid = 0
        self._before, self._had_relay = before, before is not None
        self._deaths: list[float] = []
        self._leads = not sandbox.spec.network.is_none  # anywhere at all

    @property
    def is_carried(self) -> bool:
        """True while its connections may still be relayed."""
        return self._line is not None

    def serve(self) -> None:
        from ..local.routes import plan_for

        plan = plan_for(self._policy)
        # Its kernel has the tables of the policy that it was written down under, whatever holds now.
        if self._before is not None and (plan or not self._before.is_none):
            self._start_relay()
            self._forget(self._before)
        if plan:
            self._sockets = self._tell_kernel(plan)
            self.inodes = [os.fstat(fd).st_ino for fd in self._sockets]
        super().serve()

    def check(self, policy: NetworkPolicy) -> None:
        super().check(policy)
        check_kernel(policy, self._sandbox.owner.machines().kernel)
        if not (self.is_carried or policy.is_none):
            raise NetworkPolicyError(
                "the connection relay of the machine has ended: the machine has no network",
                field="network",
                hint="create a new sandbox with this policy",
            )

    def change(self, policy: NetworkPolicy) -> None:
        self._leads = not policy.is_none
        super().change(policy)

    def _enter(self, plan: NetworkPlan) -> list[int]:
        with self._sandbox.awake():
            _said, sockets = self._sandbox.enter("network", {"network": plan}, [])
            try:
                if self._relay is None:
                    self._start_relay()
                self._tell_guest(plan, self._leads)
            except BaseException:
                for fd in sockets:
                    os.close(fd)
                raise
        return sockets

    def _tell_guest(self, plan: NetworkPlan, leads: bool, timeout_s: float = _ANSWER_S) -> None:
        try:
            if self._relay is None:
                raise SandboxLost("the connection relay has ended")
            wire.send(self._relay, (plan, leads))
            answer(self._relay, timeout_s)
        except (BrokenPipeError, ConnectionResetError, SandboxLost) as exc:
            raise NetworkPolicyError(
                "the machine's connection relay has just ended",
                field="network",
                hint="try again; if it fails again, create a new sandbox with this policy",
            ) from exc

    # -- who relays ----------------------------------------------------------------------------

    def _start_relay(self) -> None:
        """From the first policy that leads somewhere on, a process in the jail has the line.

        Raises:
            SandboxLost: There is no line any more: none has stayed alive.
        """
        if self._line is None:
            raise SandboxLost("the connection relay of the machine has ended")
        token = os.urandom(_TOKEN) if self._had_relay else b""
        if token:
            self._sandbox.tell(channels.RELAY + token)
        self._had_relay = True
        ours, theirs = wire.socketpair()
        group = self._sandbox.group
        request = {
            "filter": load_egress_filter(),
            "cgroup_dirs": group.directories,
            "cgroup_version": group.version,
            "token": token,
        }
        try:
            fds = [self._line.fileno(), theirs.fileno()]
            said, [pidfd] = self._sandbox.enter("relay", request, fds)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.relay_pid, self._relay = int(said), ours
        threading.Thread(
            target=self._watch, args=(pidfd, ours), name="ringfence-relay", daemon=True
        ).start()

    def _watch(self, pidfd: int, relay: wire.Socket) -> None:
        """Until that relay has ended; then there is another one, unless the sandbox ends too."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)
        with self._sandbox.changing():
            if self._relay is relay:
                self._close_relay()
                self._replace_relay()

    def _replace_relay(self) -> None:
        """Connections of the last one are reset in the machine, as they are here; the policy is as it was."""
        while True:
            now = time.monotonic()
            self._deaths = [*(each for each in self._deaths if now - each < _WITHIN_S), now]
            if len(self._deaths) > _MOST_DEATHS:
                self._give_up_relay()
                return
            try:
                self._begin_as_before()
                return
            except IsolationError:  # a machine that does not answer is waited for once
                self._give_up_relay()
                return
            except (RingfenceError, OSError):  # that one has died too, or the machine has
                self._close_relay()

    def _begin_as_before(self) -> None:
        from ..local.routes import plan_for

        with self._sandbox.awake():
            self._start_relay()
            if plan := plan_for(self._policy):
                self._forget(self._policy)
                self._tell_guest(plan, True, _ANSWER_UNASKED_S)

    def _forget(self, policy: NetworkPolicy) -> None:
        """Have the machine's kernel lose the tables that it has of a policy."""
        from ..local.routes import plan_to_change

        plan = plan_to_change(policy, NetworkPolicy.none())
        try:
            if plan is not None:
                self._tell_guest(plan, False, _ANSWER_UNASKED_S)
        except Refused:
            pass  # some of it was not there

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
        self._relay, self.relay_pid = None, 0

    def _give_up_relay(self) -> None:
        """The end of the line resets in the machine whatever was connected."""
        self._close_relay()
        if self._line is not None:
            self._line.close()
        self._line = None

    def close(self) -> None:
        super().close()
        self._give_up_relay()


def check_kernel(policy: NetworkPolicy, guest: kernel.Kernel) -> None:
    """Raises NetworkPolicyError where a guest's kernel cannot turn connections to who decides on them."""
    if not (policy.is_none or guest.has_rules):
        raise NetworkPolicyError(
            f"{guest.path} lacks modules of nf_tables", field="network", hint=kernel.HINT
        )
