"""The unconfined backend: makes sandboxes that are directories, and keeps their snapshots."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...backends.optional import Selective
from ...errors import (
    BackendUnavailable,
    InvalidRequest,
    LifecycleError,
    SnapshotNotFound,
    Unsupported,
)
from ...model import capabilities as can
from ...model import spec as specs
from ...model.base.checks import FrozenMap
from ...model.base.ids import new_id
from ...model.session import Snapshot
from . import processes
from .sandbox import UnconfinedSandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...model.net.network import NetworkPolicy
    from ...model.spec import SandboxSpec

_CAN = (
    can.NETWORK_UNRESTRICTED,
    can.SNAPSHOT,
    can.RESTORE,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.PREWARM,
    can.PTY,
)
_HOST = "its processes are ordinary processes of the host"
_NO_LIMIT = "it limits nothing"
_CANNOT = {
    can.LOCAL_PROCESS_SANDBOX: _HOST,
    can.NETWORK_NONE: "its processes reach what the host reaches",
    can.NETWORK_HOSTS: "its processes reach what the host reaches",
    can.NETWORK_OPEN: "its network cannot change",
    can.NETWORK_CHANGE: "its network cannot change",
    can.CONNECT: "its servers are the host's",
    can.MOUNT: _HOST,
    can.ATTACH: _HOST,
    can.PROTECTED_PATHS: _HOST,
    can.DENIED_PATHS: _HOST,
    can.SECRETS: _HOST,
    can.IMAGE: _HOST,
    can.MEMORY_SNAPSHOT: "it does not save memory",
    **dict.fromkeys(can.LIMITED_BY.values(), _NO_LIMIT),
}
_PROTECTIONS = (
    *("namespaces", "host_identity", "capabilities", "no_new_privs", "seccomp", can.LANDLOCK),
    *("network", "protected_paths"),
)
_REFUSED = {
    "image": can.IMAGE,
    "mounts": can.MOUNT,
    "memory_dir": can.MOUNT,
    "workdir": can.MOUNT,
    "protect": can.PROTECTED_PATHS,
    "deny": can.DENIED_PATHS,
    "secrets": can.SECRETS,
    "python_env": can.MOUNT,
}
"""Fields of a spec, and the capability that each takes."""


@dataclass(frozen=True)
class _Saved:
    snapshot: Snapshot
    spec: SandboxSpec


class UnconfinedBackend(Selective):
    """Sandboxes of ordinary host processes, for tests; see `Backend`.

    A spec must ask for what it gets: profile `unrestricted` and an unrestricted network. A test whose
    subject is above the backend may widen both in a subclass.

    Attributes:
        lacks: Capabilities that it does not have, and why. A subclass may add some.
        sandboxes, prebuilt, saved: What there is now, by id.
    """

    name = "unconfined"
    tiers = (specs.LIGHT,)
    profile_names: tuple[str, ...] = (specs.UNRESTRICTED,)
    lacks: ClassVar[Mapping[str, str]] = _CANNOT

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.sandboxes: dict[str, UnconfinedSandbox] = {}
        self.prebuilt: dict[str, UnconfinedPrebuilt] = {}
        self.saved: dict[str, _Saved] = {}
        self._is_closed = False
        self._directory = ""
        self._removal: weakref.finalize[..., UnconfinedBackend] | None = None

    def report(self) -> can.BackendReport:
        able = [can.Capability(name, True) for name in self._able]
        lacking = [can.Capability(name, False, why) for name, why in self.lacks.items()]
        return can.BackendReport(
            backend=self.name,
            available=True,
            tiers=self.tiers,
            capabilities=(*able, *lacking),
            protections=tuple(can.Protection(each, can.MISSING, _HOST) for each in _PROTECTIONS),
            profiles=self.profile_names,
        )

    @property
    def _able(self) -> list[str]:
        return [name for name in (*_CAN, *_CANNOT) if name not in self.lacks]

    def need(self, capability: str, field: str = "") -> None:
        """Raise `Unsupported`, unless the capability is there."""
        if capability in self.lacks:
            raise self.refusal(capability, field)

    def refusal(self, operation: str, field: str = "") -> Unsupported:
        """Make the error for what it cannot do."""
        why = f"no {operation}: {self.lacks.get(operation, _HOST)}"
        return Unsupported(why, backend=self.name, operation=operation, field=field)

    def check_network(self, policy: NetworkPolicy) -> None:
        """Refuse a policy that would have to be enforced."""
        if not policy.is_unrestricted:
            self.need(can.NETWORK_NONE if policy.is_none else can.NETWORK_HOSTS, "network")

    def check_user(self, user: str | None) -> None:
        """Refuse any user but the one that this process runs as, whom the default means too."""
        if user not in (None, "sandbox", str(os.geteuid())):
            raise InvalidRequest(f"there is no user {user!r}: {_HOST}", field="user")

    def check(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Refuse what cannot be had; return the limits that may be missing, and are."""
        if spec.profile not in self.profile_names:
            known = ", ".join(self.profile_names)
            raise InvalidRequest(f"no profile {spec.profile!r}", field="profile", hint=known)
        if spec.template != "default":
            raise InvalidRequest(f"no template {spec.template!r}", field="template")
        if spec.tier != specs.LIGHT:
            raise self.refusal(f"tier {spec.tier}", "tier")
        for field, capability in _REFUSED.items():
            if getattr(spec, field):
                self.need(capability, field)
        self.check_network(spec.network)
        self.check_user(spec.user)
        asked = [n for n in can.LIMITED_BY if getattr(spec.limits, n) is not None]
        for name in asked:
            if not {can.LIMITED_BY[name], "*"}.intersection(spec.allow_degraded):
                self.need(can.LIMITED_BY[name], f"limits.{name}")
        return tuple(can.LIMITED_BY[name] for name in asked)

    def provision(self, spec: SandboxSpec) -> UnconfinedSandbox:
        return self._make(spec, None)

    def prewarm(self, spec: SandboxSpec) -> UnconfinedPrebuilt:
        self.need(can.PREWARM)
        self.check(spec)
        with self._lock:
            made = UnconfinedPrebuilt(self, self._new_id(spec))
            self.prebuilt[made.id] = made
        return made

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> UnconfinedSandbox:
        self.need(can.RESTORE)
        taken_under = self._saved(snapshot_id).spec
        again = spec or replace(taken_under, id=None, secrets=secrets or {})
        return self._make(again, self._content(snapshot_id))

    def snapshots(self) -> list[Snapshot]:
        with self._lock:
            return [saved.snapshot for saved in self.saved.values()]

    def delete_snapshot(self, snapshot_id: str) -> None:
        with self._lock:
            self._saved(snapshot_id)
            shutil.rmtree(self._content(snapshot_id))
            del self.saved[snapshot_id]
            self._tidy()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            live, waiting = list(self.sandboxes.values()), list(self.prebuilt.values())
        for sandbox in live:
            sandbox.terminate()
        for each in waiting:
            each.discard()
        for snapshot_id in list(self.saved):
            self.delete_snapshot(snapshot_id)  # nobody could restore it any more

    def save(
        self, session_id: str, spec: SandboxSpec, root: str, metadata: Mapping[str, str]
    ) -> Snapshot:
        """Keep a copy of a sandbox's files."""
        snapshot_id = new_id("snap")
        content = self._content(snapshot_id)
        shutil.copytree(root, content, symlinks=True)
        sizes = [
            os.lstat(f"{directory}/{name}").st_size
            for directory, _, names in os.walk(content)
            for name in names
        ]
        saved = FrozenMap(metadata)
        now = time.time()
        made = Snapshot(snapshot_id, session_id, self.name, now, sum(sizes), metadata=saved)
        with self._lock:
            self.saved[snapshot_id] = _Saved(made, spec)
        return made

    def forget(self, sandbox_id: str) -> None:
        """Strike out a sandbox that was terminated."""
        with self._lock:
            self.sandboxes.pop(sandbox_id, None)
            self._tidy()

    def _saved(self, snapshot_id: str) -> _Saved:
        with self._lock:
            if snapshot_id not in self.saved:
                raise SnapshotNotFound(f"no snapshot {snapshot_id!r}")
            return self.saved[snapshot_id]

    def _make(self, spec: SandboxSpec, content: str | None) -> UnconfinedSandbox:
        degraded = self.check(spec)
        with self._lock:
            sandbox_id = self._new_id(spec)
            directory = f"{self._place()}/{sandbox_id}"
            if content is not None:
                shutil.copytree(content, f"{directory}/root", symlinks=True)
            sandbox = UnconfinedSandbox(self, spec, sandbox_id, directory, degraded)
            self.sandboxes[sandbox_id] = sandbox
        return sandbox

    def _new_id(self, spec: SandboxSpec) -> str:
        if self._is_closed:
            raise BackendUnavailable("the backend is closed")
        if spec.id in self.sandboxes or spec.id in self.prebuilt:
            raise InvalidRequest(f"{spec.id} is in use", field="id")
        return spec.id or new_id(self.name)

    def _content(self, snapshot_id: str) -> str:
        return f"{self._place()}/.saved/{snapshot_id}"

    def _place(self) -> str:
        """The directory of all that there is now; there is none where there is nothing."""
        with self._lock:
            if self._removal is None or not self._removal.alive:
                self._directory = os.path.realpath(tempfile.mkdtemp(prefix="ringfence-unconfined-"))
                self._removal = weakref.finalize(self, _remove, self._directory, os.getpid())
            return self._directory

    def _tidy(self) -> None:
        if not self.sandboxes and not self.saved and self._removal is not None:
            self._removal()


class UnconfinedPrebuilt:
    """A prebuilt sandbox: only an id, since nothing takes time to build; see `WarmSandbox`."""

    def __init__(self, backend: UnconfinedBackend, sandbox_id: str) -> None:
        self.id, self.alive = sandbox_id, True
        self._backend = backend

    def fits(self, spec: SandboxSpec) -> bool:
        self._backend.check(spec)
        return True

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> UnconfinedSandbox:
        if not self.alive:
            raise LifecycleError(f"{self.id} was already claimed or discarded")
        self.discard()
        if spec.id not in (None, self.id):
            raise InvalidRequest("this prebuilt sandbox does not fit the spec", field="id")
        if meanwhile is not None:
            meanwhile()
        return self._backend.provision(replace(spec, id=self.id))

    def discard(self) -> None:
        self.alive = False
        self._backend.prebuilt.pop(self.id, None)


def _remove(directory: str, owner: int) -> None:
    """Remove what is left of a backend that was not closed; a forked child leaves it alone."""
    if os.getpid() == owner:
        if set(os.listdir(directory)) - {".saved"}:
            processes.send_all(f"{directory}/", signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
