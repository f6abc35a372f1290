"""Per-key locks: concurrent requests with one idempotency key run in turn, and the second finds the
first one's result.
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..model.acquire import AcquireOptions
    from ..model.spec import SandboxSpec


class Keys:
    """Locks by name, which exist while a thread holds or wants one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, str], tuple[threading.Lock, int]] = {}

    @contextmanager
    def turn(self, owner: str, key: str) -> Iterator[None]:
        """Hold the lock of this key during the block."""
        name = (owner, key)
        with self._lock:
            lock, users = self._turns.get(name, (threading.Lock(), 0))
            self._turns[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._turns.pop(name)
                if users > 1:
                    self._turns[name] = (lock, users - 1)


def digest_of(spec: SandboxSpec, options: AcquireOptions) -> str:
    """The same for the same request, secrets included, which it does not give away."""
    return digest([spec.to_json(with_secrets=True), options.to_json()])


def digest(asked: object) -> str:
    """Of JSON's own types: the same for the same, whatever the order of keys."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
