"""Sandboxes that outlive the adapter object that made them, to be found again by their id.

Some frameworks rebuild their backend for every call and name the environment by a reference. What is
kept here ends when somebody ends it, or with the process.
"""

from __future__ import annotations

import atexit
import threading

from ..errors import SandboxNotFound
from ..sandbox import Sandbox

_sandboxes: dict[str, Sandbox] = {}
_lock = threading.Lock()


def keep(sandbox: Sandbox) -> Sandbox:
    """Remember a sandbox; returns it."""
    with _lock:
        for gone in [name for name, each in _sandboxes.items() if each.state == "terminated"]:
            del _sandboxes[gone]
        _sandboxes[sandbox.id] = sandbox
    return sandbox


def find(sandbox_id: str) -> Sandbox:
    """The live sandbox of this id.

    Raises:
        SandboxNotFound: This process keeps none, or it has ended.
    """
    with _lock:
        sandbox = _sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.state != "terminated":
            return sandbox
        _sandboxes.pop(sandbox_id, None)
    hint = "it has ended, or another process keeps it: create a new one"
    raise SandboxNotFound(f"no sandbox {sandbox_id!r} lives in this process", hint=hint)


@atexit.register
def _end_all() -> None:
    while _sandboxes:
        _sandboxes.popitem()[1].terminate()
