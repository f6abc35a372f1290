"""Commands that write while the directory of their sandbox's files is over its size.

The kernel gives an ordinary user no file system of exact size, so the size is sampled. A command that
writes beyond it is ended; the sandbox and the files stay, and what removes files is left alone.
"""

from __future__ import annotations

import glob

from ....errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from ..agents.execs import LocalExec

    class Owner(Protocol):
        """The sandbox."""

        pid: int
        runs: dict[int, LocalExec]


_LEAST_BYTES = 1 << 16  # what a shell's history or a lock file takes is no growth
_SHARE = 8  # of what the one that writes most has written: less is not what filled the disk
_MOST_GROWTHS = 4  # samples in which the files grow although all that writes has been ended


class Writers:
    """Bytes that each running command of a sandbox has written. Used by one thread."""

    def __init__(self, sandbox: Owner) -> None:
        self._sandbox = sandbox
        self._roots: dict[
            int, int
        ] = {}  # number of an exec: its first process, as the host sees it
        self._written: dict[int, int] = {}
        self._growths = 0

    def look(self) -> list[LocalExec]:
        """Return the commands that have written much since the last look."""
        children = _children_below(self._sandbox.pid)
        self._find_roots(children)
        since: dict[LocalExec, int] = {}
        written: dict[int, int] = {}
        for number, run in list(self._sandbox.runs.items()):
            root = self._roots.get(number)
            if root is None:
                continue
            written[number] = _written_below(root, children)
            since[run] = written[number] - self._written.get(number, 0)
        self._written = written
        least = max(_LEAST_BYTES, max(since.values(), default=0) // _SHARE)
        return [run for run, size in since.items() if size >= least]

    def relieve(self, writers: list[LocalExec], why: str, *, grows: bool) -> bool:
        """End the commands that write; False: the files grow, and there is none left to end.

        Args:
            writers: Of `look`.
            why: What is over its size, as the command's standard error says it.
            grows: The files have grown since the last look.
        """
        if not grows:
            self._growths = 0
            return True
        self._growths += 1
        # A process in the background belongs to no command, and fallocate(2) counts as no writing.
        if not writers and self._growths > 1:
            writers = list(self._sandbox.runs.values())
        for run in writers:
            run.ended_for = "disk"
            run.note = f"ringfence: ended: {why}; remove files, or raise the limit\n".encode()
            try:
                run.kill()
            except RingfenceError:
                pass  # it has just ended
        return self._growths <= _MOST_GROWTHS

    def _find_roots(self, children: dict[int, list[int]]) -> None:
        runs = dict(self._sandbox.runs)
        self._roots = {number: pid for number, pid in self._roots.items() if number in runs}
        unknown = [run for number, run in runs.items() if number not in self._roots]
        if not unknown:
            return  # asking would wake a sandbox that hibernates
        inside = {_pid_inside(pid): pid for below in children.values() for pid in below}
        for run in unknown:
            pid = inside.get(run.pid() or -1)
            if pid is not None:
                self._roots[run.number] = pid


def _children_below(pid: int) -> dict[int, list[int]]:
    """Return the children of each process below one. Source: proc(5), children."""
    found: dict[int, list[int]] = {}
    pending = [pid]
    while pending:
        parent = pending.pop()
        below: list[int] = []
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            below += map(int, _read(path).split())
        found[parent] = below
        pending += [each for each in below if each not in found]
    return found


def _written_below(root: int, children: dict[int, list[int]]) -> int:
    """Return the bytes of a process tree; a parent has those of children that it has waited for."""
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        pending += children.get(pid, ())
        text = _read(f"/proc/{pid}/io").partition("\nwrite_bytes:")[2]
        total += int(text.partition("\n")[0] or 0)
    return total


def _pid_inside(pid: int) -> int:
    ids = _read(f"/proc/{pid}/status").partition("\nNSpid:")[2].partition("\n")[0].split()
    return int(ids[-1]) if ids else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has just ended
        return ""
