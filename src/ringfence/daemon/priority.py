"""The processor's time for a daemon that starts while its sandboxes, and others, use all of it."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NICE = -10  # nine times the weight of an ordinary process: sched(7)


def own_session() -> None:
    """Leave a session that others share, unless it has a terminal, whose signals are for us too.

    The scheduler shares time between sessions first: sched(7), "autogroup". With 13 busy processes in the
    same one, loading waits for them 7 to 12 s; a process of an ordinary user has no other way to weigh more.
    """
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        terminal = file.read().rpartition(")")[2].split()[4]
    if terminal == "0":
        with contextlib.suppress(PermissionError):  # it leads a group already: a supervisor's child
            os.setsid()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Run the block before ordinary processes; without effect for an ordinary user.

    Loading takes half a second of a processor. Beside 13 busy processes that was 19 seconds, in which
    nobody was answered. Preconditions: the block starts no process, which would inherit this.
    """
    _prefer_session()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(before, _NICE))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def _prefer_session() -> None:
    """Weigh our session as much more than each of the sandboxes', where it is ours alone.

    The scheduler shares time between sessions first, one for each sandbox: sched(7), "autogroup".
    """
    if os.getsid(0) != os.getpid():
        return  # a shell's, with all its jobs
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(_NICE))
