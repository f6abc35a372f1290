"""The Docker backend: one hardened container per sandbox, whose PID 1 is an agent of ours."""

from __future__ import annotations

import os
import resource
import select
import shutil
import socket
import tempfile
from _thread import allocate_lock

from ...errors import (
    BackendUnavailable,
    InvalidRequest,
    IsolationError,
    NetworkPolicyError,
    SandboxLost,
    Unsupported,
)
from ...launcher import wire
from ...model import capabilities as can
from ...model.ids import new_id
from ...model.mount import ALWAYS_THERE, READ_WRITE
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, LIGHT, OS_HARDENED, UNRESTRICTED, SandboxSpec
from ..local import agent_code, identity, template
from ..local.answers import Refused, answer
from ..local.host import host
from ..local.session import is_below, is_own, session_root
from ..local.sizes import sizes
from . import engine, image
from .sandbox import DockerSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ...egress.client import Egress
    from ...guest.settings import Settings
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ..local.sizes import Sizes
    from ..protocol import WarmSandbox

NAME = "docker"
LABEL = "ringfence.sandbox"
_AGENT = "/.ringfence"
_READY_S = 60.0
HELD = ("memory_bytes", "pids", "cpus", "open_files")  # limits that the engine enforces
_LEAST = {
    "open_files": (64, "the agent lives under it too"),
    "memory_bytes": (32 << 20, "the agent lives in it too"),
}


class DockerBackend:
    """See `Backend`.

    Args:
        engine_host: Such as `unix:///run/docker.sock`; None is what the environment says.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    name = NAME

    def __init__(
        self, engine_host: str | None = None, *, egress: Callable[[], Egress] | None = None
    ) -> None:
        self._engine_host, self._egress = engine_host, egress
        self._lock = allocate_lock()
        self._engine: Any = None
        self._live: dict[str, DockerSandbox] = {}
        self._making: set[str] = set()

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> DockerSandbox:
        self._check(spec)
        sandbox_id = self._new_id(spec)
        try:
            sandbox = self._make(spec, sandbox_id)
            self._live[sandbox_id] = sandbox
            return sandbox
        finally:
            self._making.discard(sandbox_id)

    def _check(self, spec: SandboxSpec) -> None:
        """Refuse what this backend does not do, before anything is made."""
        if spec.tier != LIGHT:
            raise self._refusal(f"tier {spec.tier}", "tier", "a container shares the host's kernel")
        if spec.template != "default":
            raise InvalidRequest(f"unknown template {spec.template!r}", field="template")
        if spec.profile not in (OS_HARDENED, DEBUG, UNRESTRICTED):
            raise InvalidRequest(f"unknown profile {spec.profile!r}", field="profile")
        if identity.uid_of(spec.user) == 0:
            raise self._refusal("user root", "user", "root in a container is the host's root")
        if spec.network.is_unrestricted:
            raise self._refusal("network unrestricted", "network")
        if not spec.network.is_none:
            raise NetworkPolicyError(
                "containers do not go through the egress engine", field="network"
            )
        for name in ("secrets", "mounts", "memory_dir", "deny", "python_env"):
            if getattr(spec, name):
                raise self._refusal(name, name)
        self._check_limits(spec)

    def _check_limits(self, spec: SandboxSpec) -> None:
        for name, capability in can.LIMITED_BY.items():
            allowed = {capability, "*"}.intersection(spec.allow_degraded)
            if getattr(spec.limits, name) is not None and name not in HELD and not allowed:
                raise self._refusal(capability, f"limits.{name}")
        if spec.limits.idle_timeout_s is not None:
            raise self._refusal("limit idle_timeout_s", "limits.idle_timeout_s")
        for name, (least, why) in _LEAST.items():
            wanted = getattr(spec.limits, name)
            if wanted is not None and wanted < least:
                raise InvalidRequest(f"must be at least {least}: {why}", field=f"limits.{name}")

    def _refusal(self, operation: str, field: str, why: str = "") -> Unsupported:
        return Unsupported(why, backend=NAME, operation=operation, field=field)

    def degraded(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Limits that were asked for, and allowed not to hold."""
        asked = [n for n in can.LIMITED_BY if getattr(spec.limits, n) is not None]
        return tuple(can.LIMITED_BY[n] for n in asked if n not in HELD)

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(NAME)
        with self._lock:
            if spec.id in self._live or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
            self._making.add(spec.id)
        return spec.id

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> DockerSandbox:
        client, uid = self.client(), identity.uid_of(spec.user)
        place = tempfile.mkdtemp(prefix="ringfence-docker-", dir="/var/tmp")
        container: Any = None
        from docker.errors import DockerException

        try:
            listener = _furnish(place)
            with listener:
                container = client.containers.create(**self._options(spec, sandbox_id, uid, place))
                container.start()
                control = _accept(listener, container)
            wire.send(control, _settings(spec, uid))
            _wait_for_agent(control, container)
            container.reload()
            sandbox = DockerSandbox(
                self,
                spec,
                sandbox_id,
                uid,
                [ResolvedMount(target, READ_WRITE) for target in ALWAYS_THERE.values()],
                control,
                container.attrs["State"]["Pid"],
                container,
                place,
            )
        except BaseException as exc:
            _remove(container, place)
            if isinstance(exc, DockerException):
                raise IsolationError(f"the engine did not start the container: {exc}") from exc
            raise
        _make_workdir(sandbox)
        return sandbox

    def _options(self, spec: SandboxSpec, sandbox_id: str, uid: int, place: str) -> dict[str, Any]:
        """What the engine is told: nothing that it would give by itself is left to it."""
        from docker.types import LogConfig, Ulimit

        size: Sizes = sizes(spec, host())
        files = Ulimit(name="nofile", soft=size.open_files, hard=size.open_files)
        return {
            "image": image.image_of(self.client(), uid),
            "command": _agent_argv(),
            "user": f"{uid}:{uid}",
            "hostname": template.HOSTNAME,
            "working_dir": "/",
            "environment": {},
            "labels": {LABEL: sandbox_id},
            "network_mode": "none",
            "ipc_mode": "private",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "mem_limit": size.memory_bytes,
            "memswap_limit": size.memory_bytes,
            "pids_limit": size.pids + 1,
            "nano_cpus": int(spec.limits.cpus * 1e9) if spec.limits.cpus else None,
            "ulimits": [files, Ulimit(name="core", soft=0, hard=0)],
            "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "64k"}),
            "restart_policy": {"Name": "no"},
            "tmpfs": _own_workdir(spec, uid),
            "volumes": {
                **image.shown(uid),
                **{
                    source: {"bind": t, "mode": "ro"}
                    for source, t, _ in agent_code.interpreter()[1]
                },
                place: {"bind": _AGENT, "mode": "ro"},
            },
        }

    def client(self) -> Any:
        """The engine.

        Raises:
            BackendUnavailable: There is none that can be used.
        """
        with self._lock:
            if self._engine is None:
                self._engine = engine.connect(self._engine_host)
            return self._engine

    def released(self, sandbox: DockerSandbox) -> None:
        """Called by a sandbox whose PID 1 has ended."""
        _remove(sandbox.container, sandbox.place)
        self._live.pop(sandbox.id, None)

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
    ) -> DockerSandbox:
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
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None


