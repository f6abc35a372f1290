"""Bash as the interpreter of a context. Runs inside the sandbox, sent with `kernel.py`."""

from __future__ import annotations

import fcntl
import os
import select
import shlex
import signal
import subprocess
import time
from typing import Callable  # noqa: UP035  Python 3.8

_AGAIN_S = 0.8  # from an interrupt that bash does not react to, to another one
_LOOKS_S = 0.05  # at interrupts, while bash runs a cell


class Shell:
    """A bash that keeps its directory, variables and functions.

    It is interactive, on no terminal: so SIGINT ends what it evaluates, and not bash.

    Args:
        ends: What cells write to, by the number of the descriptor.
    """

    def __init__(self, ends: dict[int, int]) -> None:
        self._reports, low = os.pipe()
        report = _high(low)  # out of the way of what a cell numbers
        os.close(low)
        fds = (report, ends[1], ends[2])
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=subprocess.PIPE,
            stdout=ends[1],
            stderr=subprocess.DEVNULL,  # it complains that there is no terminal
            pass_fds=fds,
            env={**os.environ, "PS1": "", "PS2": "", "HISTFILE": ""},
        )
        os.close(report)
        self._fd, self._count = report, 0
        self._streams = f"exec >&{fds[1]} 2>&{fds[2]}"  # what an earlier cell closed is back
        # Without execfail a failed exec would end the shell, as it does where a file is read.
        self._give("set +o history +H; shopt -s execfail\n")

    def _give(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode("utf-8", "replace"))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: whoever reads its report sees that

    def run(self, code: str, takes_interrupt: Callable[[], bool]) -> int | None:
        """Evaluate code; return its status, None if bash ended by it.

        Args:
            takes_interrupt: Says whether an interrupt came since it was asked last; bash and what
                it runs have the signal too.
        """
        # An interactive bash without a terminal complains of each command that a signal ends (`tcsetattr`),
        # but not while it reads a file.
        sourced = shlex.quote(f"eval {shlex.quote(code)} </dev/null")
        self._give(f"{self._streams}; . /dev/stdin <<<{sourced}\n")
        self._ask()
        was_interrupted, reports, again_at = False, b"", float("inf")
        while True:
            for line in reports.split(b"\n")[:-1]:
                number, _, status = line.partition(b" ")
                if number == b"%d" % self._count:
                    if was_interrupted:
                        raise KeyboardInterrupt
                    return int(status)
            is_ready = _waits(self._reports, _LOOKS_S)
            data = os.read(self._reports, 1000) if is_ready else b""
            if takes_interrupt():
                if not was_interrupted:
                    was_interrupted, again_at = True, time.monotonic() + _AGAIN_S
                self._ask()  # the signal may have cost bash the question
                continue
            if time.monotonic() > again_at and os.getpgrp() == os.getpid():
                again_at = time.monotonic() + _AGAIN_S
                os.killpg(
                    0, signal.SIGINT
                )  # it came while bash forked: the child did not hear of it
            reports += data
            if is_ready and not data:
                self._process.kill()  # it closed the pipe, if it has not ended
                self._process.wait()
            if not data and self._process.poll() is not None:  # others may hold the pipe
                os.close(self._reports)
                return None

    def _ask(self) -> None:
        """Have bash report its status, under a new number, once it is done with all before."""
        self._count += 1
        self._give(f"printf '%s %s\\n' {self._count} $? >&{self._fd}\n")

    def reseed(self) -> None:
        """In a copy of its process: draw other random numbers than the original."""
        seed = int.from_bytes(os.urandom(4), "little")
        self._give(f"{{ [[ ${{RANDOM+x}} ]] && RANDOM={seed}; }} 2>/dev/null\n")


def _high(fd: int) -> int:
    for least in (200, 10):
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
        except OSError:
            pass  # a limit on open files below that
    return os.dup(fd)


def _waits(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
