"""A command run by the execution service: request, state, result."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from ...errors import LifecycleError
from ..base import checks, jsonform
from ..base.checks import FrozenMap
from ..base.ids import check_id
from ..base.model import Model
from ..base.record import dataclass, field
from ..spec import LIGHT, TIERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self


_YEAR_S = 366 * 86_400
_MOST_MIB = 2**26  # as `Limits.memory_bytes`
_BESIDE, _PEAK = ("start_time", "end_time", "duration"), "memory_peak_bytes"
"""Extra fields that servers write for clients of other services; reading ignores them."""


class ExecutionStatus(StrEnum):
    """Where an execution is.

    `completed`: it ended by itself with exit code 0. `failed`: with another one, by a signal or a
    limit, or it could not be run; the last four are final.
    """

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"

    @property
    def is_final(self) -> bool:
        """True if no state follows."""
        return not EXECUTION_NEXT[self]


_ENDS = (
    ExecutionStatus.COMPLETED,
    ExecutionStatus.FAILED,
    ExecutionStatus.TIMEOUT,
    ExecutionStatus.KILLED,
)
EXECUTION_NEXT: dict[ExecutionStatus, frozenset[ExecutionStatus]] = {
    ExecutionStatus.PENDING: frozenset(
        {ExecutionStatus.RUNNING, ExecutionStatus.FAILED, ExecutionStatus.KILLED}
    ),
    ExecutionStatus.RUNNING: frozenset(_ENDS),
    **dict.fromkeys(_ENDS, frozenset()),
}


def check_execution_step(now: ExecutionStatus, then: ExecutionStatus) -> ExecutionStatus:
    """`then`, when an execution in `now` may go there.

    Raises:
        LifecycleError: The table has no such step.
    """
    if then not in EXECUTION_NEXT[now]:
        raise LifecycleError(f"a {now} execution cannot become {then}")
    return then


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionRequest(Model):
    """A command for the execution service.

    Attributes:
        command: The program; looked up on the sandbox's PATH, never given to a shell.
        id: None generates one. Asking again under the same id gives the same execution.
        work_dir: None takes the service's.
        timeout_secs, memory_mb, cpus: None takes the service's defaults; its maxima hold in any
            case. `memory_mb` counts MiB, 1.0 of `cpus` is one core.
    """

    _in_bytes = ("stdin",)

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    work_dir: str | None = None
    stdin: bytes | None = None
    timeout_secs: float | None = None
    memory_mb: int | None = None
    cpus: float | None = None
    tier: str = LIGHT
    id: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not checks.text(self.command, "command").strip():
            checks.refuse("command", "must name a program")
        put(self, "args", checks.texts(self.args, "args"))
        put(self, "env", checks.env_map(self.env, "env"))
        checks.weigh_command((self.command, *self.args), self.env, "args")
        if self.work_dir is not None:
            checks.path(self.work_dir, "work_dir")
        if self.stdin is not None:
            put(self, "stdin", checks.binary(self.stdin, "stdin"))
        for name, low, high in (("timeout_secs", 0.001, _YEAR_S), ("cpus", 0.001, 8192)):
            if getattr(self, name) is not None:
                put(self, name, checks.number(getattr(self, name), name, low, high))
        if self.memory_mb is not None:
            checks.integer(self.memory_mb, "memory_mb", 1, _MOST_MIB)
        checks.choice(self.tier, "tier", TIERS, "light or strong")
        if self.id is not None:
            put(self, "id", check_id(self.id))

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form. Null is "not set", and so are the zeros of Go clients: 0 and ""."""
        if not isinstance(data, cls):
            given = jsonform.json_object(data, cls.__name__, "with a command")
            zeros = {
                "timeout_secs": 0,
                "memory_mb": 0,
                "cpus": 0,
                "work_dir": "",
                "tier": "",
                "id": "",
            }
            data = {
                name: value
                for name, value in given.items()
                if name not in cls.__dataclass_fields__
                or not (value is None or (value == zeros.get(name) and value is not False))
            }
        return super().from_json(data)


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionUsage(Model):
    """Resources used by the command and its descendants, as counted by the kernel; None: unknown."""

    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionResult(Model):
    """An execution as it stands: while it runs, output and end are not there yet.

    Attributes:
        exit_code: None while it runs, and where a signal ended it.
        started_at, ended_at: Seconds since 1970, UTC.
        error: What Ringfence has to say of the end, as `error_from_json` reads it; None where the
            program ended by itself.
        degraded: Limits and protections, by name, that held less than asked.
        sandbox_id, exec_id: Where it runs: its output can be followed there, from any offset, until
            its sandbox is gone; the latter is empty before it has begun.
    """

    _in_bytes = ("stdout", "stderr")

    id: str
    status: ExecutionStatus
    tier: str = LIGHT
    command: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    duration_s: float | None = None
    resource_usage: ExecutionUsage = field(default_factory=ExecutionUsage)
    error: Mapping[str, Any] | None = None
    backend: str = ""
    degraded: tuple[str, ...] = ()
    sandbox_id: str = ""
    exec_id: str = ""

    def to_json(self, *, plain: bool | None = None) -> dict[str, Any]:
        """The JSON object of all fields.

        Args:
            plain: Not None adds, as servers do, what clients of other services read: `start_time`
                and `end_time` (RFC 3339), `duration` (nanoseconds), `memory_peak_bytes`. True also
                makes `error` a text, empty without one, and `exit_code` a number, -1 without one.
        """
        form = {**super().to_json(), "status": str(self.status)}
        if plain is None:
            return form
        duration_s, usage = self.duration_s, self.resource_usage.to_json()
        usage[_PEAK] = usage["peak_memory_bytes"]
        form |= {
            "start_time": _rfc3339(self.started_at),
            "end_time": _rfc3339(self.ended_at),
            "duration": None if duration_s is None else round(duration_s * 1e9),
            "resource_usage": usage,
        }
        if plain:
            error = self.error or {}
            said = (str(error.get("code", "")).replace("_", " "), error.get("message", ""))
            form["error"] = ": ".join(filter(None, said))
            form["exit_code"] = -1 if self.exit_code is None else self.exit_code
        return form

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form, also as servers write it; not the plain one."""
        if not isinstance(data, cls):
            data = jsonform.json_object(data, cls.__name__)
            usage = data.get("resource_usage")
            if isinstance(usage, dict):
                data["resource_usage"] = {k: v for k, v in usage.items() if k != _PEAK}
            data = {name: value for name, value in data.items() if name not in _BESIDE}
        return super().from_json(data)


def _rfc3339(moment: float | None) -> str | None:
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True, eq=False, repr=False)
class TierSupport(Model):
    """Support for a tier on this host; `reason` gives each backend's reason where unsupported."""

    tier: str
    supported: bool
    backends: tuple[str, ...] = ()
    reason: str = ""
