"""Moves the output of one exec to its spool, and says how it ended once that is written down."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ..model.exec import ExecResult
from ..sandbox.pump import Pump
from ..spool.order import ERR, OUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.protocol import BackendExec
    from ..model.exec import ExecRequest, ExecStatus
    from ..model.limits import Limits
    from ..spool.spool import Spool

_MOST = 1 << 16
_SPLICE_F_NONBLOCK = 2  # include/linux/splice.h


class SpoolSink:
    """One stream of a spool, as a pump knows it.

    Args:
        ferry: A pipe, reading end first, that outlives this process as the descriptor does. A terminal
            cannot be spliced to a file, only to a pipe: through it no byte is ever in our memory alone.
    """

    def __init__(self, spool: Spool, stream: int, ferry: tuple[int, int] | None = None) -> None:
        self._spool, self._stream, self._ferry = spool, stream, ferry
        self._land()  # what was on its way when the process before us was killed

    def take(self, fd: int) -> int:
        """What the descriptor has now goes to disk."""
        if self._ferry is None:
            return self._spool.take(self._stream, fd)
        try:
            count = os.splice(fd, self._ferry[1], _MOST, flags=_SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError as exc:
            if (
                exc.errno == errno.EINVAL
            ):  # a kernel whose terminals cannot be spliced: read and write
                self._ferry = None
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
            while self._ferry is not None:
                self._spool.take(self._stream, self._ferry[0])

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
        ferry: tuple[int, int] | None = getattr(run, "ferry", None)
        sinks = (SpoolSink(spool, OUT, ferry), SpoolSink(spool, ERR))
        super().__init__(run, request, limits, sinks=sinks)
        self._spool, self._ended = spool, ended

    def result(self) -> ExecResult:
        """How it ended, without its output."""
        status = self.status
        assert status is not None
        written = True
        try:
            self._spool.feed(ERR, getattr(self.run, "note", b""))
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
