"""Moments of a sandbox that it can go back to, and that forks can begin from."""

from __future__ import annotations

import threading

from ..errors import LifecycleError, ResourceExhausted
from .live_fork import LiveFork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import Backend, BackendSandbox
    from ..model.fork import ForkReport
    from ..model.spec import SandboxSpec

MOST_MARKS = 64
"""Marks of one process that are kept at once: each has processes and memory of its own."""

_lock = threading.Lock()
_kept: set[str] = set()


class Mark:
    """A moment of a sandbox: its files, and the contexts that ran. A context manager: leaving it closes it.

    It needs the sandbox no more, and lives as long as the process that made it. Made by `Sandbox.mark`.

    Args:
        home: The backend of the sandbox.
        processes: See `Sandbox.fork`.

    Attributes:
        sandbox_id: Id of the sandbox.
        report: What it has beside files.

    Raises:
        Unsupported: As `Sandbox.fork`.
        ResourceExhausted: This process keeps `MOST_MARKS` already.
    """

    def __init__(self, sandbox: Any, home: Backend, processes: str) -> None:
        self.sandbox_id = sandbox.id
        self._home = home
        self._is_closed = True
        self._live = LiveFork(sandbox)
        self.report: ForkReport = self._live.stop(processes)
        try:
            self.id: str = sandbox._inner.snapshot({}).id
            self._is_closed = False
            self._live.load()
            with _lock:
                if len(_kept) >= MOST_MARKS:
                    raise ResourceExhausted(
                        f"this process keeps {MOST_MARKS} marks already", hint="close() some"
                    )
                _kept.add(self.id)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises LifecycleError if it is closed."""
        if self._is_closed:
            raise LifecycleError("this mark is closed", hint="make another one with mark()")

    def restore(self, spec: SandboxSpec) -> BackendSandbox:
        """Make a sandbox with its files.

        Raises:
            LifecycleError: It is closed.
        """
        self.check()
        return self._home.restore(self.id, spec)

    def put_into(self, fork: Any) -> None:
        """Make a copy of each context.

        Args:
            fork: A sandbox made by `restore`, in which nothing has run.
        """
        self._live.put_into(fork)

    def put_back(self, sandbox: Any) -> None:
        """Let each context of the sandbox, which has just been restored, go on from here."""
        self._live.put_back(sandbox)

    def close(self) -> None:
        """Let go of its files and memory; idempotent. Forks made from it live on."""
        is_closed, self._is_closed = self._is_closed, True
        try:
            self._live.close()
        finally:
            if not is_closed:
                with _lock:
                    _kept.discard(self.id)
                self._home.delete_snapshot(self.id)

    def __enter__(self) -> Mark:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Mark {self.id} of {self.sandbox_id}>"
