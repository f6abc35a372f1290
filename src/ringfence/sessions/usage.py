"""A backend's sandbox as clients of a session get it: who uses it, and until when, is seen."""

from __future__ import annotations

import select
import threading
import weakref

from ..backends.optional import Continuable
from ..sandbox.pump import begin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any

    from ..backends.protocol import BackendExec, BackendSandbox
    from ..model.execs.exec import ExecRequest


class Use:
    """Current activity in a sandbox: calls, running execs, open streams.

    Args:
        touch: Called on each use.
    """

    def __init__(self, touch: Callable[[], None]) -> None:
        self.touch = touch
        self._lock = threading.Lock()
        self._calls = 0
        # Weak: what a client has dropped is closed by its own finalizer, which we must not prevent.
        self._execs: weakref.WeakSet[WatchedExec] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()

    def call(self) -> AbstractContextManager[object]:
        """While in the block, somebody is being served."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1
        self.touch()

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._calls -= 1
        self.touch()

    def started(self, run: WatchedExec) -> None:
        """An exec runs until its `done` says otherwise, or it is closed."""
        with self._lock:
            self._execs.add(run)

    def opened(self, stream: Any) -> None:
        """A stream is open until it is closed or dropped."""
        with self._lock:
            self._streams.add(stream)

    @property
    def running(self) -> int:
        with self._lock:
            runs = list(self._execs)
        over = [run for run in runs if not _runs(run)]
        with self._lock:
            self._execs.difference_update(over)
        return len(runs) - len(over)

    @property
    def is_attended(self) -> bool:
        """True while a call is served or a stream is open."""
        with self._lock:
            return self._calls > 0 or any(not each.closed for each in self._streams)

    @property
    def busy(self) -> bool:
        """True while a call, an exec or a stream is active."""
        return self.is_attended or self.running > 0


def _runs(run: WatchedExec) -> bool:
    fd = run.done
    if fd < 0:
        return False  # closed
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(0)


class WatchedSandbox:
    """`BackendSandbox`, with everything that ends or freezes it going through the manager.

    What is not listed here is the backend's own.

    Args:
        verbs: The manager's `terminate`, `suspend` and `resume` for this session.
    """

    def __init__(
        self, inner: BackendSandbox, use: Use, verbs: dict[str, Callable[[], None]]
    ) -> None:
        self.inner, self._use, self._verbs = inner, use, verbs
        self.files = WatchedFiles(inner.files, use)

    def start(self, request: ExecRequest, label: str = "") -> WatchedExec:
        """See `BackendSandbox`; by `label` a later process knows it, where the backend outlives ours.

        It is to be driven until its end: see `pump.begin`. Where sandboxes are saved as a whole, it can be
        saved with them.
        """
        if not isinstance(self.inner, Continuable):
            return self.start_attended(request, label)
        with self._use.call():
            return self.adopt(self.inner.start(request))

    def start_attended(self, request: ExecRequest, label: str = "") -> WatchedExec:
        """Start what a caller waits for; `label` as of `start`."""
        with self._use.call():
            return self.adopt(begin(self.inner, request, label))

    def lead_to(self, inner: BackendSandbox) -> None:
        """Be the sandbox that was restored in its place from now on."""
        self.inner = inner
        self.files.lead_to(inner.files)

    def adopt(self, begun: BackendExec) -> WatchedExec:
        """An exec that began elsewhere is watched from now on."""
        run = WatchedExec(begun, self._use)
        self._use.started(run)
        return run

    def snapshot(self, metadata: Any) -> Any:
        with self._use.call():
            return self.inner.snapshot(metadata)

    def compare(self, since: Any) -> Any:
        with self._use.call():
            return self.inner.compare(since)  # type: ignore[attr-defined]

    def attach(self, mount: Any) -> Any:
        with self._use.call():
            return self.inner.attach(mount)

    def terminate(self) -> None:
        self._verbs["terminate"]()

    def suspend(self) -> None:
        self._verbs["suspend"]()

    def resume(self) -> None:
        self._verbs["resume"]()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.inner)  # what the backend's sandbox declares holds for this proxy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WatchedExec:
    """`BackendExec`; whoever closes it has just used it, so that a timeout counts from its end."""

    def __init__(self, inner: BackendExec, use: Use) -> None:
        self._inner, self._use = inner, use

    def close(self) -> None:
        self._inner.close()
        self._use.touch()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)  # as `WatchedSandbox`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedFiles:
    """`BackendFiles`; every call counts as use, and an open file until it is closed."""

    def __init__(self, inner: Any, use: Use) -> None:
        self._inner, self._use = inner, use

    def lead_to(self, inner: Any) -> None:
        """Be the files of the sandbox that was restored in its place from now on."""
        self._inner = inner

    def open_read(self, path: str) -> Any:
        with self._use.call():
            stream = self._inner.open_read(path)
            self._use.opened(stream)
            return stream

    def open_write(self, path: str, **options: Any) -> Any:
        with self._use.call():
            stream = self._inner.open_write(path, **options)
            self._use.opened(stream)
            return stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._use.call():
                return method(*args, **options)

        return call
