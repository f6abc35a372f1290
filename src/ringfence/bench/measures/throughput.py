"""throughput: many callers making and ending sandboxes at the same time."""

from __future__ import annotations

import threading
import time

from ...sandbox import Sandbox
from ..rows import HIGHER, VALUE, Row, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings


class _Crowd:
    """Threads that each make and end sandboxes until told to stop."""

    def __init__(self, callers: int) -> None:
        self.made = [0] * callers
        self.problem: BaseException | None = None
        self._stop = threading.Event()
        self._start = threading.Barrier(callers + 1)
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(callers)]

    def run(self, seconds: float) -> float:
        """Sandboxes a second: made and gone, from the common start to the last one's end."""
        for thread in self._threads:
            thread.start()
        self._start.wait()
        started = time.perf_counter()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in self._threads:
            thread.join()
        elapsed = time.perf_counter() - started
        if self.problem is not None:
            raise self.problem
        return sum(self.made) / elapsed

    def _work(self, number: int) -> None:
        self._start.wait()
        try:
            while not self._stop.is_set():
                Sandbox.create().terminate()
                self.made[number] += 1
        except BaseException as exc:  # noqa: BLE001  it is raised where all of them are awaited
            self.problem = exc
            self._stop.set()


def measure(settings: Settings) -> Iterator[Row]:
    crowd = _Crowd(settings.callers)
    rate = crowd.run(settings.throughput_s)
    yield Row(
        "throughput",
        f"create + terminate, {settings.callers} callers",
        "/s",
        rate,
        target=Target(VALUE, HIGHER, must=150, aim=400),
        samples=sum(crowd.made),
    )
