"""The result of an exec in the form that frameworks share: an exit code and a text."""

from __future__ import annotations

from ..errors import ExecError
from ..model.execs.exec import KILLED_BY_TERMINATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model.execs.exec import ExecResult

TIMED_OUT = 124  # as timeout(1) has it
NOT_EXECUTABLE = 126  # as every shell has these two
_SIGNALLED = 128

# bash where the sandbox has it: what models write is rarely pure POSIX.
_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'


def shell_argv(script: str) -> Sequence[str]:
    """The command that runs `script` in the best shell there is."""
    return ("sh", "-c", _SHELL, script)


def exit_code(result: ExecResult) -> int:
    """Its exit code; 128 + N where signal N ended it, and 124 where time did.

    Raises:
        ExecError: The sandbox was ended under it.
    """
    if result.killed_by == KILLED_BY_TERMINATE:
        raise ExecError("the sandbox was terminated while the command ran")
    if result.timed_out:
        return TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    assert result.signal is not None
    return _SIGNALLED + result.signal


def notes(result: ExecResult) -> str:
    """List notes for the reader of the output: it was cut, or the command was killed."""
    cut = "[the output was longer; the rest was cut]" if result.truncated else ""
    return "\n".join(filter(None, (cut, ended_early(result))))


def ended_early(result: ExecResult) -> str:
    """Describe in one line what killed the command; empty when it ended by itself."""
    if result.timed_out:
        return f"timed out after {result.duration_s:.1f} s; it and all it started were killed"
    if result.oom_killed:
        return "killed: the sandbox's memory was used up"
    return ""
