"""The network of a live sandbox: two sockets made inside it, served by the egress process.

The kernel of the sandbox turns whatever its policy may allow to those sockets and refuses the rest;
the egress process, which accepts on them, decides. Without it nothing is reachable at all.
"""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock

from ...errors import InvalidRequest, LifecycleError, NetworkPolicyError, SandboxLost
from .answers import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from ...egress.host.client import Egress
    from ...launcher.plan import NetworkPlan
    from ...model.net.netlog import NetworkEvent
    from ...model.net.network import NetworkPolicy
    from ...model.spec import SandboxSpec
    from .mounts.trusted import Trusted

    class Owner(Protocol):
        """Interface that a network needs of its backend."""

        def egress(self) -> Egress: ...

    class Networked(Protocol):
        """Interface that a network needs of its sandbox."""

        id: str
        spec: SandboxSpec

        @property
        def backend(self) -> Owner: ...


_MOST_PAST = 8192  # events of times before the network was taken away: more than one time leaves
# errnos of nfnetlink for a missing part that is neither built in nor loadable as a module.
_NO_MODULE = (errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL)


class SandboxNetwork:
    """Network access of a sandbox. The caller of a change holds the sandbox's lock.

    Args:
        sockets: The listener and the resolver's socket, of a sandbox that may reach something.
        trusted: The authority that its programs trust; None where no rule reads inside TLS.

    Attributes:
        inodes: Of the two sockets, which identify them among others.
        token: See `Egress.serve`.
    """

    token = ""

    def __init__(self, sandbox: Networked, sockets: list[int], trusted: Trusted | None) -> None:
        self._sandbox, self._trusted = sandbox, trusted
        self.have(sockets)
        self.placeholders = {name: _placeholder(name) for name in sandbox.spec.secrets}
        self._known = False  # to the egress process
        self._past: list[NetworkEvent] = []  # of what it no longer knows
        self._lock = allocate_lock()

    def have(self, sockets: list[int]) -> None:
        """These are its sockets. Preconditions: there were none."""
        self._sockets = sockets
        self.inodes = [os.fstat(fd).st_ino for fd in sockets]

    @property
    def trusted(self) -> Trusted | None:
        return self._trusted

    @property
    def _egress(self) -> Egress:
        return self._sandbox.backend.egress()

    @property
    def _policy(self) -> NetworkPolicy:
        return self._sandbox.spec.network

    # -- going out --------------------------------------------------------------------------

    def serve(self) -> None:
        """Hand a new sandbox's sockets to the egress process; from then on its programs get answers."""
        if self._sockets:
            self._serve(self._policy)

    def _serve(self, policy: NetworkPolicy) -> None:
        self._known = True
        secrets, most_bytes = self._settings(policy)
        with self._lock:
            sockets, self._sockets = self._sockets, []
        self._egress.serve(
            *(self._sandbox.id, policy, secrets, most_bytes, sockets),
            authority=self._authority,
            token=self.token,
        )

    @property
    def _authority(self) -> dict[str, str] | None:
        return self._trusted.authority if self._trusted else None

    def _settings(self, policy: NetworkPolicy) -> tuple[dict[str, str], int | None]:
        spec = self._sandbox.spec
        secrets = {name: spec.secrets[name] for name in policy.secrets}
        return secrets, spec.limits.network_bytes

    def environment(self) -> dict[str, str]:
        """Build the environment for network and secrets; the user's own variables win."""
        trust = self._trusted.env if self._trusted else {}
        return {**_proxies(self._policy), **trust, **self.placeholders}

    def check(self, policy: NetworkPolicy) -> None:
        """Refuse a policy that this live sandbox cannot get.

        Raises:
            NetworkPolicyError: One of the two is the host's own network.
            InvalidRequest: It writes a secret that the sandbox was not made with.
        """
        if policy.is_unrestricted or self._policy.is_unrestricted:
            raise NetworkPolicyError(
                "the host's own network can only be chosen when the sandbox is created",
                field="network",
                hint="create a new sandbox with this policy",
            )
        check_secrets(policy, self._sandbox.spec.secrets)
        self.check_trusted(policy)

    def change(self, policy: NetworkPolicy) -> None:
        """Let `policy` hold instead, also for what runs and for what is connected.

        Raises:
            NetworkPolicyError: It cannot; the old policy holds.
        """
        from .routes import plan_to_change

        old = self._policy
        plan = plan_to_change(old, policy)
        if old.is_none:
            self._open(plan, policy)
        elif policy.is_none:
            self._stop_serving()
            self._tell_kernel(plan)
        else:
            self._replace(plan, old, policy)

    def _open(self, plan: NetworkPlan | None, policy: NetworkPolicy) -> None:
        """From no network to some: nothing is served before everything is in place."""
        from .routes import plan_to_change

        try:
            self._sockets = self._tell_kernel(plan)
            self.inodes = [os.fstat(fd).st_ino for fd in self._sockets]
            self._keep(self._sockets)
            self._serve(policy)
        except BaseException:
            self.close()
            self._undo(plan_to_change(policy, self._policy))
            raise

    def _replace(self, plan: NetworkPlan | None, old: NetworkPolicy, policy: NetworkPolicy) -> None:
        """The egress process first: it is who decides, and cuts what is no longer allowed."""
        from .routes import plan_to_change

        self._change(policy)
        try:
            self._tell_kernel(plan)
        except BaseException:
            self._change(old)
            self._undo(plan_to_change(policy, old))
            raise

    def _change(self, policy: NetworkPolicy) -> None:
        settings = self._settings(policy)
        self._egress.change(
            self._sandbox.id, policy, *settings, authority=self._authority, token=self.token
        )

    def _tell_kernel(self, plan: NetworkPlan | None) -> list[int]:
        """Apply a plan in the sandbox's network namespace; returns the sockets it asked for."""
        if plan is None:
            return []
        try:
            return self._enter(plan)
        except Refused as exc:
            raise refused_by_kernel(exc) from exc

    def _enter(self, plan: NetworkPlan) -> list[int]:
        """Let a helper that sees no guest's file do it.

        Raises:
            Refused: As the kernel told the helper.
        """
        raise NotImplementedError

    def _keep(self, sockets: list[int]) -> None:
        """The sockets are others now: for who keeps them beyond the death of this process."""

    def _undo(self, plan: NetworkPlan | None) -> None:
        """As far as it was done; who calls has an error to raise already."""
        try:
            self._tell_kernel(plan)
        except (NetworkPolicyError, SandboxLost, LifecycleError, OSError):
            pass

    # -- the record -------------------------------------------------------------------------

    def events(self) -> list[NetworkEvent]:
        """List the decisions so far, oldest first; bounded. Of an ended sandbox, all of them."""
        return [*self._past, *(self._egress.events(self._sandbox.id) if self._known else ())]

    def check_trusted(self, policy: NetworkPolicy) -> None:
        """Raises NetworkPolicyError where a rule reads inside TLS that its programs would not believe."""
        if not policy.needs_tls_termination:
            return
        from ...policy.trust import ended_hosts

        strange = self._trusted.strange(policy) if self._trusted else ended_hosts(policy)
        if strange:
            raise NetworkPolicyError(
                f"programs inside trust no authority that covers {', '.join(strange)}",
                field="network",
                hint="create a sandbox with this policy: programs read their roots when they start",
            )

    def check_served(self) -> list[str]:
        """Return the rights that the egress process could not drop; raises NetworkPolicyError without one."""
        return self._egress.check(self._sandbox.id)

    # -- ending -----------------------------------------------------------------------------

    def close(self) -> None:
        """Cut every connection and close every copy of the sockets; idempotent."""
        self._stop_serving()
        self._close_sockets()

    def _stop_serving(self) -> None:
        self._keep([])
        known, self._known = self._known, False
        if known:
            self._past = [*self._past, *self._egress.drop(self._sandbox.id)][-_MOST_PAST:]

    def _close_sockets(self) -> None:
        with self._lock:
            closing, self._sockets = self._sockets, []
        for fd in closing:
            os.close(fd)


