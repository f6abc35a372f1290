"""Who did what: one JSON line for each request that changes something, or that was refused."""

from __future__ import annotations

import json
import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LARGEST = 64 << 20
_REFUSED = (401, 403, 429)
_REFUSED_OR_NOT_THERE = (400, 404, 422, *_REFUSED)
_as_json = json.JSONEncoder(separators=(",", ":")).encode
_QUIET = ("GET", "HEAD", "OPTIONS")


class Audit:
    """A file that is only appended to; at 64 MiB it becomes `NAME.1`. None keeps nothing.

    Attributes:
        lost: Lines that could not be written, the disk being full, say.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self._lock, self._fd = path, threading.Lock(), -1
        self._bytes = self.lost = 0

    @staticmethod
    def is_of_interest(method: str, status: int, path: str) -> bool:
        """Whether a request belongs here.

        An id that is not there may be another client's; a file of a sandbox that is not there is nothing.
        """
        refused = _REFUSED if "/files/" in path else _REFUSED_OR_NOT_THERE
        return method not in _QUIET or status in refused

    def write(self, **facts: Any) -> None:
        """One line. JSON escapes whatever a client chose: nobody can forge another line."""
        if self._path is None:
            return
        line = _as_json({"time": round(time.time(), 6), **facts}).encode() + b"\n"
        with self._lock:
            try:
                if self._fd < 0:
                    self._open()
                self._bytes += os.write(self._fd, line)
                if self._bytes > _LARGEST:
                    self._rotate()
            except OSError:
                self.lost += 1

    def _open(self) -> None:
        assert self._path is not None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._bytes = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        assert self._path is not None
        os.rename(self._path, f"{self._path}.1")
        fd, self._fd = self._fd, -1
        os.close(fd)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self._path = None
