"""What backends have in common that start an agent inside walls which are not ours, and keep nothing of it."""

from __future__ import annotations

import os
import resource
from _thread import allocate_lock

from ...errors import InvalidRequest, NetworkPolicyError, Unsupported
from ...model import capabilities as can
from ...model.ids import new_id
from ...model.mount import ALWAYS_THERE, READ_WRITE
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, LIGHT, OS_HARDENED, UNRESTRICTED, SandboxSpec
from ...policy.filters import load_filter
from . import identity
from .base import LocalBackend
from .session import are_own, check_least, is_own, session_root
from .sizes import DEFAULT_OPEN_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

    from ...egress.client import Egress
    from ...guest.settings import Settings
    from ...model.snapshot import Snapshot
    from .guest import GuestSandbox

AGENT = "/.ringfence"
LEAST_OPEN_FILES = (64, "the agent lives under it too")
_ELSEWHERE = ("secrets", "mounts", "memory_dir", "deny", "python_env")


class AgentBackend(LocalBackend):
    """The part of `Backend` that is the same for all of them.

    Args:
        egress: Who moves the data of forwarded connections; None is the process that this one shares.

    Attributes:
        held: Limits that the walls enforce, by their names in `Limits`.
        least: Of a limit: the least that works, and why.
        has_own_mounts: Whether directories of the session's may be anywhere.
        not_strong, not_root, no_rules, no_limits: What is said to who asks for that.
    """

    name: str
    held: tuple[str, ...] = ()
    least: Mapping[str, tuple[int, str]] = {"open_files": LEAST_OPEN_FILES}
    has_own_mounts = False
    not_strong = not_root = no_rules = no_limits = ""

    def __init__(self, egress: Callable[[], Egress] | None) -> None:
        super().__init__(egress)
        self._lock = allocate_lock()
        self._live: dict[str, GuestSandbox] = {}
        self._making: set[str] = set()

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what this backend does not do, before anything is made."""
        if spec.tier != LIGHT:
            raise self.refusal(f"tier {spec.tier}", "tier", self.not_strong)
        if spec.template != "default":
            raise InvalidRequest(f"unknown template {spec.template!r}", field="template")
        if spec.profile not in (OS_HARDENED, DEBUG, UNRESTRICTED):
            raise InvalidRequest(f"unknown profile {spec.profile!r}", field="profile")
        if identity.uid_of(spec.user) == 0 and not self.root_is_nobody():
            raise self.refusal("user root", "user", self.not_root)
        if spec.network.is_unrestricted:
            raise self.refusal("network unrestricted", "network")
        if not spec.network.is_none:
            raise NetworkPolicyError(self.no_rules, field="network")
        for name in _ELSEWHERE:
            allowed = name == "mounts" and self.has_own_mounts and are_own(spec.mounts)
            if getattr(spec, name) and not allowed:
                raise self.refusal(name, name)
        self._check_limits(spec)

    def root_is_nobody(self) -> bool:
        """Whether root inside is nobody in particular on the host."""
        return False

    def _check_limits(self, spec: SandboxSpec) -> None:
        for name, capability in can.LIMITED_BY.items():
            allowed = {capability, "*"}.intersection(spec.allow_degraded)
            if getattr(spec.limits, name) is not None and name not in self.held and not allowed:
                raise self.refusal(capability, f"limits.{name}", self.no_limits)
        if spec.limits.idle_timeout_s is not None:
            raise self.refusal("limit idle_timeout_s", "limits.idle_timeout_s")
        check_least(spec, self.least)

    def refusal(self, operation: str, field: str, why: str = "") -> Unsupported:
        return Unsupported(why, backend=self.name, operation=operation, field=field)

    def degraded(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Limits that were asked for, and allowed not to hold."""
        asked = [n for n in can.LIMITED_BY if getattr(spec.limits, n) is not None]
        return tuple(can.LIMITED_BY[n] for n in asked if n not in self.held)

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(self.name)
        with self._lock:
            if spec.id in self._live or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
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
    ) -> NoReturn:
        del snapshot_id, spec, secrets
        raise self.refusal("restore", "")

    def beside(self, state_dir: str) -> NoReturn:
        """Another one, with snapshots of its own: there are none."""
        del state_dir
        raise self.refusal("snapshot", "")

    def snapshots(self) -> list[Snapshot]:
        return []

    def delete_snapshot(self, snapshot_id: str) -> None:
        del snapshot_id
        raise self.refusal("snapshot", "")

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.terminate()


def settings(
    spec: SandboxSpec,
    uid: int,
    *,
    filtered: bool,
    covered: Sequence[str] = (),
    processes: int = 0,
) -> Settings:
    """What the agent is told first, where the host's kernel is its own.

    Args:
        filtered: Whether it is to install our own system-call filter, on top of the launcher's.
        covered: Behind walls of its own: see `Settings`.
        processes: What the user may have, where it is nobody else's; 0: the cgroup alone holds them.
    """
    files = spec.limits.open_files or DEFAULT_OPEN_FILES
    filtered = filtered and wants_filter(spec)
    key = int.from_bytes(os.urandom(8), "big") or 1
    tracing = spec.profile == DEBUG
    limits = {
        resource.RLIMIT_CORE: 1,  # with 0, a core_pattern with a pipe would still run as host root
        resource.RLIMIT_NOFILE: files,
        **({resource.RLIMIT_NPROC: processes} if processes else {}),
    }
    return {
        "own_kernel": False,
        "uid": uid,
        "id_map": "",
        "pids": 0,
        "memory_bytes": 0,
        "counts_cpu": False,
        "rlimits": [(which, most, most) for which, most in limits.items()],
        # No host directory with sockets in it can be mounted, so that Unix sockets do no harm.
        "seccomp": load_filter(allow_af_unix=True, debug=tracing, tag_key=key) if filtered else b"",
        "tag_key": key if filtered else 0,
        "covered": list(covered),
        "place": AGENT,
    }


def wants_filter(spec: SandboxSpec) -> bool:
    """Whether its profile has a system-call filter. Under ours no process leaves its exec's tree."""
    return spec.profile != UNRESTRICTED


def own_mounts(spec: SandboxSpec) -> list[ResolvedMount]:
    """What a sandbox has, where a host's directory cannot be mounted."""
    targets = [*ALWAYS_THERE.values(), *(each.target for each in spec.mounts)]
    return [ResolvedMount(target, READ_WRITE) for target in targets]


def make_workdir(sandbox: GuestSandbox) -> None:
    """The session's root; where it cannot be made, the sandbox has ended."""
    root = session_root(sandbox.spec)
    if is_own(root):
        try:
            sandbox.files.make_dir(root)
        except BaseException:
            sandbox.terminate()
            raise
