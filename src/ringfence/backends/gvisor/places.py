"""Paths in the jail around gVisor, and in the guest before it runs.

Kept separate: seven modules share these constants, and they import nothing of each other for them.
"""

from __future__ import annotations

from ..local.agents import agent_code

ROOTFS = "/bundle/rootfs"
CONFIG = "/bundle/config.json"
STATE = "/state"
MEMORY = "checkpoint.img"  # as runsc names it
SAVED = "/saved"  # with that in it
RUNSC = "/bin/runsc"
MOUNTS = "/mounts"  # read-only, and seen by who serves the guest's files: also what comes later
POINTS = "/points"  # the same directory, where it can be written to
IN_GUEST = "/.ringfence-mounts"  # the same there
AGENT = "/.ringfence"  # of the guest
PROCESS_IMAGE = f"{AGENT}/{agent_code.NAME}"
