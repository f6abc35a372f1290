"""A sandbox that confines nothing: a directory, and the processes that were started for it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING

from ...backends.local.agents.fileinfo import absolute
from ...errors import ExecError, InvalidRequest, LifecycleError
from ...model import capabilities as can
from ...model.base.checks import FrozenMap
from ...model.execs.exec import KILLED_BY_TERMINATE
from ...model.granted import SandboxCapabilities
from ...model.mount import ALWAYS_THERE
from ...model.session import Session
from ...model.state import State, check_transition
from ...model.stats import SandboxStats
from . import processes
from .execs import UnconfinedExec
from .files import UnconfinedFiles

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import NoReturn

    from ...model.capabilities import Protection
    from ...model.execs.exec import ExecRequest
    from ...model.mount import Mount
    from ...model.net.netlog import NetworkEvent
    from ...model.net.network import NetworkPolicy
    from ...model.session import Snapshot
    from ...model.spec import SandboxSpec
    from .backend import UnconfinedBackend

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnconfinedSandbox:
    """See `BackendSandbox`.

    Args:
        directory: Its own, new; `root` in it is where commands and relative paths start.
        degraded: Limits that were requested, and allowed to be missing.
    """

    def __init__(
        self,
        backend: UnconfinedBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        directory: str,
        degraded: tuple[str, ...],
    ) -> None:
        self.spec = spec
        self._backend, self._id, self._directory = backend, sandbox_id, directory
        self._degraded = degraded
        self._state = State.PROVISIONED
        self._lock = threading.RLock()
        self._born_s = time.monotonic()
        self._scope = f"{directory}/"
        self._running: list[UnconfinedExec] = []
        self._started = 0
        self.root = f"{directory}/root"
        own = {name: f"{directory}/{name}" for name in (*ALWAYS_THERE, "TMPDIR")}
        for path in (self.root, *own.values()):
            os.makedirs(path, exist_ok=True)  # a snapshot may have brought the root
        self._env = {"HOME": self.root, "PATH": _PATH, "LANG": "C.UTF-8", **own, **spec.env}
        self.files = UnconfinedFiles(self.root, self._check_alive, self._scope)

    @property
    def session(self) -> Session:
        spec = self.spec
        metadata = {**spec.labels, "profile": spec.profile, "tier": spec.tier}
        return Session(self._id, self._backend.name, self._state, (), FrozenMap(metadata))

    def start(self, request: ExecRequest) -> UnconfinedExec:
        self._backend.check_user(request.user)
        with self._lock:
            self._check_awake("exec")
            cwd = absolute(self.root, request.cwd or ".")
            if not os.path.isdir(cwd):
                raise InvalidRequest(f"{request.cwd}: no such directory", field="cwd")
            timeout_s = request.timeout_s or self.spec.limits.wall_time_s
            env = {**self._env, **request.env}
            try:
                started = UnconfinedExec(request, env, cwd, timeout_s, self._scope)
            except OSError as exc:
                raise ExecError(f"cannot start a process: {exc.strerror}") from exc
            self._state = check_transition(self._state, State.RUNNING)
            self._running = [*(each for each in self._running if not each.has_ended), started]
            self._started += 1
            return started

    def attach(self, mount: Mount) -> NoReturn:
        del mount
        raise self._backend.refusal(can.ATTACH)

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        self._check_alive("apply_network_policy")
        self._backend.need(can.NETWORK_CHANGE)
        self._backend.check_network(policy)

    def connect(self, port: int) -> NoReturn:
        del port
        raise self._backend.refusal(can.CONNECT)

    def forward(self, port: int, client: socket.socket) -> None:
        client.close()
        self.connect(port)

    def network_log(self) -> list[NetworkEvent]:
        return []

    def suspend(self) -> None:
        self._backend.need(can.SUSPEND)
        with self._lock:
            self._state = check_transition(self._state, State.SUSPENDED)
            if self._started:
                processes.send_all(self._scope, signal.SIGSTOP)

    def resume(self) -> None:
        self._backend.need(can.RESUME)
        with self._lock:
            self._check_alive("resume")
            if self._state == State.SUSPENDED:
                self._state = check_transition(self._state, State.RUNNING)
                processes.send(self._scope, signal.SIGCONT)

    def checkpoint(self, metadata: Mapping[str, str]) -> NoReturn:
        del metadata
        raise self._backend.refusal(can.MEMORY_SNAPSHOT)

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        self._backend.need(can.SNAPSHOT)
        self._check_alive("snapshot")
        return self._backend.save(self._id, self.spec, self.root, metadata)

    def stats(self) -> SandboxStats:
        is_over = self._state == State.TERMINATED or not self._started
        return SandboxStats(
            state=self._state,
            pids=0 if is_over else len(processes.members(self._scope)),
            uptime_s=time.monotonic() - self._born_s,
            execs=self._started,
            degraded=self._degraded,
        )

    def granted(self) -> SandboxCapabilities:
        with self._lock:
            self._check_awake("granted")
        return SandboxCapabilities(
            id=self._id,
            backend=self._backend.name,
            profile=self.spec.profile,
            can_write_filesystem=True,
            readable_paths=("/",),
            writable_paths=(self.root, self._env["TMPDIR"]),
            has_network=True,
            allowed_destinations=("*",),
        )

    def protections(self) -> tuple[Protection, ...]:
        return self._backend.report().protections

    def terminate(self) -> None:
        with self._lock:
            if self._state == State.TERMINATED:
                return
            self._state = State.TERMINATED
            for each in self._running:
                each.blame(KILLED_BY_TERMINATE)
            if self._started:
                processes.send_all(self._scope, signal.SIGKILL)
            for each in self._running:
                each.wait()
            self._running.clear()
            shutil.rmtree(self._directory, ignore_errors=True)
        self._backend.forget(self._id)

    def _check_alive(self, operation: str) -> None:
        if self._state == State.TERMINATED:
            raise LifecycleError(f"{self._id} is terminated: no {operation}")

    def _check_awake(self, operation: str) -> None:
        self._check_alive(operation)
        if self._state == State.SUSPENDED:
            raise LifecycleError(f"{self._id} is suspended: no {operation}", hint="resume it first")
