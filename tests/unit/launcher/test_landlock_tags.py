"""Which processes a sandbox without namespaces has: not all of the host's are looked at for that."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from ringfence.guest.without_namespaces import landlocked

seen = []
landlocked.members = lambda base: seen.append(base) or []
tags = landlocked.LandlockTags(0, 1000)
tags.members(1)
child = os.fork() or signal.pause()
tags.members(2)
os.kill(child, signal.SIGKILL)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
tags.members(3)
before = len(seen)
os.waitpid(child, 0)
tags.members(4)
print(seen, before)
"""


def test_only_an_agent_with_a_child_looks_for_processes() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert "[1000, 1000] 2\n" == told.stdout
