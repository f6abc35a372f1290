"""The agent at the far end of a stream of bytes: its PID 1 carries requests, a child serves them.

Each side says something every two seconds. A side that has heard nothing for ten ends: with PID 1 the
kernel of the far host ends every process of the sandbox.
"""

from __future__ import annotations

import json
import os
import time

from ..launcher import wire
from ..launcher.link.channels import LineEnd
from ..launcher.link.line import CONTROL, DATA, frame
from ..linux import privileges
from .channels import CLOCK, Carrier

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

BEAT_S, SILENT_S = 2.0, 10.0
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")


class Beating(Carrier):
    """A carrier that notices when nobody is at the other end any more."""

    def __init__(self, line: int, control: wire.Socket, *, is_host: bool, out: int = -1) -> None:
        super().__init__(line, control, is_host=is_host)
        if out >= 0:
            self.write_to(out)
        self.pause_s = BEAT_S
        self._heard = self._said = time.monotonic()

    def _between(self) -> None:
        LineEnd._between(self)  # a machine's carrier rests when it pauses; this one beats
        now = time.monotonic()
        if now - self._heard > SILENT_S:
            self._over = True
        if now - self._said >= BEAT_S:
            self._said = now
            self._put(CLOCK, CONTROL, b"0")

    def _read_line(self, events: int) -> None:
        self._heard = time.monotonic()
        super()._read_line(events)

    def _take_control(self, kind: bytes, data: bytes) -> None:
        if kind != CLOCK:
            super()._take_control(kind, data)


def main(outer: str, told: dict[str, Any]) -> NoReturn:
    """Say what is here, and serve until the other side has ended.

    Args:
        outer: What `far_start` has seen, as JSON.
        told: What came over standard input.
    """
    del told
    facts = json.loads(outer)
    facts["pid"] = os.getpid()
    facts["inner"] = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES}
    privileges.set_dumpable(False)
    os.write(1, frame(DATA, CONTROL, json.dumps(facts).encode()))
    if os.getpid() != 1:
        os._exit(1)  # the other side says why
    ours, theirs = wire.socketpair()
    if os.fork() == 0:
        ours.close()
        os.dup2(theirs.detach(), 0)
        os.dup2(os.open("/dev/null", os.O_RDWR), 1)
        from .boot import main as serve

        serve()
    theirs.close()
    Beating(0, ours, is_host=False, out=1).run()
    os._exit(0)
