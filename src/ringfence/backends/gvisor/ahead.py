"""Loops of creates: the next sandbox of the same kind is prebuilt while the last one is in use.

It is built in the background, is nobody's, and is gone a few seconds later unless somebody came for
it. See decision 0065.
"""

from __future__ import annotations

import os
import threading
import time
from _thread import allocate_lock, start_new_thread

from ...errors import LifecycleError, RingfenceError
from .warm import is_bindable, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...model.spec import SandboxSpec
    from .sandbox import GvisorSandbox
    from .warm import GvisorWarm

KEEP_S = 5.0  # creates this close together are a burst; so long is one kept that nobody comes for
_SWITCH = "RINGFENCE_PREBUILT"
_OFF = ("0", "no", "off", "false")


def is_on() -> bool:
    """Unless the environment says RINGFENCE_PREBUILT=off."""
    return os.environ.get(_SWITCH, "").lower() not in _OFF


class _Next:
    """The one ahead: being built, built, or failed."""

    def __init__(self, kind: SandboxSpec) -> None:
        self.kind, self.owner = kind, os.getpid()
        self.built, self.wanted = threading.Event(), threading.Event()
        self.warm: GvisorWarm | None = None

    def get(self) -> GvisorWarm | None:
        """It, once it is built; None where it could not be."""
        self.wanted.set()
        self.built.wait()
        return self.warm


class Ahead:
    """The last create's kind, and the prebuilt sandbox. Thread-safe.

    Args:
        build: Makes a warm sandbox.
    """

    def __init__(self, build: Callable[[SandboxSpec], GvisorWarm]) -> None:
        self._build, self._lock = build, allocate_lock()
        self._next: _Next | None = None
        self._last: SandboxSpec | None = None
        self._last_s, self._is_closed = 0.0, False

    def take(self, spec: SandboxSpec) -> GvisorSandbox | None:
        """Take the prebuilt sandbox, if it can serve `spec`."""
        if not _can_wait(spec):
            return None
        with self._lock:
            ahead = self._next
            if ahead is not None and ahead.owner != os.getpid():
                ahead = self._next = None  # it is our parent's
            if ahead is None or ahead.kind != kind_of(spec):
                return None
            self._next = None
        warm = ahead.get()
        try:
            return warm.claim(spec) if warm is not None else None
        except LifecycleError:
            return None  # it has ended meanwhile

    def follow(self, spec: SandboxSpec) -> None:
        """Record a create: on the second of a kind within a short time, start the next."""
        if not _can_wait(spec):
            return
        kind, now = kind_of(spec), time.monotonic()
        with self._lock:
            is_burst = self._last == kind and now - self._last_s < KEEP_S
            self._last, self._last_s = kind, now
            if not is_burst or self._next is not None or self._is_closed:
                return
            ahead = self._next = _Next(kind)
        start_new_thread(self._make, (ahead,))

    def _make(self, ahead: _Next) -> None:
        try:
            ahead.warm = self._build(ahead.kind)
        except (RingfenceError, OSError):
            pass  # whoever comes makes their own, and hears of it
        finally:
            ahead.built.set()
        if not ahead.wanted.wait(KEEP_S):
            self._let_go(ahead)

    def _let_go(self, ahead: _Next) -> None:
        with self._lock:
            if self._next is not ahead:
                return  # somebody was quicker
            self._next = None
        if ahead.warm is not None:
            ahead.warm.discard()

    def close(self) -> None:
        with self._lock:
            self._is_closed, ahead, self._next = True, self._next, None
        if ahead is not None and ahead.owner == os.getpid() and (warm := ahead.get()) is not None:
            warm.discard()


def _can_wait(spec: SandboxSpec) -> bool:
    # An image's name may point to another image by the next create.
    # An image on disk takes its whole size from the host's disk.
    is_same = spec.id is None and spec.image is None and spec.network.is_none
    is_same = is_same and not spec.disk_root
    return is_same and is_bindable(spec)
