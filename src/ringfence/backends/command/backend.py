"""The command backend: sandboxes under an outer launcher, with an agent inside that starts programs."""

from __future__ import annotations

import os
import resource
import subprocess
from _thread import allocate_lock

from ...errors import InvalidRequest, IsolationError, NetworkPolicyError, SandboxLost, Unsupported
from ...launcher import wire
from ...model import capabilities as can
from ...model.ids import new_id
from ...model.mount import ALWAYS_THERE, READ_WRITE
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, LIGHT, OS_HARDENED, UNRESTRICTED, SandboxSpec
from ..local import agent_code, identity
from ..local.answers import Refused, answer
from ..local.host import host
from ..local.inside import first_inside
from ..local.session import is_own, session_root
from ..local.sizes import DEFAULT_OPEN_FILES
from . import launchers, place
from .sandbox import CommandSandbox, end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...egress.client import Egress
    from ...guest.settings import Settings
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ..protocol import WarmSandbox

_READY_S = 60.0
_AGENT = "/.ringfence"
_LEAST_OPEN_FILES = 64


class CommandBackend:
    """See `Backend`. As host root, a launcher runs as a user that nobody else is.

    Args:
        launcher: What confines, and how.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    def __init__(
        self,
        launcher: launchers.Launcher | None = None,
        *,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        self.launcher = launcher or launchers.bubblewrap()
        self.name = self.launcher.name
        self._egress = egress
        self._lock = allocate_lock()
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, CommandSandbox] = {}
        self._making: set[str] = set()
        self._swept = False

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> CommandSandbox:
        self._check(spec)
        self.launcher.check()
        sandbox_id = self._new_id(spec)
        try:
            return self._make(spec, sandbox_id)
        finally:
            self._making.discard(sandbox_id)

    def _check(self, spec: SandboxSpec) -> None:
        """Refuse what launchers do not do, before anything is made."""
        if spec.tier != LIGHT:
            raise self._refusal(f"tier {spec.tier}", "tier", "a launcher shares the host's kernel")
        if spec.template != "default":
            raise InvalidRequest(f"unknown template {spec.template!r}", field="template")
        if spec.profile not in (OS_HARDENED, DEBUG, UNRESTRICTED):
            raise InvalidRequest(f"unknown profile {spec.profile!r}", field="profile")
        uid = identity.uid_of(spec.user)
        if uid == 0:
            raise self._refusal("user root", "user", "a launcher maps one user, who is not root")
        if spec.network.is_unrestricted:
            raise self._refusal("network unrestricted", "network")
        if not spec.network.is_none:
            raise NetworkPolicyError(
                f"{self.name} does not go through the egress engine", field="network"
            )
        for name in ("secrets", "mounts", "memory_dir", "deny", "python_env"):
            if getattr(spec, name):
                raise self._refusal(name, name)
        self._check_limits(spec)

    def _check_limits(self, spec: SandboxSpec) -> None:
        for name, capability in can.LIMITED_BY.items():
            wanted = getattr(spec.limits, name)
            allowed = {capability, "*"}.intersection(spec.allow_degraded)
            if wanted is not None and capability != can.OPEN_FILES_LIMIT and not allowed:
                raise self._refusal(capability, f"limits.{name}", "launchers set no limits")
        if spec.limits.idle_timeout_s is not None:
            raise self._refusal("limit idle_timeout_s", "limits.idle_timeout_s")
        if (spec.limits.open_files or DEFAULT_OPEN_FILES) < _LEAST_OPEN_FILES:
            raise InvalidRequest(
                f"must be at least {_LEAST_OPEN_FILES}: the agent lives under it too",
                field="limits.open_files",
            )

    def _refusal(self, operation: str, field: str, why: str = "") -> Unsupported:
        return Unsupported(why, backend=self.name, operation=operation, field=field)

    def degraded(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Limits that were asked for, and allowed not to hold."""
        asked = [n for n in can.LIMITED_BY if getattr(spec.limits, n) is not None]
        return tuple(can.LIMITED_BY[n] for n in asked if n != "open_files")

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(self.name)
        with self._lock:
            if spec.id in self._live or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
            self._making.add(spec.id)
        return spec.id

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> CommandSandbox:
        with self._lock:
            if not self._swept:
                place.sweep()
                self._swept = True
        uid = identity.uid_of(spec.user)
        slot = self._ids().take() if host().trusted_root else 0
        try:
            made = place.Place(uid, slot or host().uid, self.launcher.shows)
            try:
                sandbox = self._launch(spec, sandbox_id, uid, slot, made)
            except BaseException:
                made.remove()
                raise
        except BaseException:
            if slot:
                self._ids().give_back(slot)
            raise
        self._live[sandbox_id] = sandbox
        return sandbox

    def _launch(
        self, spec: SandboxSpec, sandbox_id: str, uid: int, slot: int, made: place.Place
    ) -> CommandSandbox:
        errors = os.memfd_create("launcher-says", os.MFD_CLOEXEC)
        ours, theirs = wire.socketpair()
        process: subprocess.Popen[bytes] | None = None
        try:
            wire.send(ours, _settings(spec, uid))
            words = {**made.words, "uid": str(uid)}
            process = subprocess.Popen(
                [*self.launcher.command(words, made.shown), *agent_code.argv(_AGENT)],
                stdin=theirs.fileno(),
                stdout=errors,
                stderr=errors,
                env=self.launcher.environment(words),
                cwd="/",
                start_new_session=True,
                user=slot or None,
                group=slot or None,
                extra_groups=[] if slot else None,
            )
            theirs.close()
            self._wait_for_agent(ours, errors)
            pid = first_inside(process.pid)
            if pid is None:
                raise IsolationError(
                    f"{self.name} gives no PID namespace: processes could outlive the sandbox"
                )
            sandbox = CommandSandbox(
                self, spec, sandbox_id, uid, _mounts(), ours, pid, process, made, slot
            )
        except BaseException as exc:
            ours.close()
            theirs.close()
            if process is not None:
                process.kill()
                end(process)
            if isinstance(exc, OSError) and not isinstance(exc, Refused):
                raise IsolationError(f"{self.name} did not start: {exc}") from exc
            raise
        finally:
            os.close(errors)
        _make_workdir(sandbox)
        return sandbox

    def _wait_for_agent(self, control: wire.Socket, errors: int) -> None:
        try:
            answer(control, _READY_S)
            control.settimeout(None)
        except (SandboxLost, Refused, IsolationError) as exc:
            text = os.pread(errors, 1 << 16, 0).decode("utf-8", "replace")
            said = " / ".join(line for line in text.splitlines()[-3:] if line.strip())[:1000]
            raise IsolationError(
                f"{self.name} did not start the agent: {said or exc}",
                hint="run its command by hand to see what this host allows",
            ) from exc

    def released(self, sandbox: CommandSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        if sandbox.host_ids:
            self._ids().give_back(sandbox.host_ids)
        self._live.pop(sandbox.id, None)

    def _ids(self) -> identity.HostIds:
        with self._lock:
            if self._host_ids is None:
                self._host_ids = identity.HostIds("/run/ringfence/ids", lambda _fd: None)
            return self._host_ids

    # -- the rest of the contract -------------------------------------------------------------

    def egress(self) -> Egress:
        """Who moves the data of forwarded connections."""
        if self._egress is not None:
            return self._egress()
        from ...egress.client import shared

        return shared()

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def prewarm(self, spec: SandboxSpec) -> WarmSandbox:
        self._check(spec)
        raise self._refusal("prewarm", "")

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> CommandSandbox:
        del snapshot_id, spec, secrets
        raise self._refusal("restore", "")

    def snapshots(self) -> list[Snapshot]:
        return []

    def delete_snapshot(self, snapshot_id: str) -> None:
        del snapshot_id
        raise self._refusal("snapshot", "")

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.terminate()
        if self._host_ids is not None:
            self._host_ids.close()
            self._host_ids = None


def _settings(spec: SandboxSpec, uid: int) -> Settings:
    """What the agent is told first."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: spec.limits.open_files or DEFAULT_OPEN_FILES,
    }
    return {
        "own_kernel": False,
        "uid": uid,
        "id_map": "",
        "pids": 0,
        "memory_bytes": 0,
        "counts_cpu": False,
        "rlimits": [(which, value, value) for which, value in limits.items()],
        "place": _AGENT,
    }


def _mounts() -> list[ResolvedMount]:
    return [ResolvedMount(target, READ_WRITE) for target in ALWAYS_THERE.values()]


def _make_workdir(sandbox: CommandSandbox) -> None:
    root = session_root(sandbox.spec)
    if is_own(root):
        try:
            sandbox.files.make_dir(root)
        except BaseException:
            sandbox.terminate()
            raise
