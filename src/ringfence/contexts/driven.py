"""R and Java as interpreters of a context. Runs inside the sandbox, sent with `kernel.py` and a driver.

The driver is a program in the language itself. It reads cells, each behind its length in four bytes,
and answers with lines `kind name length`, each with as many bytes behind it: `begun` (R), `part`, then
`main`, `display` or `error` for the parts since, and `done`. The length -1 interrupts a cell of Java.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from typing import Any, Callable  # noqa: UP035  Python 3.8

SOURCE: str = globals().get("SOURCE", "")  # of the driver; see `frames`
_LOOKS_S = 0.05  # at interrupts, while a cell runs
_AGAIN = 4  # times that R is interrupted, a look apart
_MOST_BYTES = 64 << 20  # of one part
_NEEDS = {"r": ("Rscript", "R"), "java": ("jshell", "a JDK with jshell")}
_COMMANDS = {
    "r": ["Rscript", "--no-save", "--no-restore"],
    "java": ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
}


class CellFailed(Exception):  # noqa: N818  never shown: its parts are
    """The error of a cell, as the driver tells it."""

    def __init__(self, parts: dict[str, bytes]) -> None:
        self.parts = {name: data.decode("utf-8", "replace") for name, data in parts.items()}


class _Cell:
    """The cell that runs, as far as the driver has told of it.

    Attributes:
        again: Times that it is still to be interrupted, and one more.
    """

    failed: Any = None
    was_interrupted, again = False, 0

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}


class Driver:
    """The program that runs cells.

    Args:
        language: `r` or `java`.
        ends: What cells write to, by the number of the descriptor.
        stderr: Descriptor for the reason if it does not start.
    """

    def __init__(self, language: str, ends: dict[int, int], stderr: int) -> None:
        self._language, self._ends = language, ends
        self._process: Any = None
        program, name = _NEEDS[language]
        if not any(os.access(f"{each}/{program}", os.X_OK) for each in os.get_exec_path()):
            os.write(stderr, f"{name} is not installed in the sandbox\n".encode())
            os._exit(1)

    def start(self) -> None:
        """Start it. One of Java takes a second, so it is ready before this returns."""
        with tempfile.TemporaryDirectory() as place:
            asks, self._asks = os.pipe()
            self._tells, tells = os.pipe()
            path = f"{place}/{'driver.R' if self._language == 'r' else 'Driver.java'}"
            with open(path, "w", encoding="utf-8") as file:
                file.write(SOURCE)
            # A JVM ends by SIGINT, unless that is ignored when it begins.
            before = signal.getsignal(signal.SIGINT)
            env = dict(os.environ)
            if not {"LANG", "LC_ALL", "LC_CTYPE"} & env.keys():
                env["LC_CTYPE"] = "C.UTF-8"
            if self._language == "java":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                self._process = subprocess.Popen(
                    [*_COMMANDS[self._language], path, str(asks), str(tells)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._ends[1],
                    stderr=self._ends[2],
                    pass_fds=(asks, tells),
                    env=env,
                )
            finally:
                signal.signal(signal.SIGINT, before)
                os.close(asks)
                os.close(tells)
            if self._language == "r":
                self._give(b"")
            self._read(lambda *_: None, lambda: False)

    def _give(self, code: bytes) -> None:
        left = len(code).to_bytes(4, "big") + code
        try:
            while left:
                left = left[os.write(self._asks, left) :]
        except BrokenPipeError:
            pass  # it has ended: whoever reads its answer sees that

    def run(
        self,
        code: str,
        show: Callable[[str, dict[str, bytes]], None],
        takes_interrupt: Callable[[], bool],
    ) -> bool:
        """Run a cell to its end; False: the driver has ended by it.

        Args:
            code: Of the cell.
            show: Takes `main` or `display`, and the value's parts.
            takes_interrupt: Says whether an interrupt came since it was asked last.

        Raises:
            CellFailed: It failed.
        """
        if self._process is None:
            self.start()
        self._give(code.encode("utf-8", "replace"))
        return self._read(show, takes_interrupt)

    def reseed(self) -> None:
        """In a copy of its process: draw other random numbers than the original. Java cannot be told to."""
        if self._language == "r" and self._process is not None:
            seed = "if (exists('.Random.seed', globalenv())) set.seed(NULL)"
            self.run(seed, lambda *_: None, lambda: False)

    def _read(
        self, show: Callable[[str, dict[str, bytes]], None], takes_interrupt: Callable[[], bool]
    ) -> bool:
        cell, seen = _Cell(), b""
        poll = select.poll()
        poll.register(self._tells, select.POLLIN)
        while True:
            if takes_interrupt():
                cell.was_interrupted, cell.again = True, _AGAIN
                self._interrupt()
            if not poll.poll(_LOOKS_S * 1000):
                self._interrupt_again(cell, takes_interrupt)
                continue
            data = os.read(self._tells, 1 << 16)
            seen += data
            while b"\n" in seen:
                header, _, rest = seen.partition(b"\n")
                kind, name, size = self._parsed(header)
                if not 0 <= size <= _MOST_BYTES:
                    data = b""  # a program of the cell wrote it
                    break
                if len(rest) < size:
                    break
                payload, seen = rest[:size], rest[size:]
                if kind == "done":
                    if cell.failed is not None:
                        raise cell.failed
                    return True
                self._take(cell, kind, name, payload, show)
            if not data:
                self._end()
                return False

    def _take(
        self,
        cell: _Cell,
        kind: str,
        name: str,
        payload: bytes,
        show: Callable[[str, dict[str, bytes]], None],
    ) -> None:
        if kind == "part":
            cell.parts[name] = payload
        elif kind == "begun":
            if cell.was_interrupted:  # R has taken it for one of an earlier cell
                self._process.send_signal(signal.SIGINT)
        else:
            if kind == "error":
                cell.failed = CellFailed(cell.parts)
            else:
                show(kind, cell.parts)
            cell.parts = {}

    def _parsed(self, header: bytes) -> tuple[str, str, int]:
        kind, name, size = (*header.decode("latin-1").split(" "), "", "", "")[:3]
        is_known = kind in ("begun", "part", "main", "display", "error", "done")
        return kind, name, int(size) if is_known and size.isdigit() else -1

    def _interrupt(self) -> None:
        if self._language == "java":
            os.write(self._asks, b"\xff\xff\xff\xff")
        elif os.getpgrp() != os.getpid():  # else it has had the signal
            self._process.send_signal(signal.SIGINT)

    def _interrupt_again(self, cell: _Cell, takes_interrupt: Callable[[], bool]) -> None:
        """Reach what `system` had not started yet: R waits for that, and heeds no interrupt meanwhile."""
        if self._language != "r" or cell.again <= 1:
            return
        cell.again -= 1
        if os.getpgrp() == os.getpid():
            os.kill(0, signal.SIGINT)
            takes_interrupt()  # our own
        else:
            self._process.send_signal(signal.SIGINT)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = None
        os.close(self._asks)
        os.close(self._tells)
