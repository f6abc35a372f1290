"""Shared parts of backends that start an agent inside somebody else's isolation and persist nothing."""

from __future__ import annotations

import os
import resource
from _thread import allocate_lock

from ....errors import InvalidRequest, NetworkPolicyError, RingfenceError, Unsupported
from ....guest.isolation import STEP
from ....launcher.spawn import JAILER
from ....model import capabilities as can
from ....model.base.ids import new_id
from ....model.mount import ALWAYS_THERE, READ_WRITE
from ....model.session import ResolvedMount
from ....model.spec import DEBUG, LIGHT, OS_HARDENED, UNRESTRICTED, SandboxSpec
from ....policy.filters import load_filter
from ....policy.protected import check_names
from ...optional import ProfileStore, Replicable
from ..base import LocalBackend
from ..host import identity
from ..host.facts import host
from ..launched import Launched
from ..network import check_given_secrets
from ..session import (
    all_mounts,
    check_idle_timeout,
    check_least,
    check_sources,
    is_own,
    session_root,
)
from ..sizes import DEFAULT_OPEN_FILES, of_user, sizes
from .contained import AGENT, NO_NAMESPACE_FDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from typing import Any, NoReturn

    from ....egress.host.client import Egress
    from ....guest.room import Room
    from ....guest.settings import Settings
    from ....model.session import Snapshot
    from ....policy.seccomp import SeccompPolicy
    from ...protocol import Backend
    from ..answers import Refused
    from .contained import ContainedSandbox
    from .guest import GuestSandbox

_PROFILES = (OS_HARDENED, DEBUG, UNRESTRICTED)
LEAST_OPEN_FILES = (64, "the agent lives under it too")
_NO_HOST_NETWORK = (
    "it never shares the host's network: list the destinations, or use the native backend"
)
_ELSEWHERE = ("secrets", "mounts", "memory_dir", "deny", "python_env")
_LETS_IN = ("python_env",)  # that is left, where helpers of the host's may go in


class NoIsolationError(Exception):
    """The agent may not set up isolation of its own here; the message says what was refused."""


