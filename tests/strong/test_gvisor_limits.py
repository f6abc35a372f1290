"""gVisor starts for who has few open files of their own: what the host allows holds inside too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.features import require

HARD = 1024  # what many login shells and services have; a sandbox has 4096 unless told
STARTS = (
    "from ringfence import Sandbox\n"
    "with Sandbox.create(backend='gvisor') as sandbox:\n"
    "    print(sandbox.shell('ulimit -n; ulimit -Hn').text.split(),"
    " sandbox.capabilities().limits.open_files)\n"
)


@pytest.mark.parametrize("most", [HARD, 8192])
def test_open_files_are_bounded_by_the_caller_s_own(most: int, tmp_path: Path) -> None:
    require("user namespaces")
    require("runsc")
    argv = ["sh", "-c", f'ulimit -n {most} && exec "$@"', "sh", sys.executable, "-c", STARTS]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    inside = min(most, 4096)
    assert f"{[str(inside)] * 2} {inside}\n" == done.stdout, done.stderr
