"""Follow pages as a reader does, with the installed `ringfence`: `python -m tests.docs.follow PAGE...`.

`tools/extras.sh` runs it in a fresh environment, so blocks are run that the tests leave to `make extras`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import blocks_of, run_console, run_python


def follow(page: Path) -> int:
    """Run every block of a page that this environment can run, and return how many those are."""
    blocks = [
        block
        for block in blocks_of(page.read_text(encoding="utf-8"))
        if block.language in ("console", "python", "output")
        and (not block.not_run or "`make extras` runs it" in block.not_run)
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as desk:  # a process may end later
        for block in blocks:
            if "console" == block.language:
                run_console(block, Path(desk), dict(os.environ))
        run_python(blocks, Path(desk), dict(os.environ), page.name)
    return sum("output" != block.language for block in blocks)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {follow(Path(name))} blocks run")
