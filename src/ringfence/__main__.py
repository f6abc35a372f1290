"""`python -m ringfence` is the `ringfence` command.

Kept separate: Python starts the module of this name.
"""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
