# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.
"""A process that runs in a sandbox of a server."""

from __future__ import annotations

import json
import signal
import time
from contextlib import closing
from dataclasses import replace

from ...errors import ExecError, LifecycleError, SandboxLost, ServerUnreachable
from ...model.base import checks
from ...model.base.helpful import helpful
from ...model.base.jsonform import bytes_from_json
from ...model.execs.exec_view import ExecView
from ..answers import object_of, pause_s
from ..watching import feed, watch
from .pauses import pause, to_the_end
from .stream import RemoteStream
from .transport import Transport, segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from ...model.execs.exec import ExecRequest, ExecResult
    from ..forms import OutputEvent

    Callback = Callable[[bytes], None] | None

_WAIT_S = 25.0  # each request; then the next one waits on
_SPARE_S = 30.0  # beyond what a request was asked to wait
_HEARTBEAT_S = 10.0
_PATIENCE = 3  # connections in a row that bring nothing
_PIECE = 1 << 20
_DYING_S = 5.0


@helpful
class RemoteProcess:
    """A started process; see `Process`. Its output is kept by the server, whoever reads it.

    Args:
        large_input: All its input, to be written in the background.
    """

    def __init__(
        self, transport: Transport, sandbox_at: str, view: ExecView, large_input: bytes = b""
    ) -> None:
        self._transport, self._sandbox_at, self._view = transport, sandbox_at, view
        self._at = f"{sandbox_at}/execs/{segment(view.id)}"
        self.id = view.id
        self.stdout = RemoteStream(transport, self._at, "stdout")
        self.stderr = RemoteStream(transport, self._at, "stderr")
        has_stdin = not large_input and (view.stream_stdin or view.pty is not None)
        self.stdin = RemoteStdin(transport, self._at, view) if has_stdin else None
        if large_input:
            feed(transport.blocking, self._at, view, large_input)

    @property
    def view(self) -> ExecView:
        """All that the server says of it, now. It is asked while the caller waits."""
        if self._view.running:
            self._view = ExecView.from_json(self._transport.blocking.json("GET", self._at))
        return self._view

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.view.running

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Its result, once it has ended. The process keeps running when the wait times out.

        Raises:
            TimeoutError: It did not end within `timeout_s` seconds.
            SandboxLost: Its sandbox went away.
        """
        checks.waiting_time(timeout_s)
        return wait_for(self._transport, self._sandbox_at, self._view, timeout_s)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process itself; nothing happens when it has ended."""
        self._transport.json(
            "POST", f"{self._at}/signal", body={"signal": checks.signal_number(signum)}
        )

    def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        body = {"signal": checks.signal_number(signum), "group": True}
        self._transport.json("POST", f"{self._at}/signal", body=body)

    def terminate(self) -> None:
        """SIGTERM: ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and everything that it started."""
        self._transport.json("POST", f"{self._at}/kill", repeat=True)

    def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        body = {"rows": rows, "cols": cols}
        self._transport.json("POST", f"{self._at}/resize", body=body, repeat=True)

    def call_back(self, on_stdout: Callback, on_stderr: Callback) -> None:
        """Have each piece of output given to them as it comes, in background threads."""
        for name, callback in (("stdout", on_stdout), ("stderr", on_stderr)):
            if callback is not None:
                watch(self._transport.blocking, self._at, name, callback)

    def run_through(self, on_stdout: Callback, on_stderr: Callback) -> ExecResult:
        """Wait for the end, output passed on meanwhile; whatever ends the wait ends the process."""
        try:
            if on_stdout or on_stderr:
                self._pass_on({"stdout": on_stdout, "stderr": on_stderr})
            return self.wait()
        except BaseException:
            to_the_end(self.end)
            raise

    def end(self) -> None:
        """Kill it for a caller who waits no more; only then is it gone, and counts for no limit."""
        try:
            self.kill()
            self.wait(_DYING_S)
        except (ServerUnreachable, SandboxLost, LifecycleError, TimeoutError):
            pass  # what went wrong before is what the caller is told

    def _pass_on(self, callbacks: dict[str, Callback]) -> None:
        with closing(self.events()) as events:
            for event in events:
                callback = callbacks.get(event.get("stream", ""))
                if event["type"] == "output" and callback is not None:
                    callback(event["data"])

    def events(
        self, cursor: str = "0", *, follow: bool = True
    ) -> Generator[OutputEvent, None, None]:
        """Both streams, in the order of writing, through as many connections as it takes.

        Each event has a `type`: `output` (with `stream`, `offset` and `data`, bytes), `dropped` (with
        `bytes`, how many) and at last `end`, or without `follow` perhaps `running` (with `exec`).

        Args:
            cursor: That of the last event that was seen.
        """
        failures = 0
        while True:
            try:
                with closing(self._events(cursor, follow)) as events:
                    for event in events:
                        cursor, failures = event["cursor"], 0
                        if event["type"] == "heartbeat":
                            continue
                        if event["type"] == "output":
                            bytes_from_json(event, "data")
                        yield event
                        if event["type"] in ("end", "running"):
                            return
            except ServerUnreachable:
                if failures >= _PATIENCE:
                    raise
            failures += 1
            pause(pause_s(failures, {}))

    def _events(self, cursor: str, follow: bool) -> Generator[Any, None, None]:
        params = {"stream": "both", "offset": cursor, "follow": follow, "heartbeat_s": _HEARTBEAT_S}
        headers = {"accept": "application/x-ndjson"}
        with self._transport.stream(
            f"{self._at}/output", params=params, headers=headers, timeout=_HEARTBEAT_S + _SPARE_S
        ) as response:
            for line in response.iter_lines():
                if line:
                    yield json.loads(line)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self._view.state}>"


