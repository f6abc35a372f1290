"""Moves the output of one exec to its spool, and says how it ended once that is written down."""

from __future__ import annotations

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


class SpoolSink:
    """One stream of a spool, as a pump knows it."""

    def __init__(self, spool: Spool, stream: int) -> None:
        self._spool, self._stream = spool, stream

    def take(self, fd: int) -> int:
        """What the descriptor has now goes to disk."""
        return self._spool.take(self._stream, fd)

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
        sinks = (SpoolSink(spool, OUT), SpoolSink(spool, ERR))
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
        """End without a result."""
        self._spool.close()
        super().fail()
