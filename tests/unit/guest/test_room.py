"""The bounded file system for all that a container's programs may write, in a mount namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOM = """
import errno, os, sys
from ringfence.guest import room
from ringfence.linux import mounts
base = sys.argv[1]
mounts.mount("none", "/", "", mounts.MS_REC | mounts.MS_PRIVATE, "")
mounts.mount("t", base + "/w/in", "tmpfs", 0, "")
open(base + "/w/in/shown", "w").close()
mounts.mount("t", base + "/w/in/deep", "tmpfs", 0, "") if os.mkdir(base + "/w/in/deep") else None
before = room.usage()
room.make({"size_bytes": 1 << 20, "inodes": 20, "places": [base + "/w", base + "/none"]}, base + "/m")
now = room.usage()
assert (now.f_blocks * now.f_frsize, now.f_files) == (1 << 20, 20), (now, before)
assert os.path.exists(base + "/w/in/shown") and os.readlink(base + "/w/link") == "x"
assert os.stat(base + "/w").st_dev != os.stat(base).st_dev
assert os.listdir(base + "/m") == [], "its name is gone"
flags = os.statvfs(base + "/w").f_flag
assert flags & os.ST_NOSUID and flags & 4, "neither set-id programs nor devices"
try:
    with open(base + "/w/full", "wb") as file:
        file.write(bytes(2 << 20))
except OSError as exc:
    assert exc.errno == errno.ENOSPC
else:
    raise AssertionError("it has no bound")
print("done")
"""


@pytest.mark.root
def test_a_room_bounds_what_is_written_and_shows_the_mounts_of_before(tmp_path: Path) -> None:
    (tmp_path / "w/in").mkdir(parents=True)
    (tmp_path / "w/link").symlink_to("x")
    (tmp_path / "m").mkdir()
    command = ["unshare", "-m", sys.executable, "-c", _ROOM, str(tmp_path)]

    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ("done\n", "") == (found.stdout, found.stderr)
    assert not (tmp_path / "w/full").exists()
