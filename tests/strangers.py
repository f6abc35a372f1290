"""What tests that run as root lend to an ordinary user: a copy of the package, and a user who may map ids."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import ringfence

PYTHON = "/usr/bin/python3"
RANGED_UID = 23459
RANGE = range(200_000, 265_536)
"""The ids that `AS_RANGED` has, besides its own."""
AS_RANGED = (str(Path(__file__).parents[1] / "tools" / "with_ranges.sh"), str(RANGED_UID))


def let_others_in(path: Path) -> None:
    """Let every user enter `path` and the directories above it that are this user's.

    It ends at a sticky directory: a run as root that gave /tmp the mode 755 once took it from all others.
    """
    for each in (path, *path.parents):
        found = each.stat()
        if found.st_mode & stat.S_ISVTX or found.st_uid != os.geteuid():
            return
        each.chmod(0o755)


def package_for_others(top: Path) -> Path:
    """A copy of the package that everybody may read; what to put on sys.path."""
    newest = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([PYTHON, "-c", newest], check=False).returncode or not shutil.which(
        "setpriv"
    ):
        pytest.skip("needs setpriv, and a Python 3.11 that an ordinary user may execute")
    let_others_in(top)
    package = Path(ringfence.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, top / "src" / "ringfence", ignore=ignored)
    return top / "src"
