"""The jailer takes back what it made for a jail that could not be started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.features import require

# In a process of its own, which becomes the parent of the jail. Its cgroups are plain directories: in none
# of them is a file `tasks`, or below a file none can be made. The jail has mounts of its own, and so waits
# for a word of the jailer: without, it would end by itself.
_CREATE = """
import os, sys
from ringfence.launcher import wire
from ringfence.launcher.jail.jailer import Jailer
from ringfence.linux import namespaces

host, ours = wire.socketpair()
jailer, directories = Jailer(ours), sys.argv[1:]
guest = {"has_content": False}
plan = {
    "id": "jail", "passes": 0, "share": None, "guest": guest, "argv": ["/bin/true"], "trees": [], "view": None,
    "trusted_root": False, "cgroup_version": 1, "cgroup_dirs": directories, "cgroup_values": [],
    "namespaces": namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS,
    "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1",
    "deny_setgroups": True, "descriptors": 0, "placeholders": [], "note": "",
}
control, reply = wire.socketpair()
errors = os.open("/dev/null", os.O_RDWR)
before = os.listdir("/proc/self/fd")
try:
    jailer.create(plan, reply, [control.fileno(), errors])
except OSError as exc:
    print(exc.filename)
print(os.waitstatus_to_exitcode(os.wait()[1]), jailer.jails, before == os.listdir("/proc/self/fd"))
"""


def test_a_jail_that_cannot_join_its_cgroups_leaves_none(tmp_path: Path) -> None:
    require("user namespaces")
    cgroups = [tmp_path / "memory", tmp_path / "pids"]

    done = subprocess.run(
        [sys.executable, "-c", _CREATE, *map(str, cgroups)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    assert [f"{cgroups[0]}/tasks", "-9 {} True"] == done.stdout.splitlines()
    assert [] == os.listdir(tmp_path)
