"""A gVisor sandbox, seen from the host."""

from __future__ import annotations

import os
from _thread import RLock

from ...errors import ExecError, NetworkPolicyError
from ...launcher import wire
from ..local import journal
from ..local.answers import Refused
from ..local.host import identity
from ..local.host.facts import host
from ..local.jailed.jail_mounts import JailMounts
from ..local.jailed.jailed import JailedSandbox
from ..local.network import SandboxNetwork
from . import places, runsc
from .asked import NO_MEMORY, NO_MEMORY_OF_SOCKETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from ...launcher.plan import NetworkPlan
    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.net.network import NetworkPolicy
    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from ..local.agents import guest
    from ..local.host.cgroups import Group, Layout
    from ..local.launched import Launched
    from ..local.sizes import Sizes
    from .draft import Draft
    from .runsc import Runsc

    class Owner(guest.Owner, Protocol):
        """Interface that such a sandbox needs of its backend."""

        def layout(self) -> Layout: ...

        def released(self, sandbox: GvisorSandbox) -> None: ...

        def protections_of(self, sandbox: GvisorSandbox) -> tuple[Protection, ...]: ...

        def capabilities_of(self, sandbox: GvisorSandbox) -> SandboxCapabilities: ...

        def attach(self, sandbox: GvisorSandbox, mount: Mount, more: JailMounts) -> None: ...

        def snapshot(
            self,
            sandbox: GvisorSandbox,
            metadata: Mapping[str, str],
            catalogue: Catalogue | None = None,
        ) -> Snapshot: ...

        def checkpoint(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot: ...


class GvisorSandbox(JailedSandbox):
    """See `BackendSandbox`. All methods may be called from any thread.

    Attributes:
        pid: Of the jail's PID 1, gVisor's own `runsc run`, as the host sees it.
        places: Where the jail has what is mounted, by its target.
        shows_later: Whether there is more of that than when gVisor started.
    """

    def __init__(
        self,
        backend: Owner,
        draft: Draft,
        sizes: Sizes,
        group: Group,
        control: wire.Socket,
        pid: int,
        pidfd: int,
        errors: int,
        jailer: Launched,
        program: Runsc,
        last_number: int = 0,
    ) -> None:
        super().__init__(
            backend, draft.spec, draft.id, draft.uid, draft.mounts, control, pidfd, last_number
        )
        self.owner, self.sizes, self.group = backend, sizes, group
        self.first_host_id = draft.first_host_id
        self.image, self.disk = draft.image, draft.disk
        self.shares_pages = draft.shares_pages
        self.protected, self.note = draft.protected, draft.note
        self.places, self._places_used = draft.places, draft.count
        self.shows_later = False
        self.pid, self.jailer = pid, jailer
        self.errors, self.program = errors, program
        self.has_network = not draft.spec.network.is_none  # as gVisor was told, for good

    def protections(self) -> tuple[Protection, ...]:
        return self.owner.protections_of(self)

    def _degraded(self) -> tuple[str, ...]:
        memory = () if self.group.version else ("memory_limit",)
        return (*memory, *super()._degraded())

    def _may_be(self, uid: int) -> bool:
        return uid == self.uid or (
            host().trusted_root and (uid < identity.LOW_IDS or uid == identity.NOBODY)
        )

    def _freeze(self, frozen: bool) -> None:
        """By the host's freezer all of gVisor stands still; without one, all that it runs does."""
        if self.group.can_freeze:
            self.group.freeze() if frozen else self.group.thaw()
            return
        flags = self.flags()
        verb = "pause" if frozen else "resume"
        argv = [places.RUNSC, f"--root={places.STATE}", *flags, verb, self.id]
        try:
            self.enter("run", {"argv": argv, "env": {"PATH": "/bin"}}, [])
        except Refused as exc:
            raise ExecError(f"{verb}: {exc.strerror}") from exc

    def flags(self) -> list[str]:
        return self.program.flags(rootless=not host().trusted_root, network=self.has_network)

    def stand_still(self) -> StandStill:
        """For a moment in which nothing inside may change."""
        return StandStill(self, self._lock)

    def _cause(self) -> str:
        if (cause := super()._cause()) or self.errors < 0:
            return cause
        said = runsc.last_words(self.errors)
        if not runsc.lacks_processes(said):
            return f"gVisor: {said}" if said else ""
        most, pids = runsc.host_pids(self.sizes.pids), self.sizes.pids
        return (
            f"gVisor may have {most} processes and threads of the host, and needed more for "
            f"limits.pids={pids}; set a lower one"
        )

    def _let_go(self) -> None:
        closing, self.errors = self.errors, -1
        os.close(closing)
        journal.give_up(self.protected, self.note, self.id, self.jailer)
        self.owner.released(self)

    def granted(self) -> SandboxCapabilities:
        return self.owner.capabilities_of(self)

    def _more_mounts(self) -> JailMounts:
        more = JailMounts(
            self.spec, self.first_host_id, places.MOUNTS, places.POINTS, there=self.mounts
        )
        more.places, more.count = dict(self.places), self._places_used
        self._places_used += 1  # also if it comes to nothing: that place is not empty any more
        return more

    def _attach(self, mount: Mount, more: JailMounts) -> None:
        self.owner.attach(self, mount, more)
        self.places = more.places

    def _checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        return self.owner.checkpoint(self, metadata)

    def not_saved(self) -> tuple[str, str]:
        if not host().trusted_root:
            return NO_MEMORY, ""
        if self.has_network:
            return NO_MEMORY_OF_SOCKETS, ""
        if self.shows_later:
            why = "gVisor does not restore mounts that were added while it ran"
            return why, "give mounts when the sandbox is created; snapshot() saves its files"
        return "", ""

    def _snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None) -> Snapshot:
        return self.owner.snapshot(self, metadata, catalogue)


class StandStill:
    """Frozen while in the `with` block, suspended or not, and afterwards as before."""

    def __init__(self, sandbox: GvisorSandbox, lock: RLock) -> None:
        self._sandbox, self._lock, self._freezes = sandbox, lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._freezes = not self._sandbox.paused
        if self._freezes:
            self._sandbox._freeze(True)

    def __exit__(self, *_exc: object) -> None:
        try:
            if self._freezes:
                self._sandbox._freeze(False)
        finally:
            self._lock.release()


class GvisorNetwork(SandboxNetwork):
    _sandbox: GvisorSandbox

    def check(self, policy: NetworkPolicy) -> None:
        super().check(policy)
        if not self._sandbox.has_network and not policy.is_none:
            raise NetworkPolicyError(
                "gVisor was started without network and cannot enable it later",
                field="network",
                hint="create the sandbox with a list of hosts; the list can be changed later",
            )

    def _enter(self, plan: NetworkPlan) -> list[int]:
        _said, sockets = self._sandbox.enter("network", {"network": plan}, [])
        return sockets
