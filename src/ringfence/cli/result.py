"""`--json`: one object on stdout, whatever happened."""

from __future__ import annotations

import json
import os

from ..errors import RingfenceError
from ..model.execs.exec import ExecResult
from ..sandbox.stream import DEFAULT_OUTPUT_BYTES, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import BackendSandbox
    from .supervise import Supervisor

SIGKILL = 9


def run_for_json(supervisor: Supervisor, sandbox: BackendSandbox, at_most: int | None) -> int:
    """Run it, print the object, return what our exit code is to be."""
    limit = DEFAULT_OUTPUT_BYTES if at_most is None else at_most
    stdout, stderr = Stream(limit), Stream(limit)
    supervisor.start(stdout.feed, stderr.feed)
    protections = [each.to_json() for each in sandbox.protections()]
    supervisor.wait()
    sandbox.terminate()
    supervisor.drain()
    supervisor.feed_note(stderr.feed)
    form = {**_result(supervisor, stdout, stderr).to_json(), "protections": protections}
    network = sandbox.spec.network
    if network.is_limited and not network.is_none:
        from .network import for_json

        form["network"] = for_json(sandbox)
    _print(form)
    return supervisor.exit_code


def _result(supervisor: Supervisor, stdout: Stream, stderr: Stream) -> ExecResult:
    status = supervisor.status
    known: dict[str, Any] = {"signal": SIGKILL, "timed_out": True, "killed_by": "timeout"}
    if status is not None:
        names = (
            "exit_code",
            "signal",
            "timed_out",
            "oom_killed",
            "killed_by",
            "duration_s",
            "resource_usage",
        )
        known = {name: getattr(status, name) for name in names}
    else:
        known["duration_s"] = supervisor.elapsed_s
    return ExecResult(
        stdout=stdout.getvalue(),
        stderr=stderr.getvalue(),
        stdout_dropped_bytes=stdout.dropped_bytes,
        stderr_dropped_bytes=stderr.dropped_bytes,
        **known,
    )


def print_error(exc: BaseException) -> None:
    """The object for a failure of our own."""
    if not isinstance(exc, RingfenceError):
        exc = RingfenceError(f"{type(exc).__name__}: {exc}")
    try:
        _print({"error": exc.to_json()})
    except OSError:
        pass  # perhaps that was the failure


def _print(value: dict[str, Any]) -> None:
    """Raises OSError where it cannot be written; that nobody reads it is none."""
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:
            import select

            poll = select.poll()
            poll.register(1, select.POLLOUT)
            poll.poll()
        except BrokenPipeError:
            return
