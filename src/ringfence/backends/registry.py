"""The one place that names concrete backends."""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..launcher.spawn import Started
    from .protocol import Backend

NAMES = ("native", "fake")
_lock = allocate_lock()
_shared: dict[tuple[str, int, int], Backend] = {}
_warm: Started | None = None


def hand_over(started: Started) -> None:
    """A zygote that was started before anything else; the native backend made next takes it."""
    global _warm
    _warm = started


def backend_named(name: str) -> Backend:
    """This process's shared backend of that name; it lives as long as the process.

    Raises:
        InvalidRequest: There is none.
    """
    if name not in NAMES:
        from ..errors import InvalidRequest

        raise InvalidRequest(
            f"unknown backend {name!r}", field="backend", hint=f"one of {', '.join(NAMES)}"
        )
    # A forked child must not share its parent's zygote, nor a changed user the old one's.
    key = (name, os.getpid(), os.geteuid())
    with _lock:
        if key not in _shared:
            _shared[key] = _make(name)
            if len(_shared) == 1:
                import atexit

                atexit.register(_close_all, os.getpid())
        return _shared[key]


def new_backend(name: str, **options: Any) -> Backend:
    """A backend of the caller's own, who closes it; options as its class takes them.

    Raises:
        InvalidRequest: There is none of that name.
    """
    if name == "native":
        from .native.backend import NativeBackend

        return NativeBackend(**options)
    return _make(name) if name in NAMES else backend_named(name)


def close_all() -> None:
    """End every shared backend of this process, all its sandboxes and the egress processes.

    The next use makes new ones.
    """
    with _lock:
        backends = list(_shared.values())
        _shared.clear()
    for backend in backends:
        backend.close()
    egress = sys.modules.get("ringfence.egress.client")
    if egress is not None:
        egress.close_shared()


def _close_all(owner: int) -> None:
    """At the end of the process: nothing is left when it is gone, not a moment later."""
    if os.getpid() == owner:
        close_all()


def _make(name: str) -> Backend:
    if name == "fake":
        from .fake import FakeBackend

        return FakeBackend()
    from .native.backend import NativeBackend
    from .native.zygote import Zygote

    return NativeBackend(zygote=Zygote(_warm) if _warm else None)
