"""The fake backend: makes sandboxes and keeps their snapshots."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import BackendUnavailable, InvalidRequest, SnapshotNotFound, Unsupported
from ...model import capabilities as can
from ...model import spec as specs
from ...model.base.checks import FrozenMap
from ...model.base.ids import new_id
from ...model.session import Snapshot
from ..optional import Selective
from .filesystem import make_root
from .nodes import Quota
from .programs import PROGRAMS
from .sandbox import FakeSandbox, unsupported_limits
from .warm import FakeWarm

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ...model.net.network import NetworkPolicy
    from ...model.spec import SandboxSpec
    from .nodes import MemoryDirectory

_CAN = (
    can.NETWORK_NONE,
    can.NETWORK_CHANGE,
    can.MOUNT,
    can.ATTACH,
    can.PROTECTED_PATHS,
    can.SNAPSHOT,
    can.RESTORE,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.PREWARM,
    can.PIDS_LIMIT,
    can.DISK_QUOTA,
    can.INODE_QUOTA,
)
_CANNOT = {
    can.LOCAL_PROCESS_SANDBOX: "runs built-in programs only",
    can.NETWORK_HOSTS: "has no network",
    can.NETWORK_UNRESTRICTED: "has no network",
    can.NETWORK_OPEN: "has no network",
    can.NETWORK_LIMIT: "has no network",
    can.CONNECT: "has no network",
    can.PTY: "has no terminals",
    can.DENIED_PATHS: "hides nothing",
    can.MEMORY_SNAPSHOT: "runs nothing that has memory",
    can.SECRETS: "has nothing to keep them from",
    can.MEMORY_LIMIT: "does not measure memory",
    can.CPU_LIMIT: "does not measure CPU time",
    can.OPEN_FILES_LIMIT: "does not count open files",
    can.IO_LIMIT: "does not measure I/O",
}


@dataclass(frozen=True)
class _Saved:
    snapshot: Snapshot
    spec: SandboxSpec
    root: MemoryDirectory


class FakeBackend(Selective):
    """Sandboxes in memory; see `Backend`.

    Args:
        without: Capabilities to lack, to see how callers cope.
    """

    name = "fake"
    tiers = (specs.LIGHT,)
    profile_names: tuple[str, ...] = (specs.OS_HARDENED, specs.DEBUG, specs.UNRESTRICTED)

    def __init__(self, without: Collection[str] = ()) -> None:
        self._without = frozenset(without)
        if can.SUSPEND in without:
            self._without |= {can.SUSPEND_ON_IDLE}
        self._lock = threading.RLock()
        self._sandboxes: dict[str, FakeSandbox] = {}
        self._warm: dict[str, FakeWarm] = {}
        self._snapshots: dict[str, _Saved] = {}
        self._is_closed = False

    def report(self) -> can.BackendReport:
        able = [can.Capability(name, True) for name in _CAN if name not in self._without]
        unable = dict.fromkeys(self._without, "switched off") | _CANNOT
        lacking = [can.Capability(name, False, why) for name, why in unable.items()]
        why = "no program of the host is ever run"
        return can.BackendReport(
            backend=self.name,
            available=True,
            tiers=(specs.LIGHT,),
            capabilities=(*able, *lacking),
            protections=(can.Protection("built_in_programs_only", can.ENFORCED, why),),
            profiles=self.profile_names,
        )

    def has(self, capability: str) -> bool:
        """Return whether the capability is available."""
        return capability in _CAN and capability not in self._without

    def need(self, capability: str, field: str = "") -> None:
        """`Unsupported`, unless the capability is there."""
        if not self.has(capability):
            raise Unsupported(backend=self.name, operation=capability, field=field)

    def check_network(self, policy: NetworkPolicy) -> None:
        """`Unsupported` for any policy but none."""
        wanted = can.NETWORK_UNRESTRICTED if policy.is_unrestricted else can.NETWORK_HOSTS
        self.need(can.NETWORK_NONE if policy.is_none else wanted, "network")

    def provision(self, spec: SandboxSpec) -> FakeSandbox:
        return self._make(spec, None)

    def prewarm(self, spec: SandboxSpec) -> FakeWarm:
        self.need(can.PREWARM)
        self.check(spec)
        with self._lock:
            warm = FakeWarm(self, self._new_id(spec), spec.template)
            self._warm[warm.id] = warm
        return warm

    def discarded(self, warm: FakeWarm) -> None:
        """A warm sandbox was claimed or ended."""
        with self._lock:
            self._warm.pop(warm.id, None)

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> FakeSandbox:
        self.need(can.RESTORE)
        saved = self._saved(snapshot_id)
        again = spec or replace(saved.spec, id=None, secrets=secrets or {})
        return self._make(again, saved.root)

    def snapshots(self) -> list[Snapshot]:
        with self._lock:
            return [saved.snapshot for saved in self._snapshots.values()]

    def delete_snapshot(self, snapshot_id: str) -> None:
        with self._lock:
            self._saved(snapshot_id)
            del self._snapshots[snapshot_id]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            living = list(self._sandboxes.values())
            waiting = list(self._warm.values())
        for sandbox in reversed(living):
            sandbox.terminate()
        for warm in waiting:
            warm.discard()

    def save(
        self,
        session_id: str,
        spec: SandboxSpec,
        root: MemoryDirectory,
        metadata: Mapping[str, str],
    ) -> Snapshot:
        """Keep a copy of a sandbox's tree."""
        quota = Quota()
        copy = root.copy(quota)
        snapshot = Snapshot(
            id=new_id("snap"),
            session_id=session_id,
            backend=self.name,
            created_at=time.time(),
            size_bytes=quota.used_bytes,
            metadata=FrozenMap(metadata),
        )
        with self._lock:
            self._snapshots[snapshot.id] = _Saved(snapshot, replace(spec, secrets={}), copy)
        return snapshot

    def forget(self, sandbox_id: str) -> None:
        """A sandbox was terminated."""
        with self._lock:
            self._sandboxes.pop(sandbox_id, None)

    def _saved(self, snapshot_id: str) -> _Saved:
        with self._lock:
            if snapshot_id not in self._snapshots:
                raise SnapshotNotFound(f"no snapshot {snapshot_id!r}")
            return self._snapshots[snapshot_id]

    def _make(self, spec: SandboxSpec, root: MemoryDirectory | None) -> FakeSandbox:
        self.check(spec)
        degraded = unsupported_limits(spec, self)
        quota = Quota(spec.limits.disk_bytes, spec.limits.inodes)
        tree = root.copy(quota) if root else make_root(quota, PROGRAMS)
        with self._lock:
            sandbox_id = self._new_id(spec)
            sandbox = FakeSandbox(self, spec, sandbox_id, tree, degraded)
            self._sandboxes[sandbox_id] = sandbox
        return sandbox

    def _new_id(self, spec: SandboxSpec) -> str:
        if self._is_closed:
            raise BackendUnavailable("the backend is closed")
        if spec.id in self._sandboxes or spec.id in self._warm:
            raise InvalidRequest(f"{spec.id} is in use", field="id")
        return spec.id or new_id(self.name)

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what the fake does not do."""
        if spec.profile not in self.profile_names:
            known = ", ".join(self.profile_names)
            raise InvalidRequest(f"no profile {spec.profile!r}", field="profile", hint=known)
        if spec.image is not None:
            raise Unsupported(
                "the fake backend has no images",
                backend=self.name,
                operation="image",
                field="image",
            )
        if spec.template != "default":
            raise InvalidRequest(f"no template {spec.template!r}", field="template")
        if spec.tier != specs.LIGHT:
            raise Unsupported(backend=self.name, operation=f"tier {spec.tier}", field="tier")
        if spec.secrets:
            self.need(can.SECRETS, "secrets")
        if spec.memory_dir:
            self.need(can.MOUNT, "memory_dir")
        if spec.deny:
            self.need(can.DENIED_PATHS, "deny")
        self.check_network(spec.network)
