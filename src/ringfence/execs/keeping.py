"""How long the output of execs is kept, and how much of it: within bounds, the oldest goes first."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress

from ..errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.store import Store

_EVERY_S = 15.0


class Keeping:
    """Removes, in a thread of its own, what is beyond the bounds. What runs is never touched.

    Args:
        most_bytes: On disk, of all execs together.
        most_records: Of execs that have ended.
        before: Called each time before.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        most_bytes: int,
        most_records: int,
        before: Callable[[], None],
    ) -> None:
        self._before = before
        self._store, self._directory = store, directory
        self._most_bytes, self._most_records = most_bytes, most_records
        self._since = 0
        self._wake, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ringfence-keeping", daemon=True)
        self._thread.start()

    def came(self, count: int) -> None:
        """So many bytes are on disk since an exec that has just ended."""
        self._since += count
        if self._since > self._most_bytes // 8:
            self._wake.set()

    def close(self) -> None:
        """Remove nothing more; idempotent."""
        self._over = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over:
            with suppress(RingfenceError, OSError):
                self.tidy()
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def tidy(self) -> None:
        """Remove it now."""
        self._since = 0
        self._before()
        ended = self._store.execs.ended()
        known = {sandbox for _, sandbox, _ in ended}
        used = {}
        for sandbox in _names(self._directory):
            here = os.path.join(self._directory, sandbox)
            if sandbox not in known and self._store.sandbox(sandbox) is None:
                shutil.rmtree(here, ignore_errors=True)
                continue
            for exec_id in _names(here):
                used[exec_id] = _size(os.path.join(here, exec_id))
        over, total = len(ended) - self._most_records, sum(used.values())
        for exec_id, sandbox, _ in ended:
            if over <= 0 and total <= self._most_bytes:
                return
            if over > 0:
                self._store.execs.remove(exec_id)
                over -= 1
            if exec_id in used:
                shutil.rmtree(os.path.join(self._directory, sandbox, exec_id), ignore_errors=True)
                total -= used[exec_id]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(directory: str) -> int:
    """Bytes on disk; of what goes away meanwhile, none."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
