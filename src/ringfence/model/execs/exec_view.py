"""An exec of the server as its owner sees it, running or over."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.model import Model
from ..base.record import dataclass
from .exec import ExecResult, ExecStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enum import StrEnum
    from typing import Any

    from ...errors import RingfenceError
else:
    from ..base.words import StrEnum


class ExecState(StrEnum):
    """Where an exec is in its life.

    `running`: begun, or about to. `ended`: its exit code or signal is known. `failed`: it never
    began. `lost`: nothing is known of its end, and never will be.
    """

    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, eq=False, repr=False)
class ExecProblem(Model):
    """Why an exec failed or was lost, as the error that it would have raised."""

    code: str
    message: str
    hint: str = ""
    field: str = ""
    retryable: bool = False

    @classmethod
    def of(cls, error: RingfenceError) -> ExecProblem:
        """Make the client's view of an error."""
        return cls(error.code, error.message, error.hint, error.field, error.retryable)

    def error(self) -> RingfenceError:
        """The error again."""
        from ...errors import error_from_json

        return error_from_json(self.to_json())


@dataclass(frozen=True, eq=False, repr=False)
class ExecView(Model):
    """An exec at one moment. Neither its environment nor its input is shown.

    Attributes:
        max_output_bytes: Of each stream in `result`, head and tail.
        kept_bytes: Of each stream on disk, head and tail; what is more is dropped, and counted.
        created_at, ended_at: Seconds since 1970, UTC.
        stdout_bytes, stderr_bytes: That came so far, kept or not.
        stdin_bytes: That it was given so far; what follows is at this offset.
        storage_fault: What the disk said when there was no room for output; what came then is
            among the dropped bytes.
        truncated: Output was dropped, or a surviving child still held a stream when its process had ended.
        status: How it ended; None unless `state` is `ended`.
        problem: Why it is `failed` or `lost`.
        result: With its output, where that was asked for.
    """

    id: str
    sandbox_id: str
    state: ExecState
    argv: tuple[str, ...]
    created_at: float
    cwd: str | None = None
    user: str | None = None
    pty: tuple[int, int] | None = None
    stream_stdin: bool = False
    timeout_s: float | None = None
    max_output_bytes: int = 0
    kept_bytes: int = 0
    ended_at: float | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    stdin_bytes: int = 0
    storage_fault: str = ""
    truncated: bool = False
    status: ExecStatus | None = None
    problem: ExecProblem | None = None
    result: ExecResult | None = None

    @property
    def running(self) -> bool:
        """True until the exec has ended."""
        return self.state == ExecState.RUNNING

    def to_json(self) -> dict[str, Any]:
        """The JSON object of all fields."""
        return jsonform.dump(self, state=str(self.state))

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {"pty": _read_pty}


def _read_pty(value: object) -> tuple[int, ...]:
    return tuple(checks.integer(item, "pty", 1, 65_535) for item in checks.items(value, "pty"))
