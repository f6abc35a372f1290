"""Which processes a sandbox without namespaces has: not all of the host's are looked at for that."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from ringfence.guest.without_namespaces import landlocked

landlocked.members = lambda base: [base]
tags = landlocked.LandlockTags(0, 1000)
seen = [tags._of_all()]
child = os.fork() or signal.pause()
seen.append(tags._of_all())
os.kill(child, signal.SIGKILL)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
seen.append(tags._of_all())
os.waitpid(child, 0)
print(*seen, tags._of_all())
"""


def test_only_an_agent_with_a_child_looks_for_processes() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert "[] [1000] [1000] []\n" == told.stdout