def _placeholder(name: str) -> str:
    """Make the placeholder of a secret: without value outside the sandbox's allowed requests."""
    return f"ringfence-secret-{name}-{os.urandom(8).hex()}"


def _proxies(policy: NetworkPolicy) -> dict[str, str]:
    """For programs that ask for a proxy; all others reach the same names without knowing of it."""
    if policy.is_none or policy.is_unrestricted:
        return {}
    from ...policy.redirects import PROXY

    # A connection to 0.0.0.0 is one to the loopback: servers print it as their address.
    proxy, direct = f"http://{PROXY[0]}:{PROXY[1]}", "localhost,127.0.0.1,0.0.0.0,::1"
    both = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": direct}
    return both | {name.upper(): value for name, value in both.items()}


def check_given_secrets(spec: SandboxSpec) -> None:
    """Of a sandbox to be made: see `check_secrets`; and each is a secret or open, not both."""
    check_secrets(spec.network, spec.secrets)
    if both := [name for name in spec.secrets if name in spec.env]:
        raise InvalidRequest(
            f"{both[0]} is both a secret and an environment variable", field="secrets"
        )


def check_secrets(policy: NetworkPolicy, secrets: Mapping[str, str]) -> None:
    """Every secret that a rule writes is there, and can stand in a header.

    Raises:
        InvalidRequest: One is not, or cannot.
    """
    if not policy.secrets:
        return
    missing = [name for name in policy.secrets if name not in secrets]
    if missing:
        raise InvalidRequest(
            f"the network policy writes {', '.join(missing)} into requests, and no such secret is given",
            field="secrets",
            hint=f'give secrets={{"{missing[0]}": "..."}}; they are never part of a snapshot',
        )
    from ...model.net.rules import check_secret

    for name in policy.secrets:
        check_secret(secrets[name], f"secrets.{name}")


def refused_by_kernel(exc: Refused) -> NetworkPolicyError:
    """The error for a network that the kernel would not set up."""
    hint = "run `ringfence doctor` to see what this host allows"
    if exc.errno in _NO_MODULE:
        hint = (
            "a list of hosts needs nf_tables, nft_chain_nat, nft_redir and nft_ct of the kernel: "
            "`modprobe` them as root, or ask for network none"
        )
    text = f"the network policy cannot be enforced here: {exc.strerror}"
    return NetworkPolicyError(text, field="network", hint=hint)