class AgentBackend(LocalBackend, ProfileStore, Replicable):
    """The part of `Backend` that is the same for all of them.

    Args:
        egress: Who moves the data of forwarded connections; None is the process that this one shares.

    Attributes:
        held: Limits that the isolation enforce, by their names in `Limits`.
        lets_in: Whether helpers of the host's may go in: for mounts and rules of the network.
        saves: Whether they may save what is there as well.
        not_strong, not_root, no_rules, no_limits: What is said to who asks for that.
        no_images: The same of images; empty where they are shown.
    """

    name: str
    tiers = (LIGHT,)
    held: tuple[str, ...] = ()
    least: Mapping[str, tuple[int, str]] = {"open_files": LEAST_OPEN_FILES}
    lets_in = saves = False
    not_strong = not_root = no_rules = no_limits = no_images = ""

    def __init__(self, egress: Callable[[], Egress] | None, state_dir: str | None = None) -> None:
        super().__init__(egress, state_dir)
        self._lock = allocate_lock()
        self._jailer: Launched | None = None
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, GuestSandbox] = {}
        self._making: set[str] = set()
        self.policies: dict[str, SeccompPolicy | None] = dict.fromkeys(_PROFILES)

    @property
    def profile_names(self) -> tuple[str, ...]:
        return tuple(self.policies)

    def define_profile(self, name: str, policy: SeccompPolicy | None) -> None:
        if policy is None:
            self.policies.pop(name, None)
        else:
            self.policies[name] = policy

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what this backend does not do, before anything is made."""
        if spec.tier != LIGHT:
            raise self.refusal(f"tier {spec.tier}", "tier", self.not_strong)
        if spec.template != "default":
            raise InvalidRequest(f"unknown template {spec.template!r}", field="template")
        if spec.image is not None and self.no_images:
            raise Unsupported(
                self.no_images,
                backend=self.name,
                operation="image",
                field="image",
                hint="native, gvisor, microvm and docker start from images",
            )
        if spec.profile not in self.profile_names:
            known = ", ".join(self.profile_names)
            raise InvalidRequest(
                f"unknown profile {spec.profile!r}", field="profile", hint=f"one of {known}"
            )
        if identity.uid_of(spec.user) == 0 and not self.root_is_nobody():
            raise self.refusal("user root", "user", self.not_root)
        if spec.network.is_unrestricted:
            raise self.refusal("network unrestricted", "network", _NO_HOST_NETWORK)
        if not (spec.network.is_none or self.lets_in):
            raise NetworkPolicyError(self.no_rules, field="network")
        for name in _LETS_IN if self.lets_in else _ELSEWHERE:
            if getattr(spec, name):
                raise self.refusal(name, name)
        if spec.disk_root and (why := self.no_disk(spec)):
            raise self.refusal("disk_root", "disk_root", why)
        self._check_limits(spec)
        check_given_secrets(spec)
        check_sources(spec)
        check_names(spec.unprotect)

    def no_disk(self, spec: SandboxSpec) -> str:
        """Why files are not on the host's disk; empty where they are anyhow, as of most launchers."""
        del spec
        return ""

    def check_without_isolation(self, spec: SandboxSpec, *, restores: bool = False) -> None:
        """Refuse what takes namespaces of the agent's own, where it has none."""
        wanted = {
            "mounts": any(m.source or m.access != READ_WRITE for m in all_mounts(spec)),
            "deny": bool(spec.deny),
            "network": not spec.network.is_none,
            "secrets": bool(spec.secrets),
            "restore": restores,
        }
        for name, asked in wanted.items():
            if asked:
                raise self.refusal(name, name, NO_NAMESPACE_FDS)

    def refuses(self, spec: SandboxSpec) -> str:
        if spec.user not in ("root", "0"):
            return ""
        try:
            return "" if self.root_is_nobody() else f"no user root: {self.not_root}"
        except RingfenceError:
            return ""  # the report says why this backend cannot be had at all

    def root_is_nobody(self) -> bool:
        """True if root inside has no rights on the host."""
        return False

    def _check_limits(self, spec: SandboxSpec) -> None:
        self.refuse_limits(spec, [n for n in can.LIMITED_BY if n not in self.held], self.no_limits)
        check_idle_timeout(spec, self.name)
        check_least(spec, self.least)

    def refuse_limits(self, spec: SandboxSpec, names: Sequence[str], why: str) -> None:
        """Refuse those that are asked for, unless they may be missing."""
        for name in names:
            capability = can.LIMITED_BY[name]
            allowed = {capability, "*"}.intersection(spec.allow_degraded)
            if getattr(spec.limits, name) is not None and not allowed:
                hint = f"leave it out, or go without it: allow_degraded=[{capability!r}]"
                raise self.refusal(capability, f"limits.{name}", why, hint)

    def refusal(self, operation: str, field: str, why: str = "", hint: str = "") -> Unsupported:
        return Unsupported(why, backend=self.name, operation=operation, field=field, hint=hint)

    def degraded(self, spec: SandboxSpec, lacking: Container[str] = ()) -> tuple[str, ...]:
        """Limits that were asked for, and allowed not to hold: others, and of these what is `lacking`."""
        asked = [n for n in can.LIMITED_BY if getattr(spec.limits, n) is not None]
        return tuple(can.LIMITED_BY[n] for n in asked if n not in self.held or n in lacking)

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(self.name)
        with self._lock:
            if spec.id in self._live or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} already exists", field="id")
            self._making.add(spec.id)
        return spec.id

    def prewarm(self, spec: SandboxSpec) -> NoReturn:
        self.check(spec)
        raise self.refusal("prewarm", "")

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> ContainedSandbox:
        if not self.saves:
            raise self.refusal("restore", "")
        from dataclasses import replace

        _saved, taken_under, content = self.catalogue().open(snapshot_id)
        try:
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            return self.provision_with(again, taken_under, content)
        finally:
            os.close(content)

    def provision_with(
        self, spec: SandboxSpec, taken_under: SandboxSpec, content: int
    ) -> ContainedSandbox:
        """A sandbox with a snapshot's files.

        Args:
            taken_under: What held for who was saved.
            content: The files, as `ContainedSandbox.load` reads them.
        """
        raise NotImplementedError

    def beside(self, state_dir: str) -> Backend:
        del state_dir
        raise self.refusal("snapshot", "")

    def snapshots(self) -> list[Snapshot]:
        return super().snapshots() if self.saves else []

    def delete_snapshot(self, snapshot_id: str) -> None:
        if not self.saves:
            raise self.refusal("snapshot", "")
        super().delete_snapshot(snapshot_id)

    def jailer(self) -> Launched:
        """Return the jailer, which sends helpers in and outlives us until the host is cleaned up."""
        with self._lock:
            if self._jailer is None or self._jailer.owner != os.getpid() or not self._jailer.alive:
                self._jailer = Launched("jailer", JAILER)
            return self._jailer

    def _ids(self) -> identity.HostIds:
        with self._lock:
            if self._host_ids is None:
                self._host_ids = identity.HostIds("/run/ringfence/ids", lambda _fd: None)
            return self._host_ids

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.terminate()
        with self._lock:
            if self._jailer is not None:
                self._jailer.close()
                self._jailer = None
            if self._host_ids is not None:
                self._host_ids.close()
                self._host_ids = None


