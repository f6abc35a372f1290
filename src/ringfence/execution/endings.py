"""Mapping from the end of a process to the result of its execution. Pure."""

from __future__ import annotations

from ..errors import (
    BackendUnavailable,
    ExecutionKilled,
    ExecutionTimeout,
    InvalidRequest,
    ResourceLimitExceeded,
    RingfenceError,
    SandboxNotSupported,
    TaskFailed,
    Unsupported,
)
from ..model.execs import exec as execs
from ..model.execution.execution import ExecutionStatus, ExecutionUsage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..model.execs.exec import ExecResult

_NOT_LIMITS = (None, execs.KILLED_BY_CALLER, execs.KILLED_BY_TERMINATE, execs.KILLED_BY_TIMEOUT)


_CALLED = {
    "limits.memory_bytes": "memory_mb",
    "limits.cpus": "cpus",
    "limits.wall_time_s": "timeout_secs",
    "limits.pids": "max_processes",
    "argv": "command",
    "cwd": "work_dir",
    "workdir": "work_dir",
}
"""Fields of a sandbox and a command, as a request and the config call them."""


def judge(ended: ExecResult) -> tuple[ExecutionStatus, RingfenceError | None]:
    """The status that follows from how the process ended, and what there is to say of it."""
    if ended.timed_out:
        return ExecutionStatus.TIMEOUT, ExecutionTimeout(
            f"not done after {ended.duration_s:.3g} s", hint="request a longer timeout_secs"
        )
    if ended.oom_killed:
        return ExecutionStatus.FAILED, ResourceLimitExceeded(
            "out of memory", field="memory_mb", hint="request a larger memory_mb"
        )
    if ended.killed_by not in _NOT_LIMITS:
        return ExecutionStatus.FAILED, ResourceLimitExceeded(f"over its limit: {ended.killed_by}")
    if ended.killed_by is not None:
        return ExecutionStatus.KILLED, ExecutionKilled("killed on request")
    return ExecutionStatus.COMPLETED if ended.ok else ExecutionStatus.FAILED, None


def result_fields(ended: ExecResult) -> dict[str, Any]:
    """The fields of an `ExecutionResult` that the end of the process fills."""
    status, error = judge(ended)
    used = ended.resource_usage
    return {
        "status": status,
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "stdout": ended.stdout,
        "stderr": ended.stderr,
        "stdout_dropped_bytes": ended.stdout_dropped_bytes,
        "stderr_dropped_bytes": ended.stderr_dropped_bytes,
        "duration_s": ended.duration_s,
        "resource_usage": ExecutionUsage(
            used.cpu_ns, used.peak_memory_bytes, used.io_read_bytes, used.io_write_bytes
        ),
        "error": error.to_json() if error else None,
    }


def too_many_processes(refused: int) -> dict[str, Any]:
    """Describe the failure of a command that hit the process limit."""
    return ResourceLimitExceeded(
        f"the limit on processes refused {refused} times",
        field="max_processes",
        hint="start fewer processes, or ask an admin to raise max_processes",
    ).to_json()


def failure(exc: BaseException) -> dict[str, Any]:
    """The fields of an execution that could not be run, or was lost on the way."""
    if isinstance(exc, (BackendUnavailable, Unsupported)):
        exc = SandboxNotSupported(exc.message, hint=exc.hint, field=exc.field)
    if isinstance(
        exc, InvalidRequest
    ):  # of the sandbox that was made for it: said in its own words
        exc = InvalidRequest(exc.message, hint=exc.hint, field=_CALLED.get(exc.field, exc.field))
    if not isinstance(exc, RingfenceError):
        exc = TaskFailed(f"{type(exc).__name__}: {exc}")
    return {"status": ExecutionStatus.FAILED, "error": exc.to_json()}


def killed_early() -> dict[str, Any]:
    """The fields of an execution that was killed before anything of it ran."""
    error = ExecutionKilled("killed on request, before it ran")
    return {"status": ExecutionStatus.KILLED, "error": error.to_json()}
