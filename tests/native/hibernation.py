"""How to tell from outside that a PID 1 sleeps."""

from __future__ import annotations

from pathlib import Path

from ringfence import Sandbox
from tests.native.outside import init_pid, until

_FEW_KIB = 400  # of any memory; an interpreter has ten times as much


def is_hibernated(pid: int) -> bool:
    """Whether it has become that program, and waits. Source: proc(5), status; its own user may read it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    is_small = int(status["VmRSS"][0]) < _FEW_KIB
    return is_small and "S" == status["State"][0] and has_its_own_words(pid)


def has_its_own_words(pid: int) -> bool:
    """In the middle of an execve(2) there are none."""
    return b"ringfence-init\0" == Path(f"/proc/{pid}/cmdline").read_bytes()


def hibernates(sandbox: Sandbox) -> bool:
    """Wait until it does."""
    return until(lambda: is_hibernated(init_pid(sandbox)))
