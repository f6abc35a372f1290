"""Audit log: one JSON line for each request of interest, in two files.

Changes made with a key go to `audit.log`, requests that changed nothing to `refused.log`: callers
without a key, or without permission, cannot rotate the actions of others out. See
`docs/how-to/server.md` for rotation.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LARGEST, LARGEST_REFUSED = 64 << 20, 16 << 20
LONGEST_PATH = 256
MOST_WITHOUT_KEY, MOST_WITH_KEY = 1, 20  # lines a second about refusals; more are counted
MOST_REFUSED = 200  # of one address in a second, then 429
_MOST_PEERS = 256  # counted apart in one second
_OTHERS = "others"
_WINDOW_S = 1.0
_REFUSED = (401, 403, 429)
_REFUSED_OR_NOT_THERE = (400, 404, 422, *_REFUSED)
_GONE = 499  # the client went away: it is not known what became of the request
_as_json = json.JSONEncoder(separators=(",", ":")).encode
_QUIET = ("GET", "HEAD", "OPTIONS")


class LogFile:
    """A file that is only appended to; at `largest` bytes it becomes `NAME.1`. Thread-safe.

    Renamed or removed by somebody else, it is made anew within a second, or on `reopen`.

    Attributes:
        lost: Lines that could not be written, the disk being full, say.
    """

    def __init__(self, path: str, largest: int) -> None:
        self._path, self._largest = path, largest
        self._lock, self._fd = threading.Lock(), -1
        self._bytes = self.lost = 0
        self._look_at = 0.0

    def append(self, line: bytes) -> None:
        with self._lock:
            try:
                now = time.monotonic()
                if self._fd >= 0 and now >= self._look_at:
                    self._look(now)
                if self._fd < 0:
                    self._open(now)
                self._bytes += os.write(self._fd, line)
                if self._bytes > self._largest:
                    os.rename(self._path, f"{self._path}.1")
                    self._close()
            except OSError:
                self.lost += 1

    def _open(self, now: float) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._look(now)

    def _look(self, now: float) -> None:
        """Close what has another name now; of what was truncated, count anew."""
        self._look_at = now + _WINDOW_S
        ours = os.fstat(self._fd)
        self._bytes = ours.st_size
        try:
            if os.path.samestat(ours, os.stat(self._path, follow_symlinks=False)):
                return
        except FileNotFoundError:
            pass
        self._close()

    def reopen(self) -> None:
        """Write the next line into whatever file has the name then."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass
class _Bucket:
    """Refusals of one caller, or one address, in the current second."""

    whose: dict[str, Any]
    seen: int = 0
    counted: Counter[str] = field(default_factory=Counter)


class Audit:
    """Both files in `directory`; None keeps nothing. Of one event loop."""

    def __init__(self, directory: str | None) -> None:
        self._done = self._refused = None
        if directory is not None:
            self._done = LogFile(os.path.join(directory, "audit.log"), LARGEST)
            self._refused = LogFile(os.path.join(directory, "refused.log"), LARGEST_REFUSED)
        self._buckets: dict[str, _Bucket] = {}
        self._closes: asyncio.TimerHandle | None = None

    @property
    def lost(self) -> int:
        return sum(each.lost for each in (self._done, self._refused) if each)

    @staticmethod
    def is_of_interest(method: str, status: int, path: str) -> bool:
        """Return whether a request is logged.

        A missing id may be another client's, so it is of interest; a missing file of a sandbox is
        not.
        """
        refused = _REFUSED if "/files/" in path else _REFUSED_OR_NOT_THERE
        return method not in _QUIET or status in refused

    def write(self, **facts: Any) -> None:
        """Write one line. JSON escapes all client text, so a client cannot forge another line."""
        if _changed_nothing(facts["status"], facts.get("code", "")):
            self._refuse(facts)
        elif self._done is not None:
            self._done.append(_line(facts))

    def _refuse(self, facts: dict[str, Any]) -> None:
        """Write it, or count it where its caller has had enough lines in this second."""
        name, whose, most = facts["peer"], {"peer": facts["peer"]}, MOST_WITH_KEY
        if facts.get("client") is None:
            name = address_of(facts["peer"])
            whose, most = {"peer": name}, MOST_WITHOUT_KEY
        elif facts.get("key"):
            name = facts["key"]
            whose = {"client": facts["client"], "key": name}
        bucket = self._bucket(name, whose)
        bucket.seen += 1
        if bucket.seen > most:
            bucket.counted[str(facts["status"])] += 1
        elif self._refused is not None:
            self._refused.append(_line(facts))

    def _bucket(self, name: str, whose: dict[str, Any]) -> _Bucket:
        if not self._buckets:
            self._closes = asyncio.get_running_loop().call_later(_WINDOW_S, self._close_window)
        if name not in self._buckets and len(self._buckets) >= _MOST_PEERS:
            name, whose = _OTHERS, {"peer": _OTHERS}
        return self._buckets.setdefault(name, _Bucket(whose))

    def has_enough(self, peer: str) -> bool:
        """Return whether an address reached the limit of refusals per second and gets 429."""
        bucket = self._buckets.get(address_of(peer))
        return bucket is not None and bucket.seen >= MOST_REFUSED

    def _close_window(self) -> None:
        """Write down what was only counted."""
        buckets, self._buckets, self._closes = self._buckets, {}, None
        for each in buckets.values():
            if each.counted and self._refused is not None:
                total = sum(each.counted.values())
                self._refused.append(
                    _line({**each.whose, "more": total, "by_status": each.counted})
                )

    def reopen(self) -> None:
        """Open new files: the old ones were renamed by a log rotator."""
        for each in (self._done, self._refused):
            if each is not None:
                each.reopen()

    def close(self) -> None:
        if self._closes is not None:
            self._closes.cancel()
        self._close_window()
        self.reopen()
        self._done = self._refused = None


def address_of(peer: str) -> str:
    """The address of a peer, as far as one sender can choose it: without port, of IPv6 the /64."""
    if peer.startswith("uid "):
        return peer
    host = peer.rpartition(":")[0].partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def _changed_nothing(status: int, code: str) -> bool:
    if status == 503:
        return code != "server_unreachable"  # the server stopped in the middle of it
    return 400 <= status < _GONE


def _line(facts: dict[str, Any]) -> bytes:
    return _as_json({"time": round(time.time(), 6), **facts}).encode() + b"\n"
