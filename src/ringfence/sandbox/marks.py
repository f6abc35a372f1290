"""Moments of a sandbox that it can go back to, and that forks can begin from."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from ..backends.local.host import owner
from ..errors import LifecycleError, ResourceExhausted, SnapshotNotFound, Unsupported
from ..model.base.helpful import helpful
from ..model.fork import ForkReport
from ..model.session import OF_MARK
from .live_fork import LiveFork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..backends.protocol import Backend, BackendSandbox
    from ..model.spec import SandboxSpec

MOST_MARKS = 64
"""Marks of one process that are kept at once: each has processes and memory of its own."""

OWNER = OF_MARK
"""Metadata of a mark's snapshot: the process that keeps it. See `owner.label`."""

_AT_ONCE = 3  # forks in progress: while the kernel makes one, the next is planned

_lock = threading.Lock()
_kept: set[str] = set()
_swept: WeakKeyDictionary[Backend, int] = WeakKeyDictionary()  # by which process


def _sweep(home: Backend) -> None:
    """Delete the snapshots of marks whose process was killed."""
    with _lock:
        if _swept.get(home) == os.getpid():
            return
        _swept[home] = os.getpid()
    for snapshot in home.snapshots():
        kept_by = owner.read(snapshot.metadata.get(OWNER, "").split("."))
        if kept_by is not None and owner.is_gone(kept_by):
            try:
                home.delete_snapshot(snapshot.id)
            except SnapshotNotFound:
                pass  # another process does the same


@helpful
class Mark:
    """A moment of a sandbox: its files, and the contexts that ran. A context manager: leaving it closes it.

    It needs the sandbox no more, and lives as long as the process that made it. Made by `Sandbox.mark`.

    Args:
        home: The backend of the sandbox.
        processes: See `Sandbox.fork`.
        spec: Of the forks that it is made for; None: any.

    Attributes:
        sandbox_id: Id of the sandbox.
        report: What it has beside files.

    Raises:
        Unsupported: As `Sandbox.fork`.
        ResourceExhausted: This process keeps `MOST_MARKS` already.
    """

    def __init__(
        self, sandbox: Any, home: Backend, processes: str, spec: SandboxSpec | None = None
    ) -> None:
        self.sandbox_id = sandbox.id
        self._home, self._processes = home, processes
        self._is_closed = True
        self._live = LiveFork(sandbox)
        _sweep(home)
        self.report: ForkReport = self._live.stop(processes, spec)
        try:
            self.id: str = sandbox._inner.snapshot({OWNER: owner.label()}).id
            self._is_closed = False
            if self._live.is_whole:
                self._live.move(self.restore(sandbox._as_it_is()))
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

    def wait(self) -> None:
        """Wait until it has the memory of what ran, which is copied while the sandbox goes on.

        Raises:
            Unsupported: It could not be copied.
        """
        self._live.wait()

    def restore(self, spec: SandboxSpec) -> BackendSandbox:
        """Make a sandbox with its files.

        Raises:
            LifecycleError: It is closed.
        """
        self.check()
        return self._home.restore(self.id, spec)

    def branch(self, make: Callable[[BackendSandbox], Any], spec: SandboxSpec) -> Any:
        """Make a fork, in which what was marked goes on.

        Args:
            make: Makes a fork of a sandbox that was restored.

        Raises:
            LifecycleError: It is closed.
            Unsupported: A copy that is required could not be made; nothing is left.
        """
        fork = make(self.restore(spec))
        fork._fork_report = self.report
        try:
            self._live.put_into(fork)
        except BaseException as exc:
            fork.terminate()
            if self._processes != "auto" or not isinstance(exc, Unsupported):
                raise
            # What was marked could be copied, and this one copy failed: the kernel refused a step of it.
            fork = make(self.restore(spec))
            fork._fork_report = ForkReport(self.sandbox_id, reason=exc.message)
        return fork

    def branches(
        self, n: int, make: Callable[[BackendSandbox], Any], spec: SandboxSpec
    ) -> list[Any]:
        """Make `n` forks, some at once: see `branch`. Where one fails, none is left.

        Args:
            n: Number of forks, one or more.
        """
        if n == 1:
            return [self.branch(make, spec)]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(n, _AT_ONCE)) as pool:
            begun = [pool.submit(self.branch, make, spec) for _ in range(n)]
            try:
                return [each.result() for each in begun]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                for each in begun:
                    if not each.cancelled() and not each.exception():
                        each.result().terminate()
                raise

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
