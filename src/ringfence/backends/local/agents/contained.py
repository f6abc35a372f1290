"""A sandbox in outside isolation that its agent completed; the host's helpers enter its namespaces.

The agent has made a user, a mount and a network namespace of its own, and passed their descriptors out. See
`launcher.jail.contained`.
"""

from __future__ import annotations

import os

from ....errors import InvalidRequest, IoError, Unsupported
from ....guest.isolation import NAMESPACES
from ....model.state import State
from .. import journal
from ..answers import Refused
from ..host.facts import host
from ..jailed import saving
from ..mounts.denied import check_mount
from ..mounts.mounting import Mounting, OrNothing, shows_the_host
from ..mounts.sources import refuse_sockets
from ..network import SandboxNetwork
from .guest import GuestSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Protocol

    from ....launcher.placeholders import Placeholder
    from ....launcher.plan import NetworkPlan
    from ....model.granted import SandboxCapabilities
    from ....model.mount import Mount
    from ....model.net.network import NetworkPolicy
    from ....model.session import ResolvedMount, Snapshot
    from ....snapshots.catalogue import Catalogue
    from ..launched import Launched
    from ..mounts.trusted import Trusted
    from ..sizes import Sizes
    from .guest import Owner

    class OwnerWithJailer(Owner, Protocol):
        """Interface that such a sandbox needs of its backend."""

        def jailer(self) -> Launched: ...

        def catalogue(self) -> Catalogue: ...


_FURNISH_S = 60.0
AGENT = "/.ringfence"  # where it has come in, and nobody sees anything afterwards
NO_NAMESPACE_FDS = (
    "its agent has no namespaces of its own: the launcher or the host allows none, "
    "or the profile leaves out our filter"
)


class Changes:
    """Changes to the initial files of a sandbox, as reported by the owner of its writable layer.

    Attributes:
        changed, gone: Paths inside.
        own: Directories whose whole content is the sandbox's.
    """

    def __init__(self, changed: list[str], gone: list[str], own: list[str]) -> None:
        self.changed, self.gone, self.own = changed, gone, own


