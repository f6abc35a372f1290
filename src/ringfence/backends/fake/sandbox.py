"""A sandbox of the fake backend."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from ...errors import ExecError, InvalidRequest, LifecycleError, Unsupported, file_error
from ...model import capabilities as can
from ...model.base.checks import FrozenMap
from ...model.execs import exec as execs
from ...model.granted import SandboxCapabilities
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, OUTPUTS_DIR, READ_WRITE, outermost_first
from ...model.session import ResolvedMount, Session
from ...model.state import State, check_transition
from ...model.stats import SandboxStats
from ...policy.protected import DEFAULTS, MAY_BE_MADE, WHERE
from .execs import FakeExec
from .files import FakeFiles
from .filesystem import FileSystem
from .host_nodes import host_node
from .nodes import SANDBOX_UID, Directory
from .process import Machine
from .programs import PROGRAMS, USER

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from ...model.capabilities import Protection
    from ...model.execs.exec import ExecRequest
    from ...model.mount import Mount
    from ...model.net.netlog import NetworkEvent
    from ...model.net.network import NetworkPolicy
    from ...model.session import Snapshot
    from ...model.spec import SandboxSpec
    from .backend import FakeBackend
    from .nodes import MemoryDirectory, Node

HOME = "/home/sandbox"
_USERS = (USER, str(SANDBOX_UID))
_BASE_ENV = {"HOME": HOME, "PATH": "/usr/bin:/bin", "USER": USER, "LANG": "C.UTF-8"}


class FakeSandbox:
    """A sandbox of the fake backend; see `BackendSandbox`.

    Args:
        root: Its tree, already sized and filled.
        degraded: Limits that were requested, and allowed to be weaker.
    """

    def __init__(
        self,
        backend: FakeBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        root: MemoryDirectory,
        degraded: tuple[str, ...],
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._id = sandbox_id
        self._degraded = degraded
        self._state = State.PROVISIONED
        self._lock = threading.RLock()
        self._born_s = time.monotonic()
        self._tree = FileSystem(root)
        self._machine = Machine(self._tree, PROGRAMS, spec.limits.pids)
        self._mounts: list[ResolvedMount] = []
        self._execs: list[FakeExec] = []
        self._started = 0
        self._check_user(spec.user)
        self._build()
        self.files = FakeFiles(self._tree, self._home, lambda: self._check_alive("files"))

    def _build(self) -> None:
        """Mount what is always there, then what the spec asks for."""
        memory = _host_directory(self.spec.memory_dir, "memory_dir")
        self._tree.mount(MEMORY_DIR, memory, is_writable=True)
        self._tree.mount(OUTPUTS_DIR, None, is_writable=True)
        self._mounts = [
            ResolvedMount(MEMORY_DIR, READ_WRITE, self.spec.memory_dir),
            ResolvedMount(OUTPUTS_DIR, READ_WRITE),
        ]
        for mount in outermost_first(list(self.spec.mounts)):
            self._mount(mount, f"mounts[{self.spec.mounts.index(mount)}].source")
        self._tree.make_dirs(self._home)

    @property
    def _home(self) -> str:
        return self.spec.workdir or HOME

    @property
    def session(self) -> Session:
        spec = self.spec
        metadata = {**spec.labels, "profile": spec.profile, "tier": spec.tier}
        mounts = tuple(self._mounts)
        return Session(self._id, self._backend.name, self._state, mounts, FrozenMap(metadata))

    def start(self, request: ExecRequest) -> FakeExec:
        self._check_user(request.user)
        if request.pty is not None:
            self._backend.need(can.PTY)
        with self._lock:
            self._check_alive("exec")
            if self._state == State.SUSPENDED:
                raise LifecycleError("a suspended sandbox runs nothing", hint="resume it first")
            timeout_s = request.timeout_s or self.spec.limits.wall_time_s
            env = {**_BASE_ENV, **ALWAYS_THERE, **self.spec.env, **request.env}
            try:
                started = FakeExec(self._machine, request, env, self._cwd(request), timeout_s)
            except OSError as exc:
                raise ExecError(f"cannot start a process: {exc.strerror}") from exc
            self._state = check_transition(self._state, State.RUNNING)
            self._execs.append(started)
            self._started += 1
            return started

    def attach(self, mount: Mount) -> ResolvedMount:
        self._backend.need(can.ATTACH)
        with self._lock:
            self._check_alive("attach")
            return self._mount(mount, "source")

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        self._check_alive("apply_network_policy")
        self._backend.need(can.NETWORK_CHANGE)
        self._backend.check_network(policy)

    def connect(self, port: int) -> socket.socket:  # noqa: ARG002
        self._check_alive("connect")
        raise Unsupported(backend=self._backend.name, operation=can.CONNECT)

    def forward(self, port: int, client: socket.socket) -> None:
        client.close()
        self.connect(port)

    def network_log(self) -> list[NetworkEvent]:
        return []

    def suspend(self) -> None:
        self._backend.need(can.SUSPEND)
        with self._lock:
            self._state = check_transition(self._state, State.SUSPENDED)
            self._machine.freeze(True)

    def resume(self) -> None:
        self._backend.need(can.RESUME)
        with self._lock:
            self._check_alive("resume")
            if self._state == State.SUSPENDED:
                self._state = check_transition(self._state, State.RUNNING)
                self._machine.freeze(False)

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        del metadata
        raise Unsupported(backend=self._backend.name, operation=can.MEMORY_SNAPSHOT)

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        self._backend.need(can.SNAPSHOT)
        self._check_alive("snapshot")
        return self._backend.save(self._id, self.spec, self._tree.root, metadata)

    def cpu_ns(self) -> int | None:
        """It measures none."""
        return None

    def stats(self) -> SandboxStats:
        quota = self._tree.quota
        return SandboxStats(
            state=self._state,
            pids=len(self._machine.processes),
            disk_bytes=quota.used_bytes,
            inodes=quota.used_inodes,
            uptime_s=time.monotonic() - self._born_s,
            execs=self._started,
            degraded=self._degraded,
        )

    def granted(self) -> SandboxCapabilities:
        with self._lock:
            self._check_alive("granted")
            if self._state == State.SUSPENDED:
                raise LifecycleError("a suspended sandbox does not answer", hint="resume it first")
        read_only = {each.target for each in self._mounts if each.access != READ_WRITE}
        mounts = [each.target for each in self._mounts]
        writable = sorted({self._home, "/tmp", "/var/tmp", *mounts} - read_only)
        kept = [each.target for each in self._mounts if each.host_path and each.target in writable]
        return SandboxCapabilities(
            id=self._id,
            backend=self._backend.name,
            profile=self.spec.profile,
            can_write_filesystem=True,
            readable_paths=("/",),
            writable_paths=tuple(writable),
            limits=self.spec.limits,
            is_persistent=bool(kept),
        )

    def protections(self) -> tuple[Protection, ...]:
        return self._backend.report().protections

    def terminate(self) -> None:
        with self._lock:
            self._state = check_transition(self._state, State.TERMINATED)
            for each in self._execs:
                each.end(execs.KILLED_BY_TERMINATE)
                each.wait()
            self._execs.clear()
        self._backend.forget(self._id)

    def _check_alive(self, operation: str) -> None:
        if self._state == State.TERMINATED:
            raise LifecycleError(f"{self._id} is terminated: no {operation}")

    def _check_user(self, user: str | None) -> None:
        if user is not None and user not in _USERS:
            raise InvalidRequest(f"the sandbox has no user {user!r}", field="user")

    def _cwd(self, request: ExecRequest) -> str:
        given = request.cwd or "."
        try:
            node = self._tree.find(given, self._home)
            if not isinstance(node, Directory):
                raise NotADirectoryError(20, os.strerror(20))
            return self._tree.canonical(given, self._home)
        except OSError as exc:
            raise InvalidRequest(f"{given}: {exc.strerror}", field="cwd") from exc

    def _mount(self, mount: Mount, field: str) -> ResolvedMount:
        self._backend.need(can.MOUNT)
        host_path = None
        node: Node | None = None
        if mount.is_host_path:
            host_path = os.path.realpath(mount.source)
            node = _host_directory(host_path, field)
        elif mount.source:
            node = self._session_directory(mount.source)
        protect = self._protected(mount)
        try:
            self._tree.mount(mount.target, node, is_writable=mount.is_writable, protect=protect)
        except OSError as exc:
            raise InvalidRequest(f"{mount.target}: {exc.strerror}", field="mount") from exc
        self._mounts.append(ResolvedMount(mount.target, mount.access, host_path))
        return self._mounts[-1]

    def _session_directory(self, source: str) -> Node:
        try:
            self._tree.make_dirs(source, self._home)
            return self._tree.find(source, self._home)
        except OSError as exc:
            raise file_error(exc.errno or 0, source) from exc

    def _protected(self, mount: Mount) -> list[str]:
        """Paths relative to the mount that are to stay as they are."""
        given = mount.protect if mount.protect is not None else self.spec.protect or ()
        if given:
            self._backend.need(can.PROTECTED_PATHS)
        below = mount.target + "/"
        kept = [path for path in given if not path.startswith("/")]
        kept += [path.removeprefix(below) for path in given if path.startswith(below)]
        if mount.protect is None and mount.is_host_path and self._backend.has(can.PROTECTED_PATHS):
            kept += _defaults_of(mount.source)
        return [path for path in kept if not {path, "all"}.intersection(self.spec.unprotect)]


def _defaults_of(source: str | None) -> list[str]:
    """List the paths protected by default in a host directory."""
    return [
        name
        for name in DEFAULTS
        if name not in (*WHERE, *MAY_BE_MADE) or os.path.lexists(os.path.join(source or "", name))
    ]


def _host_directory(path: str | None, field: str) -> Node | None:
    if path is None:
        return None
    try:
        if not os.path.isdir(found := os.path.realpath(path, strict=True)):
            raise NotADirectoryError(20, os.strerror(20))
        return host_node(found)
    except OSError as exc:
        raise InvalidRequest(f"{path}: {exc.strerror}", field=field) from exc


def unsupported_limits(spec: SandboxSpec, backend: FakeBackend) -> tuple[str, ...]:
    """The capabilities that the spec's limits need, the backend lacks and the spec lets go.

    Raises:
        Unsupported: One is not let go.
    """
    lacking = []
    for field, capability in can.LIMITED_BY.items():
        if getattr(spec.limits, field) is None or backend.has(capability):
            continue
        if not {capability, "*"}.intersection(spec.allow_degraded):
            raise Unsupported(backend=backend.name, operation=capability, field=f"limits.{field}")
        lacking.append(capability)
    return tuple(lacking)
