"""Moves the output of one exec to its spool, and says how it ended once that is written down."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ..backends.optional import DrivenExec
from ..model.execs.exec import ExecResult
from ..sandbox.pump import Pump
from ..spool.order import ERR, OUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.protocol import BackendExec
    from ..model.execs.exec import ExecRequest, ExecStatus
    from ..model.limits import Limits
    from ..spool.spool import Spool

_MOST = 1 << 16
_SPLICE_F_NONBLOCK = 2  # include/linux/splice.h


class SpoolSink:
    """A stream of a spool, as a pump writes it.

    Args:
        splice_pipe: A pipe, reading end first, that outlives this process as the descriptor does. A terminal
            can be spliced only to a pipe, not to a file; through the pipe no byte is ever only in our memory.
    """

    def __init__(
        self, spool: Spool, stream: int, splice_pipe: tuple[int, int] | None = None
    ) -> None:
        self._spool, self._stream, self._splice_pipe = spool, stream, splice_pipe
        self._land()  # bytes in the pipe when the previous process was killed

    def take(self, fd: int) -> int:
        """Write the bytes that the descriptor has now to disk."""
        if self._splice_pipe is None:
            return self._spool.take(self._stream, fd)
        try:
            count = os.splice(fd, self._splice_pipe[1], _MOST, flags=_SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError as exc:
            if (
                exc.errno == errno.EINVAL
            ):  # a kernel whose terminals cannot be spliced: read and write
                self._splice_pipe = None
                return self.take(fd)
            if exc.errno != errno.EIO:
                raise
            count = 0  # its other side is closed
        if not count:
            self._spool.close(self._stream)
        self._land()
        return count

    def _land(self) -> None:
        with suppress(BlockingIOError):
            while self._splice_pipe is not None:
                self._spool.take(self._stream, self._splice_pipe[0])

    def close(self) -> None:
        """Nothing more will come."""
        self._spool.close(self._stream)


class SpooledPump(Pump):
    """The streams of one exec on their way to disk.

    Args:
        ended: Called in the driver's thread with how it ended, and whether output was cut off;
            whether that is written down now. If not, the descriptors stay open until `release`:
            from them the next process can still learn the end, were this one killed.
    """

    def __init__(
        self,
        run: BackendExec,
        request: ExecRequest,
        limits: Limits,
        spool: Spool,
        ended: Callable[[ExecStatus, bool], bool],
    ) -> None:
        splice_pipe = run.splice_pipe if isinstance(run, DrivenExec) else None
        sinks = (SpoolSink(spool, OUT, splice_pipe), SpoolSink(spool, ERR))
        super().__init__(run, request, limits, sinks=sinks)
        self._spool, self._ended = spool, ended

    def result(self) -> ExecResult:
        """How it ended, without its output."""
        status = self.status
        assert status is not None
        written = True
        try:
            self._spool.feed(ERR, self.driven.note)
            self._spool.close()
            written = self._ended(status, self._cut)
        finally:
            if written:
                self.release()
        return ExecResult(exit_code=status.exit_code, signal=status.signal)

    def release(self) -> None:
        """Let go of the exec; idempotent."""
        self._close()

    def fail(self) -> None:
        """End without a result. Its descriptors stay open until `release`: see `ended`."""
        self._spool.close()
