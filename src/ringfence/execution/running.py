"""One execution that has not ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

from ..errors import RingfenceError
from ..model.acquire import AcquireOptions
from ..model.execution import ExecutionResult, ExecutionStatus, check_execution_step
from ..model.spec import STRONG
from . import endings
from .specs import spec_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..model.execution import ExecutionRequest
    from ..model.execution_config import ExecutionConfig
    from ..model.network import NetworkPolicy
    from ..sandbox.process import Process
    from ..sessions.lease import Lease
    from .service import ExecutionService

METADATA = "execution"


class Running:
    """From `pending` to its end. `future` resolves to the final result and never fails.

    Attributes:
        request: Completed: every default is filled in.
    """

    def __init__(
        self, service: ExecutionService, owner: str, request: ExecutionRequest, created_at: float
    ) -> None:
        assert request.id is not None
        self._service, self.owner, self.request = service, owner, request
        self.id = request.id
        self.result = ExecutionResult(
            request.id,
            ExecutionStatus.PENDING,
            tier=request.tier,
            command=request.command,
            created_at=created_at,
        )
        self.future: Future[ExecutionResult] = Future()
        self._lock = threading.Lock()
        self._killed = False
        self._lease: Lease | None = None
        self._process: Process | None = None

    def run(self, config: ExecutionConfig) -> None:
        """Run it, in this thread, to its end; never raises."""
        try:
            ending = self._run(config)
        except Exception as exc:  # noqa: BLE001  whatever it is, whoever waits is told
            ending = endings.killed_early() if self._killed else endings.failure(exc)
        self._finish(ending)

    def _run(self, config: ExecutionConfig) -> dict[str, Any]:
        if self._killed:
            return endings.killed_early()
        preferred = config.strong_runtime.get("backend", "") if self._is_strong else ""
        options = AcquireOptions(preferred_backend=preferred, metadata={METADATA: self.id})
        lease = self._service.manager.acquire(
            spec_for(self.request, config), options, client_id=self.owner
        )
        with lease:
            self._lease = lease
            try:
                return self._run_in(lease)
            finally:
                self._lease = None

    @property
    def _is_strong(self) -> bool:
        return self.request.tier == STRONG

    def _run_in(self, lease: Lease) -> dict[str, Any]:
        request, sandbox = self.request, lease.sandbox
        self._step(
            ExecutionStatus.RUNNING,
            started_at=self._service.manager.clock.wall(),
            backend=lease.session.backend,
        )
        process = sandbox.start(
            [request.command, *request.args],
            cwd=request.work_dir,
            env=request.env,
            stdin=request.stdin,
            timeout_s=request.timeout_secs,
        )
        with self._lock:
            self._process = process
        if self._killed:
            process.kill()
        ended = process.wait()
        fields = endings.result_fields(ended)
        try:
            fields["degraded"] = sandbox.stats().degraded
        except RingfenceError:
            pass  # it is gone already; what it held less than asked is not known
        return fields

    def kill(self) -> None:
        """End it, wherever it is; whoever waits for `future` sees that."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is not None:
            process.kill()

    def apply_network(self, policy: NetworkPolicy) -> None:
        """Hold it to another policy from now on. Where that cannot be, it is killed."""
        lease = self._lease
        if lease is None:
            return  # not there yet, or gone
        try:
            lease.sandbox.apply_network_policy(policy)
        except RingfenceError:
            if policy.is_none:
                self.kill()

    def _step(self, status: ExecutionStatus, **fields: Any) -> None:
        check_execution_step(self.result.status, status)
        self.result = replace(self.result, status=status, **fields)
        self._service.note(self)

    def _finish(self, ending: dict[str, Any]) -> None:
        now = self._service.manager.clock.wall()
        if self.result.status == ExecutionStatus.PENDING and "exit_code" in ending:
            self.result = replace(self.result, status=ExecutionStatus.RUNNING)
        ending["ended_at"] = max(now, self.result.started_at or 0.0)
        check_execution_step(self.result.status, ending["status"])
        self.result = replace(self.result, **ending)
        self._service.ended(self)
        self.future.set_result(self.result)
