"""The agent's start in two halves: the host sees the first, once; every guest begins with the second.

In between, the launcher keeps what is in memory (see `launcher.machine_code.process_images`).
So the first half opens nothing, and learns nothing of where it runs.

Kept separate: it is a program's entry point, named in the text that starts it.
"""

from __future__ import annotations

import _signal as signal
import gc
import os

from ..launcher.machine_code import process_image_elf
from . import boot, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Stop; go on as the agent of whatever guest this is then."""
    gc.collect()
    gc.freeze()  # a collection would write to every page that there is
    os.kill(os.getpid(), signal.SIGSTOP)
    # A new process's kernel has not been told what Python had it ignore.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    users.look()
    boot.main(boot.Mapper(-1, process_image_elf.GO_FD))  # forked before our memory was there
