"""An exec of the server, running or ended."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import Future

from ..backends.optional import DrivenExec
from ..errors import ExecError, LifecycleError, RingfenceError
from ..model.execs.exec import ExecResult
from ..model.execs.exec_view import ExecProblem, ExecState
from ..sandbox.process import StdinWriter
from ..spool.order import ERR, OUT
from .given import Given

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..backends.protocol import BackendExec
    from ..model.execs.exec_view import ExecView
    from ..spool.spool import Spool
    from .pump import SpooledPump

MOST_INLINE_BYTES = 16 << 20
"""Of a stream in a result, which is made whole in memory; the spool may hold more."""
_STDIN = "stdin"  # the file that counts what was given
_NEVER_BEGAN = ("exec_failed", "invalid_request", "exec_not_started")


class Run:
    """An exec. Every method may be called from any thread.

    Attributes:
        spool: Its output.
        done: Resolves to None once its end is written down.
        waiters: Requests of clients that wait for its end. Of the event loop.
    """

    def __init__(self, view: ExecView, spool: Spool) -> None:
        self.id, self.sandbox_id = view.id, view.sandbox_id
        self.spool = spool
        self.done: Future[None] = Future()
        self.waiters = 0
        self._view = view
        self._pump: SpooledPump | None = None
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._given = None
        if self.takes_input:
            self._given = Given(os.path.join(spool.directory, _STDIN), view.stdin_bytes)
        if not view.running:
            self.done.set_result(None)

    @property
    def takes_input(self) -> bool:
        """True if clients may write to its stdin or terminal."""
        return self._view.running and (self._view.stream_stdin or self._view.pty is not None)

    def prepare(self) -> None:
        """Open the stdin file before the exec begins, where the exec takes input.

        Raises:
            ResourceExhausted: The disk is full.
        """
        if self._given is not None:
            self._given.open()

    def discard(self) -> None:
        """Remove what `prepare` made: the exec did not begin."""
        if self._given is not None:
            self._given.close()
        self.spool.close()
        shutil.rmtree(self.spool.directory, ignore_errors=True)

    def attend(self, pump: SpooledPump) -> None:
        """It has begun, and this is what moves its bytes."""
        self._pump = pump
        self._stdin = StdinWriter(pump)

    # -- looking ------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True until the exec's end is known."""
        return self._view.running

    def view(self) -> ExecView:
        """Return the exec as its owner sees it now."""
        view = self._view
        if not view.running:
            return view
        return view.altered(**self._counts())

    def _counts(self) -> dict[str, Any]:
        out, err = self.spool.tracks
        return {
            "stdout_bytes": out.total,
            "stderr_bytes": err.total,
            "stdout_dropped_bytes": out.dropped_bytes,
            "stderr_dropped_bytes": err.dropped_bytes,
            "storage_fault": out.fault or err.fault,
            "stdin_bytes": self._given.count if self._given else self._view.stdin_bytes,
        }

    def result(self) -> ExecResult:
        """How it ended, with its output: of each stream not more than `MOST_INLINE_BYTES`.

        Raises:
            RingfenceError: It failed or was lost: what its problem says.
            LifecycleError: It runs.
        """
        view = self._view
        if view.problem is not None:
            raise view.problem.error()
        status = view.status
        if status is None:
            raise LifecycleError(f"exec {self.id} has not ended")
        most = min(view.max_output_bytes, MOST_INLINE_BYTES)
        stdout, out_dropped = self.spool.tracks[OUT].ends(most)
        stderr, err_dropped = self.spool.tracks[ERR].ends(most)
        return ExecResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=status.exit_code,
            signal=status.signal,
            timed_out=status.timed_out,
            oom_killed=status.oom_killed,
            killed_by=status.killed_by,
            truncated=view.truncated,
            stdout_dropped_bytes=out_dropped,
            stderr_dropped_bytes=err_dropped,
            duration_s=status.duration_s,
            resource_usage=status.resource_usage,
        )

    # -- ending -------------------------------------------------------------------------------

    def final(self, state: ExecState, **fields: Any) -> ExecView:
        """Return the exec as its owner sees it after it ended in `state`."""
        more = {**self._counts(), **fields}
        if more["stdout_dropped_bytes"] or more["stderr_dropped_bytes"]:
            more["truncated"] = True
        return self._view.altered(state=state, ended_at=time.time(), **more)

    def problem(self, error: RingfenceError) -> ExecView:
        state = ExecState.FAILED if error.code in _NEVER_BEGAN else ExecState.LOST
        return self.final(state, problem=ExecProblem.of(error))

    def end(self, view: ExecView) -> None:
        """Its end is written down: tell everybody."""
        self._view, self._pump = view, None
        with self._lock:  # it may end by the very input that is being counted
            if self._given:
                self._given.close()
        # First this: who comes in between finds it, and everybody else is on the list.
        self.done.set_result(None)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def at_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called once it has ended, in some thread; returns what takes that back.

        Of those who wait on `done` it keeps count until the end: nobody is to do so in vain for days.
        """
        with self._lock:
            over = self.done.done()
            if not over:
                self._waiting = [*self._waiting, callback]
        if over:
            callback()

        def stop() -> None:
            with self._lock:
                self._waiting = [each for each in self._waiting if each is not callback]

        return stop

    @property
    def begun(self) -> BackendExec | None:
        """Exec of the backend; None once it has ended."""
        pump = self._pump
        return None if pump is None else pump.run

    # -- doing --------------------------------------------------------------------------------

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the process itself, or to its group; nothing happens when it has ended."""
        pump = self._pump
        if pump is not None:
            pump.run.signal(signum, group=group)

    def kill(self) -> None:
        """Kill it and everything that it started; nothing happens when it has ended."""
        pump = self._pump
        if pump is not None:
            pump.run.kill()

    def pid(self) -> int | None:
        """Return the number that its first process has inside; None where it has ended or none is known."""
        pump = self._pump
        return pump.run.pid() if pump is not None and isinstance(pump.run, DrivenExec) else None

    def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal the new size.

        Raises:
            InvalidRequest: It has none.
        """
        pump = self._pump
        if pump is not None:
            pump.resize(rows, columns)

    def give(self, offset: int, data: memoryview) -> int:
        """Write input that begins at `offset` in its input, as much as fits now.

        What was given before is passed over, so that the same piece may be sent again.

        Returns: the offset to go on from: less than the end of `data` if the process does not read.

        Raises:
            ExecError: It reads no more; it takes no input.
            LifecycleError: It has ended, or bytes before `offset` are missing.
        """
        with self._lock:
            given = self._writable()
            self._write(given, data[given.accept(offset, len(data)) :])
            return given.count

    def append(self, data: memoryview) -> int:
        """Write input after all that it was given, as much as fits now; how much that is.

        Raises:
            ExecError, LifecycleError: As `give`.
        """
        with self._lock:
            given = self._writable()
            given.accept(given.count, 0)
            return self._write(given, data)

    def _write(self, given: Given, data: memoryview) -> int:
        before = given.count
        while data:
            given.begin(min(len(data), 1 << 16))
            count = 0
            try:
                count = self._stdin.write_some(data)
            finally:
                given.end(count)
            if not count:
                break
            data = data[count:]
        return given.count - before

    def end_input(self, offset: int | None = None) -> None:
        """Close its input, which has `offset` bytes if that is given; again is once.

        Raises:
            LifecycleError: Bytes before `offset` are missing, or it is on a terminal.
        """
        with self._lock:
            if self._view.pty is not None:
                raise LifecycleError(
                    "a terminal's input does not end", hint='send "\\x04" (Ctrl-D) instead'
                )
            given = self._writable()
            given.accept(given.count if offset is None else offset, 0)
            self._stdin.close()

    def input_place(self) -> int:
        """A descriptor to wait on until more input fits; the caller's to close.

        Raises:
            ExecError: It takes no more.
        """
        return self._stdin.duplicate()

    def _writable(self) -> Given:
        if self._pump is None:
            raise LifecycleError(f"exec {self.id} has ended")
        if self._given is None:
            raise ExecError(
                "the exec has no input stream", hint='start it with "stream_stdin": true'
            )
        return self._given
