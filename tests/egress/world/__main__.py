"""`python -m tests.egress.world [COMMAND...]`: run a command in the world, to look around."""

from __future__ import annotations

import sys

from .world import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