def _furnish(place: str) -> socket.socket:
    """The agent's file, and the socket that it will connect to."""
    os.chmod(place, 0o755)
    with open(f"{place}/{agent_code.NAME}", "xb") as file:
        file.write(agent_code.packed())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(f"{place}/control")
    os.chmod(f"{place}/control", 0o666)  # the container's user is another
    listener.listen(1)
    return listener


def _agent_argv() -> list[str]:
    """The agent, after it has taken the socket for its standard input."""
    python, *options, code = agent_code.argv(_AGENT)
    connect = (
        "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"s.connect('{_AGENT}/control'); os.dup2(s.fileno(), 0); s.close(); "
    )
    return [python, *options, connect + code]


def _accept(listener: socket.socket, container: Any) -> wire.Socket:
    """The first to connect is the agent: nothing else runs in the container yet."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not poll.poll(_READY_S * 1000):
        raise IsolationError(f"the agent did not start: {_said(container)}")
    accepted, _address = listener.accept()
    return wire.adopt(accepted.detach())


def _wait_for_agent(control: wire.Socket, container: Any) -> None:
    try:
        answer(control, _READY_S)
        control.settimeout(None)
    except (SandboxLost, Refused) as exc:
        control.close()
        raise IsolationError(f"the agent did not start: {_said(container)}") from exc


def _said(container: Any) -> str:
    text = container.logs(tail=3).decode("utf-8", "replace").strip()
    return text.replace("\n", " / ")[:1000] or "without a word"


def _remove(container: Any, place: str) -> None:
    from docker.errors import DockerException

    if container is not None:
        try:
            container.remove(force=True)
        except DockerException:
            pass  # the engine is gone, and with it what it ran; or it was removed
    shutil.rmtree(place, ignore_errors=True)


def _settings(spec: SandboxSpec, uid: int) -> Settings:
    """What the agent is told first."""
    size = sizes(spec, host())
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: size.open_files}
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


def _own_workdir(spec: SandboxSpec, uid: int) -> dict[str, str]:
    """A session's root outside of what the template has: the engine's own / is root's."""
    root = session_root(spec)
    if not is_own(root) or any(is_below(root, place) for place in image.OWN):
        return {}
    return {"/" + root.split("/")[1]: f"uid={uid},gid={uid},mode=0755,exec"}


def _make_workdir(sandbox: DockerSandbox) -> None:
    root = session_root(sandbox.spec)
    if is_own(root):
        try:
            sandbox.files.make_dir(root)
        except BaseException:
            sandbox.terminate()
            raise


__all__ = ["BackendUnavailable", "DockerBackend"]
