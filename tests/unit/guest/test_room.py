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
os.mkdir(base + "/w/in/deep")
mounts.mount("t", base + "/w/in/deep", "tmpfs", 0, "")
open(base + "/w/in/deep/deepest", "w").close()
mounts.mount("t", base + "/w/with space", "tmpfs", 0, "")
open(base + "/w/with space/shown", "w").close()
mounts.mount(base + "/w/in/shown", base + "/w/file", "none", mounts.MS_BIND)
before = room.usage()
room._OWN_FILES = base + "/w/own/"
try:
    room.make({"size_bytes": 1 << 20, "inodes": 20, "places": [base + "/refused"]}, base + "/m")
except OSError as exc:
    assert (exc.errno, exc.filename) == (errno.EOPNOTSUPP, base + "/refused/file"), exc
else:
    raise AssertionError("what is in it would be gone")
mounts.umount2(base + "/m", mounts.MNT_DETACH)
room.make({"size_bytes": 1 << 20, "inodes": 20, "places": [base + "/w", base + "/none"]}, base + "/m")
now = room.usage()
assert (now.f_blocks * now.f_frsize, now.f_files) == (1 << 20, 20), (now, before)
assert os.path.exists(base + "/w/in/shown") and os.readlink(base + "/w/link") == "x"
assert os.path.exists(base + "/w/in/deep/deepest") and os.path.exists(base + "/w/with space/shown")
assert os.path.samefile(base + "/w/in/shown", base + "/w/file")
assert os.stat(base + "/w").st_mode & 0o7777 == 0o1777 and os.stat(base + "/w/sub").st_mode & 0o7777 == 0o2750
assert open(base + "/w/own/program", "rb").read() == b"run" and os.access(base + "/w/own/program", os.X_OK)
assert os.stat(base + "/w/own/program").st_dev == os.stat(base + "/w").st_dev
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
    for name in ("sub", "own", "with space"):
        (tmp_path / "w" / name).mkdir()
    (tmp_path / "w/sub").chmod(0o2750)
    (tmp_path / "w").chmod(0o1777)
    (tmp_path / "w/own/program").write_bytes(b"run")
    (tmp_path / "w/own/program").chmod(0o755)
    (tmp_path / "w/file").touch()
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused/file").touch()
    command = ["unshare", "-m", sys.executable, "-c", _ROOM, str(tmp_path)]

    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ("done\n", "") == (found.stdout, found.stderr)
    assert not (tmp_path / "w/full").exists()
