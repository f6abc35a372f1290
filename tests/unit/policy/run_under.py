"""Run a command under a filter: `run_under.py HEX COMMAND ARGUMENT...`. Standard library only."""

from __future__ import annotations

import os
import sys

from tests.unit.policy.probe import install

if __name__ == "__main__":
    install(bytes.fromhex(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
