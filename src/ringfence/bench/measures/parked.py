"""parked: what a sandbox that waits for work occupies, and how many of them this machine holds."""

from __future__ import annotations

import time

from ...errors import RingfenceError
from ...sandbox import Sandbox
from .. import processes
from ..daemon import allow_open_files
from ..rows import HIGHER, VALUE, Row, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings

WHAT_PARKED = "parked sandbox, PSS of its processes"
WHAT_LIVE = "live sandboxes at once"
_MIB = 1 << 20
# After a burst the zygote keeps a process ready for a moment, which is no sandbox; and parked is
# who has had nothing to do for a while: launcher.hibernation.
_CALM_S = 2.5


def measure_memory(settings: Settings) -> Iterator[Row]:
    """PSS from outside, as more and more of them share what they can share."""
    sandboxes: list[Sandbox] = []
    try:
        for count in settings.parked:
            while len(sandboxes) < count:
                sandboxes.append(Sandbox.create())
            yield _memory_row(count)
    finally:
        for sandbox in sandboxes:
            sandbox.terminate()


def _memory_row(count: int) -> Row:
    what, target = f"{WHAT_PARKED}, {count} live", Target(VALUE, must=1.5, aim=0.8)
    time.sleep(_CALM_S)
    launched = processes.Launched()
    try:
        each = sum(processes.pss_bytes(pid) for pid in launched.sandboxed) / count
        shared = sum(processes.pss_bytes(pid) for pid in launched.serving)
        shared += sum(processes.memory_file_bytes(pid) for pid in launched.serving)
    except PermissionError:
        note = "needs root: the processes of a sandbox hide from their own user too"
        return Row("parked", what, "MiB", None, target=target, note=note)
    note = f"and {shared / _MIB:.1f} MiB once, for the process that makes them"
    return Row("parked", what, "MiB", each / _MIB, target=target, samples=count, note=note)


def measure_count(settings: Settings) -> Iterator[Row]:
    """As many as asked for, or as this machine gives; each of a sample still answers."""
    target = Target(VALUE, HIGHER, must=1000, aim=5000)
    allow_open_files()
    sandboxes: list[Sandbox] = []
    before = processes.available_bytes()
    started = time.perf_counter()
    stopped = ""
    try:
        try:
            while len(sandboxes) < settings.live:
                sandboxes.append(Sandbox.create())
        except (RingfenceError, OSError) as exc:
            stopped = f"stopped there: {exc}"
        elapsed = time.perf_counter() - started
        silent = "" if sandboxes else "none was made"
        for sandbox in sandboxes[-2:] if stopped else ():
            sandbox.terminate()  # what is exhausted is needed to look at the others
        used = before - processes.available_bytes()
        for sandbox in _sample(sandboxes[:-2]):
            silent = silent or _silence(sandbox)
    finally:
        for sandbox in sandboxes:
            sandbox.terminate()
    count = len(sandboxes)
    each = used / max(count, 1) / _MIB
    note = f"{elapsed:.1f} s, {each:.2f} MiB each of kernel and user memory together"
    if stopped or silent:
        note = "; ".join(filter(None, (note, stopped, silent)))
    elif count < settings.live or settings.live < 1000:
        target = Target(VALUE, HIGHER)  # fewer were asked for than the target: no verdict
    elif not settings.full:
        target = Target(VALUE, HIGHER, must=1000)
        note += "; asked for no more, --full does"
    ours = 0.0 if silent else float(count)
    yield Row("live", WHAT_LIVE, "sandboxes", ours, target=target, note=note)


def _silence(sandbox: Sandbox) -> str:
    """Why this one is not alive; empty when it is."""
    try:
        result = sandbox.exec(["true"])
    except (RingfenceError, OSError) as exc:
        return f"not all of them answer: {exc}"
    return "" if result.ok else f"not all of them work: {result}"


def _sample(sandboxes: list[Sandbox]) -> list[Sandbox]:
    step = max(1, len(sandboxes) // 10)
    return sandboxes[::step]
