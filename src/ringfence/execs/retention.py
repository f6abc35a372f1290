"""How long the output of execs is kept, and how much of it: within bounds, the oldest goes first."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import suppress

from ..errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..store.store import Store

_EVERY_S = 15.0
_SURVEY_S = 600.0  # between two looks at every file
_BATCH = 100  # records that are read at once: there may be tens of thousands


class Retention:
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
        self._since, self._survey_at = 0, 0.0
        self._wake, self._over = threading.Event(), False
        # Two at once would each count as still there what the other removes, and remove too much.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ringfence-retention", daemon=True)
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
                is_due = time.monotonic() >= self._survey_at or self._since > self._most_bytes // 8
                self.tidy() if is_due else self._tidy_records_alone()
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def tidy(self) -> None:
        """Look at everything now, and remove what is too much."""
        with self._lock:
            self._tidy_all()

    def _tidy_records_alone(self) -> None:
        with self._lock:
            self._tidy_records()

    def _tidy_all(self) -> None:
        self._since, self._survey_at = 0, time.monotonic() + _SURVEY_S
        self._tidy_records()
        total = self._survey()
        for exec_id, sandbox, _ in self._oldest():
            if total <= self._most_bytes:
                return
            total -= _size(os.path.join(self._directory, sandbox, exec_id))
            self._remove_output(sandbox, exec_id)

    def _tidy_records(self) -> None:
        self._before()
        records = self._store.execs
        while (over := records.count_ended() - self._most_records) > 0:
            batch = records.ended(most=min(over, _BATCH))
            for exec_id, sandbox, _ in batch:
                self._remove_output(sandbox, exec_id)
            with self._store.together():
                for exec_id, _, _ in batch:
                    records.remove(exec_id)

    def _oldest(self) -> Iterator[tuple[str, str, float]]:
        """Execs that have ended, the one that ended first at the start."""
        after = (0.0, "")
        while batch := self._store.execs.ended(after, _BATCH):
            yield from batch
            after = batch[-1][2], batch[-1][0]

    def _survey(self) -> int:
        """Bytes on disk; what belongs to no sandbox that is known is removed."""
        total = 0
        for sandbox in _names(self._directory):
            here = os.path.join(self._directory, sandbox)
            if self._store.sandbox(sandbox) is None:
                shutil.rmtree(here, ignore_errors=True)
                continue
            total += sum(_size(os.path.join(here, exec_id)) for exec_id in _names(here))
        return total

    def _remove_output(self, sandbox: str, exec_id: str) -> None:
        shutil.rmtree(os.path.join(self._directory, sandbox, exec_id), ignore_errors=True)


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