def split_input(request: ExecRequest) -> tuple[dict[str, Any], bytes]:
    """The body that starts a command, and the input that is too large to be part of it."""
    large = b""
    if request.pty is None and request.stdin is not None and len(request.stdin) > _PIECE:
        large, request = request.stdin, replace(request, stdin=None, stream_stdin=True)
    return {name: value for name, value in request.to_json().items() if value is not None}, large


def wait_for(
    transport: Transport, sandbox_at: str, view: ExecView, timeout_s: float | None = None
) -> ExecResult:
    """The result of an exec, once it has ended."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    at = f"{sandbox_at}/execs/{segment(view.id)}/wait"
    while view.result is None:
        if view.problem is not None:
            raise view.problem.error()
        left = _WAIT_S if until is None else min(_WAIT_S, until - time.monotonic())
        params = {"timeout_s": max(0.0, left)}
        answer = transport.json("GET", at, params=params, timeout_s=_WAIT_S + _SPARE_S)
        view = ExecView.from_json(answer)
        if view.running and until is not None and time.monotonic() >= until:
            raise TimeoutError(f"the process still runs after {timeout_s} s")
    return view.result


@helpful
class RemoteStdin:
    """The writing end of a process's standard input. What is sent again is not written again."""

    def __init__(self, transport: Transport, at: str, view: ExecView) -> None:
        self._transport, self._at = transport, f"{at}/stdin"
        self._offset, self._is_open = view.stdin_bytes, True

    def write(self, data: bytes) -> None:
        """Write everything, waiting while the process does not read.

        Raises:
            ExecError: It no longer reads.
        """
        if not self._is_open:
            raise ExecError("standard input is closed")
        view = memoryview(checks.binary(data, "data"))
        while view:
            try:
                self._send(bytes(view[:_PIECE]))
            except LifecycleError as exc:
                raise ExecError("the process no longer reads its input") from exc
            view = view[self._reached :]

    def _send(self, piece: bytes, *, eof: bool = False) -> None:
        params = {"offset": self._offset, "eof": eof}
        # The offset makes it safe to repeat: the key says so to the transport.
        headers = {"idempotency-key": f"{self._offset}"}
        response = self._transport.request(
            "POST",
            self._at,
            params=params,
            content=piece,
            headers=headers,
            timeout_s=_WAIT_S + _SPARE_S,
        )
        reached = int(object_of(response.content)["offset"])
        self._reached, self._offset = reached - self._offset, reached

    def close(self) -> None:
        """End of input. On a terminal, send b"\\x04" instead."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._send(b"", eof=True)
        except (ExecError, LifecycleError):
            pass  # it has ended, and reads nothing more
