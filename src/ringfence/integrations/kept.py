"""Sandboxes that outlive the adapter object that made them, to be found again by their id.

Some frameworks rebuild their backend for every call and name the environment by a reference. What is
kept here ends when somebody ends it, or with the process.
"""

from __future__ import annotations

import atexit
import threading

from ..errors import SandboxNotFound
from ..sandbox import Sandbox

_kept: dict[str, Sandbox] = {}
_lock = threading.Lock()


def keep(sandbox: Sandbox) -> Sandbox:
    """Remember a sandbox; returns it."""
    with _lock:
        for gone in [name for name, each in _kept.items() if each.state == "terminated"]:
            del _kept[gone]
        _kept[sandbox.id] = sandbox
    return sandbox


def find(sandbox_id: str) -> Sandbox:
    """The live sandbox of this id.

    Raises:
        SandboxNotFound: This process keeps none, or it has ended.
    """
    with _lock:
        sandbox = _kept.get(sandbox_id)
        if sandbox is not None and sandbox.state != "terminated":
            return sandbox
        _kept.pop(sandbox_id, None)
    hint = "it has ended, or another process keeps it: create a new one"
    raise SandboxNotFound(f"no sandbox {sandbox_id!r} lives in this process", hint=hint)


@atexit.register
def _end_all() -> None:
    while _kept:
        _kept.popitem()[1].terminate()