def settings(
    spec: SandboxSpec,
    uid: int,
    *,
    filtered: bool,
    covered: Sequence[str] = (),
    anew: bool = False,
    processes: int = 0,
    unix_sockets: bool = True,
    by_init: bool = False,
    room: Room | None = None,
    policy: SeccompPolicy | None = None,
    samples: tuple[int, int] = (0, 0),
) -> Settings:
    """Build the agent's settings, for an agent on the host's kernel.

    Args:
        filtered: Install our own system-call filter, on top of the launcher's.
        covered: Inside namespaces of its own: see `Settings`.
        anew: With a PID namespace of its own, too.
        processes: RLIMIT_NPROC, for a user with no processes elsewhere; 0: only the cgroup limits them.
        room: In those namespaces, the writable layer.
        unix_sockets: Unix sockets are harmless: no host directory, which may hold sockets, is mounted.
        by_init: The agent makes every connection.
        policy: System-call policy of a profile that was defined at run time.
        samples: Most processes, and bytes of memory, where the agent samples them; 0: it does not.
    """
    files = spec.limits.open_files or DEFAULT_OPEN_FILES
    filtered = filtered and wants_filter(spec)
    key = int.from_bytes(os.urandom(8), "big") or 1
    tracing = spec.profile == DEBUG
    limits = {
        resource.RLIMIT_CORE: 1,  # with 0, a core_pattern with a pipe would still run as host root
        resource.RLIMIT_NOFILE: files,
        **of_user(is_own=bool(processes)),
        **({resource.RLIMIT_NPROC: processes} if processes else {}),
    }
    return {
        "own_kernel": False,
        "uid": uid,
        "id_map": "",
        "pids": samples[0],
        "memory_bytes": samples[1],
        "counts_cpu": False,
        "rlimits": [(which, most, most) for which, most in limits.items()],
        "seccomp": _filter(
            policy, allow_af_unix=unix_sockets, by_init=by_init, debug=tracing, tag_key=key
        )
        if filtered
        else b"",
        "tag_key": key if filtered else 0,
        "covered": list(covered),
        "room": room,
        "shm_bytes": sizes(spec, host()).memory_bytes // 2 if covered and room is None else 0,
        "anew": anew,
        "place": AGENT,
    }


def _filter(policy: SeccompPolicy | None, **options: Any) -> bytes:
    if policy is None:
        return load_filter(**options)
    from ....policy.seccomp import FilterOptions, compile_filter

    return compile_filter(FilterOptions(**options), policy=policy)


def isolation_refused(refused: Refused) -> None:
    """Raises NoIsolationError where that is what an agent's first word was about."""
    if (refused.strerror or "").startswith(f"{STEP}:"):
        raise NoIsolationError(str(refused.strerror)) from refused


def wants_filter(spec: SandboxSpec) -> bool:
    """Return whether the profile has a system-call filter. Ours keeps each process in its exec's tree."""
    return spec.profile != UNRESTRICTED


def own_mounts(spec: SandboxSpec) -> list[ResolvedMount]:
    """List the mounts of a sandbox in which no host directory can be mounted."""
    targets = [*ALWAYS_THERE.values(), *(each.target for each in spec.mounts)]
    return [ResolvedMount(target, READ_WRITE) for target in targets]


def make_workdir(sandbox: GuestSandbox) -> None:
    """Make the session's root, unless it is always there."""
    root = session_root(sandbox.spec)
    if is_own(root):
        sandbox.files.make_dir(root)
