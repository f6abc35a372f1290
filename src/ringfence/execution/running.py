"""An execution that has not ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

from ..errors import RingfenceError
from ..model.acquire import AcquireOptions
from ..model.execs.exec import ExecRequest
from ..model.execution.execution import ExecutionResult, ExecutionStatus, check_execution_step
from ..model.spec import STRONG
from . import endings
from .specs import spec_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..execs.run import Run
    from ..model.execution.config import ExecutionConfig
    from ..model.execution.execution import ExecutionRequest
    from ..model.net.network import NetworkPolicy
    from ..sandbox.sync import Sandbox
    from .service import ExecutionService

METADATA = "execution"


class Running:
    """From `pending` to its end. `future` resolves to the final result and never fails."""

    def __init__(
        self,
        service: ExecutionService,
        owner: str,
        result: ExecutionResult,
        most_sandboxes: int | None = None,
    ) -> None:
        self._service, self.owner, self._most_sandboxes = service, owner, most_sandboxes
        self.id, self.result = result.id, result
        self.future: Future[ExecutionResult] = Future()
        self._lock = threading.Lock()
        self._killed = False
        self._sandbox: Sandbox | None = None
        self._run: Run | None = None

    # -- from its beginning, or from where an earlier service left it ---------------------------

    def run(self, request: ExecutionRequest, config: ExecutionConfig) -> None:
        """Run it, in this thread, to its end; never raises. Preconditions: `request` is completed."""
        self._to_the_end(lambda: self._begin(request, config))

    def go_on(self, run: Run) -> None:
        """Wait for what runs already; never raises."""
        self._to_the_end(lambda: self._go_on(run))

    def _to_the_end(self, work: Callable[[], dict[str, Any]]) -> None:
        try:
            ending = work()
        except Exception as exc:  # noqa: BLE001  whatever it is, whoever waits is told
            ending = endings.killed_early() if self._killed else endings.failure(exc)
        self._finish(ending)

    def _begin(self, request: ExecutionRequest, config: ExecutionConfig) -> dict[str, Any]:
        if self._killed:
            return endings.killed_early()
        manager = self._service.manager
        preferred = config.strong_runtime.get("backend", "") if request.tier == STRONG else ""
        options = AcquireOptions(preferred_backend=preferred, metadata={METADATA: self.id})
        lease = manager.acquire(
            spec_for(request, config), options, client_id=self.owner, most=self._most_sandboxes
        )
        with lease:
            self._sandbox = lease.sandbox
            try:
                live = manager.index.find(lease.id)
                assert live is not None
                session = lease.session
                self.result = replace(
                    self.result, backend=session.backend, sandbox_id=session.sandbox_id
                )
                # Not a note: without it nobody could say of an execution that it has begun.
                self._service.save(self.result)
                run = self._service.execs.start(live, _command(request), is_forked=False)
                now = manager.clock.wall()
                self._step(ExecutionStatus.RUNNING, started_at=now, exec_id=run.id)
                return self._attend(run)
            finally:
                self._sandbox = None

    def _go_on(self, run: Run) -> dict[str, Any]:
        manager = self._service.manager
        if self.result.status == ExecutionStatus.PENDING:
            # It has begun, and the earlier service ended before that was written down.
            known = {"sandbox_id": run.sandbox_id, "exec_id": run.id}
            self._step(ExecutionStatus.RUNNING, started_at=run.view().created_at, **known)
        try:
            if run.running:
                self._sandbox = manager.sandbox(run.sandbox_id)
            return self._attend(run)
        finally:
            self._sandbox = None
            manager.release(run.sandbox_id)

    def _attend(self, run: Run) -> dict[str, Any]:
        with self._lock:
            self._run = run
        if self._killed:
            run.kill()
        run.done.result()
        fields = endings.result_fields(run.result())
        sandbox = self._sandbox
        try:
            if sandbox is not None:
                stats = sandbox.stats()
                fields["degraded"] = stats.degraded
                has_failed = fields["status"] == ExecutionStatus.FAILED
                if has_failed and fields["error"] is None and stats.forks_refused:
                    fields["error"] = endings.too_many_processes(stats.forks_refused)
        except RingfenceError:
            pass  # it is gone already; what it held less than asked is not known
        return fields

    # -- meanwhile ------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it, wherever it is; whoever waits for `future` sees that."""
        with self._lock:
            self._killed = True
            run = self._run
        if run is not None:
            run.kill()

    def apply_network(self, policy: NetworkPolicy) -> None:
        """Hold it to another policy from now on. Where that cannot be, it is killed."""
        sandbox = self._sandbox
        if sandbox is None:
            return  # not there yet, or gone
        try:
            sandbox.apply_network_policy(policy)
        except RingfenceError:
            if policy.is_none:
                self.kill()

    def _step(self, status: ExecutionStatus, **fields: Any) -> None:
        check_execution_step(self.result.status, status)
        self.result = replace(self.result, status=status, **fields)
        self._service.note(self)

    def _finish(self, ending: dict[str, Any]) -> None:
        now = self._service.manager.clock.wall()
        ending["ended_at"] = max(now, self.result.started_at or 0.0)
        check_execution_step(self.result.status, ending["status"])
        self.result = replace(self.result, **ending)
        self._service.ended(self)
        self.future.set_result(self.result)


def _command(request: ExecutionRequest) -> ExecRequest:
    return ExecRequest(
        (request.command, *request.args),
        cwd=request.work_dir,
        env=request.env,
        stdin=request.stdin,
        timeout_s=request.timeout_secs,
    )