class ContainedSandbox(GuestSandbox):
    """The part of `BackendSandbox` that is the same for all of them.

    Attributes:
        pid: Of PID 1, the agent, as the host sees it.
        namespace_fds: In the order of `guest.isolation.NAMESPACES`; none where it has made none.
        sizes: What a snapshot may take.
        may_reach_sockets: Whether what was attached may come to have a socket of the host's in it.
    """

    owner: OwnerWithJailer
    pid: int
    sizes: Sizes
    network: ContainedNetwork | None
    namespace_fds: list[int]
    mounting: Mounting | None = None
    may_reach_sockets = False
    has_whiteouts = True

    def join(
        self, op: str, request: Mapping[str, Any], fds: list[int], timeout_s: float | None = None
    ) -> list[int]:
        """Let a helper of the jailer's go in; see `launcher.enter`. The descriptors that it answers with.

        Raises:
            Refused: As the kernel told the helper.
            Unsupported: There is no way in.
            SandboxLost: The jailer has ended.
        """
        user, mount, net = self._borrow_namespace_fds()
        try:
            places = [user, net] if op == "network" else [user, mount]
            jailer = self.owner.jailer()
            told = {"op": op, "uid": self.uid, "gid": self.uid, **request}
            return jailer.ask("join", told, [*places, *fds], timeout_s=timeout_s)[1]
        finally:
            for fd in (user, mount, net):
                os.close(fd)

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        if not self.namespace_fds:  # not even the policy that it has
            self.require_awake()
            raise Unsupported(NO_NAMESPACE_FDS, backend=self.backend.name, operation="network")
        super().apply_network_policy(policy)

    def _borrow_namespace_fds(self) -> list[int]:
        with self._fds_lock:
            if not self.namespace_fds:
                raise Unsupported(NO_NAMESPACE_FDS, backend=self.backend.name, operation="enter")
            return [os.dup(fd) for fd in self.namespace_fds[:3]]

    def namespaces(self) -> dict[str, int] | None:
        """The inodes of its namespaces by their names; None where only the host's /proc tells."""
        return {
            name: os.fstat(fd).st_ino
            for name, fd in zip(NAMESPACES, self.namespace_fds, strict=False)
        } or None

    def host_id(self) -> int:
        with open(f"/proc/{self.pid}/uid_map", encoding="ascii") as file:
            return int(file.read().split()[1])

    # -- what it is made with -----------------------------------------------------------------

    def furnish(self, mounting: Mounting) -> None:
        """Mount what the user mounts, before anything runs.

        Raises:
            InvalidRequest: The kernel refused a step.
        """
        owner = self.host_id() if host().trusted_root else None
        self.mounting = mounting
        mounting.prepare(owner)
        self.mounts[:] = mounting.mounts
        if not (mounting.steps or mounting.hidden):
            return
        mounting.note = journal.note(self.id, mounting.placeholders) or ""
        try:
            self._send(mounting, mounting.placeholders)
        except Refused as exc:
            raise InvalidRequest(f"mount: {exc.strerror}", field="mounts") from exc
        finally:
            mounting.close()

    def _send(self, mounting: Mounting, made: list[Placeholder]) -> None:
        """Let a helper do it, and the jailer remember what was made on the host."""
        request = {
            "do": "furnish",
            "trusted_root": host().trusted_root,
            "trees": mounting.trees,
            "steps": mounting.steps,
            "hidden": mounting.hidden,
            "place": AGENT,
            "id": self.id,
            "placeholders": made,
            "note": mounting.note,
        }
        self.join("contained", request, mounting.fds, _FURNISH_S)

    def attach(self, mount: Mount) -> ResolvedMount:
        with self._lock:
            self._require(self._state, "mount")
            have = self.mounting
            if have is None or not self.namespace_fds:
                raise Unsupported(NO_NAMESPACE_FDS, backend=self.backend.name, operation="attach")
            check_mount(mount.target, self.spec.deny)
            more = Mounting(self.spec, there=self.mounts)
            with OrNothing(mount.target, more):
                more.add(mount, self.host_id() if host().trusted_root else None)
                if not shows_the_host(self.spec):
                    for tree in more.trees:
                        refuse_sockets(tree["source"])
                self.make_place(mount)
                more.note = journal.path_of(self.id) or ""
                self._send(more, [*have.placeholders, *more.placeholders])
            have.protected += more.protected
            if more.placeholders:
                journal.erase(have.note or None)
                have.note = journal.note(self.id, have.placeholders) or ""
            self.mounts.append(more.mounts[-1])
            self.may_reach_sockets |= not shows_the_host(self.spec) and bool(more.trees)
            return more.mounts[-1]

    def make_place(self, mount: Mount) -> None:
        """Prepare a mount point: the helper that mounts has only the rights of the sandbox's user."""

    def _let_go(self) -> None:
        with self._fds_lock:
            closing, self.namespace_fds = self.namespace_fds, []
        for fd in closing:
            os.close(fd)
        if self.mounting is not None:
            self.mounting.close()
            note, made = self.mounting.note or None, self.mounting.protected
            if any(each.placeholders for each in made):
                journal.give_up(made, note, self.id, self.owner.jailer())
            else:
                for each in made:
                    each.remove_placeholders()  # closes what kept those of others

    # -- describing ---------------------------------------------------------------------------

    def granted(self) -> SandboxCapabilities:
        from .guest_granted import granted

        return granted(self)

    # -- snapshots ----------------------------------------------------------------------------

    def changes(self) -> Changes:
        """List the changes so far. Precondition: the sandbox is suspended."""
        raise NotImplementedError

    def snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None = None) -> Snapshot:
        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("snapshot")
            if not self.namespace_fds:
                raise Unsupported(NO_NAMESPACE_FDS, backend=self.backend.name, operation="snapshot")
            freezes = not self.paused
            if freezes:
                self._freeze(True)
            try:
                return saving.keep(self, catalogue or self.owner.catalogue(), metadata, self._save)
            finally:
                if freezes:
                    self._freeze(False)

    def _save(self, pipe: int) -> None:
        found = self.changes()
        self.join(
            "contained",
            {
                "do": "save",
                "changed": found.changed,
                "gone": found.gone,
                "own": found.own,
                "hosts": [each.target for each in self.mounts if each.host_path],
            },
            [pipe],
        )

    def load(self, content: int) -> None:
        """Put a snapshot's files back."""
        try:
            self.join("contained", {"do": "load"}, [content])
        except Refused as exc:
            raise IoError(f"the snapshot was not unpacked: {exc.strerror}") from exc


class ContainedNetwork(SandboxNetwork):
    """The network of one of these: held in a namespace of its own, which its programs have no right to."""

    _sandbox: ContainedSandbox

    def __init__(self, sandbox: ContainedSandbox, trusted: Trusted | None) -> None:
        super().__init__(sandbox, [], trusted)

    def serve(self) -> None:
        from ..routes import plan_for

        if plan := plan_for(self._policy):
            self.have(self._tell_kernel(plan))
        super().serve()

    def check(self, policy: NetworkPolicy) -> None:
        super().check(policy)
        if not (policy.is_none or self._sandbox.namespace_fds):
            raise Unsupported(
                NO_NAMESPACE_FDS, backend=self._sandbox.backend.name, operation="network"
            )

    def _enter(self, plan: NetworkPlan) -> list[int]:
        return self._sandbox.join("network", {"network": plan}, [])
