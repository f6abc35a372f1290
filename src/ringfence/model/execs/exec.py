"""A process run in a sandbox: request, status, output."""

from __future__ import annotations

from ..base import checks
from ..base.checks import FrozenMap
from ..base.helpful import helpful
from ..base.model import Model
from ..base.record import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

KILLED_BY_TIMEOUT = "timeout"
KILLED_BY_OOM = "oom"
KILLED_BY_CALLER = "caller"  # kill() on the exec
KILLED_BY_TERMINATE = "terminate"  # the sandbox was terminated during the operation

_YEAR_S = 366 * 86_400
_MOST_OUTPUT = 2**40  # as `Limits.output_bytes`


@dataclass(frozen=True, eq=False, repr=False)
class ExecRequest(Model):
    """A command to run; `argv` is passed as it is, never joined into a shell string.

    Attributes:
        argv: At least one item; argv[0] is looked up on the sandbox's PATH.
        cwd: Absolute inside (a mount target, say), or relative to the session's root,
            which is also the default.
        env: Added to the sandbox's own environment.
        user: A user of the sandbox, by name or uid; None takes the spec's.
        stdin: Bytes to feed and then close; None reads from /dev/null.
        timeout_s: Wall-clock seconds until the whole tree is killed; None falls back to
            the spec's `limits.wall_time_s`.
        max_output_bytes: What is kept of each of stdout and stderr; None falls back to
            `limits.output_bytes`.
        pty: `(rows, columns)` to run on a terminal, whose output is all on stdout.
        stream_stdin: Keep stdin open for the caller to write to, instead of `stdin`.
        session_leader: Lead a session and a process group, as each terminal needs. False: neither, in
            a process group of its own, so that setsid(1) replaces the process instead of forking.
    """

    _in_bytes = ("stdin",)

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    user: str | None = None
    stdin: bytes | None = None
    timeout_s: float | None = None
    max_output_bytes: int | None = None
    pty: tuple[int, int] | None = None
    stream_stdin: bool = False
    session_leader: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "argv", _check_argv(self.argv))
        put(self, "env", checks.env_map(self.env, "env"))
        checks.weigh_command(self.argv, self.env, "argv")
        if self.cwd is not None:
            put(self, "cwd", checks.path(self.cwd, "cwd"))
        if self.user is not None:
            put(self, "user", checks.user(self.user, "user"))
        if self.timeout_s is not None:
            put(self, "timeout_s", checks.number(self.timeout_s, "timeout_s", 0.001, _YEAR_S))
        if self.max_output_bytes is not None:
            checks.integer(self.max_output_bytes, "max_output_bytes", 0, _MOST_OUTPUT)
        if self.pty is not None:
            put(self, "pty", terminal_size(self.pty, "pty"))
        checks.flag(self.session_leader, "session_leader")
        if self.pty is not None and not self.session_leader:
            checks.refuse(
                "session_leader",
                "must be true on a terminal, which only a session's leader controls",
            )
        self._check_stdin()

    def _check_stdin(self) -> None:
        checks.flag(self.stream_stdin, "stream_stdin")
        if self.stdin is None:
            return
        object.__setattr__(self, "stdin", checks.binary(self.stdin, "stdin"))
        if self.stream_stdin:
            checks.refuse("stdin", "cannot be given together with stream_stdin")

    @property
    def has_stdin(self) -> bool:
        """True if the process reads its stdin from the caller rather than from /dev/null."""
        return self.stdin is not None or self.stream_stdin


@dataclass(frozen=True, eq=False, repr=False)
class ResourceUsage(Model):
    """Resources used by an exec and its descendants, as counted by the kernel; None: unknown."""

    cpu_ns: int | None = None
    user_ns: int | None = None
    system_ns: int | None = None
    peak_memory_bytes: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ExecStatus(Model):
    """How a process ended: `exit_code` or `signal`, exactly one of them.

    Attributes:
        killed_by: Who ended it: `timeout`, `oom`, `caller`, `terminate`, or the name of a
            limit; None when it ended by itself, if need be by a signal of its own.
    """

    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    killed_by: str | None = None
    duration_s: float = 0.0
    resource_usage: ResourceUsage = field(default_factory=ResourceUsage)

    def __post_init__(self) -> None:
        if (self.exit_code is None) == (self.signal is None):
            checks.refuse("exit_code", "exactly one of exit_code and signal must be known")

    @property
    def ok(self) -> bool:
        """Success: exit code 0 and not timed out."""
        return self.exit_code == 0 and not self.timed_out


@helpful
@dataclass(frozen=True, eq=False, repr=False)
class ExecResult(Model):
    """A finished exec with its output. Bytes are kept; text is decoded with replacement.

    Attributes:
        truncated: Some output was dropped, be it by the cap (then counted below) or
            because a surviving child still held the stream.
    """

    _in_bytes = ("stdout", "stderr")

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    killed_by: str | None = None
    truncated: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    duration_s: float = 0.0
    resource_usage: ResourceUsage = field(default_factory=ResourceUsage)

    def __post_init__(self) -> None:
        if (self.exit_code is None) == (self.signal is None):
            checks.refuse("exit_code", "exactly one of exit_code and signal must be known")
        if self.stdout_dropped_bytes or self.stderr_dropped_bytes:
            object.__setattr__(self, "truncated", True)

    @property
    def ok(self) -> bool:
        """Success: exit code 0 and not timed out."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout_text(self) -> str:
        """`stdout` as UTF-8, bad bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """`stderr` as UTF-8, bad bytes replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """Short for `stdout_text`."""
        return self.stdout_text


def _check_argv(value: object) -> tuple[str, ...]:
    argv = checks.arguments(value, "argv")
    if not argv:
        checks.refuse("argv", "must not be empty", 'as ["ls", "-l"]')
    if not argv[0].strip():
        checks.refuse("argv[0]", "must name a command, not ''", 'as ["ls", "-l"]')
    return argv


def terminal_size(value: object, field: str) -> tuple[int, int]:
    """Rows and columns of a terminal."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        checks.refuse(field, f"must be two numbers, rows and columns, not {value!r}", "as (24, 80)")
    pair = checks.items(value, field)
    rows, columns = (checks.integer(item, field, 1, 65_535) for item in pair)
    return rows, columns
