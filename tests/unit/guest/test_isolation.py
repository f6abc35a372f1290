"""Each step of the isolation that an agent makes for itself in a container, looked at from inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.features import require

import ringfence
from ringfence.guest import isolation
from ringfence.launcher import newroot
from ringfence.linux import privileges

# A process with a file system of its own, as a container has it, that isolates itself.
_INSIDE = r"""
import ctypes, json, os, socket, stat, sys
place, anew = sys.argv[1], sys.argv[2] == "anew"
from ringfence.guest import execs, isolation, users
from ringfence.launcher import newroot
from ringfence.linux import mounts, namespaces

namespaces.unshare(namespaces.CLONE_NEWNS)
mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
root = f"{place}/root"
os.mkdir(root)
for source in ("/", "/dev", place):
    mounts.mount(source, root + source, "none", mounts.MS_BIND)
mounts.mount("proc", f"{root}/proc", "proc", 0)
os.chdir(root)
mounts.mount("none", ".", "none", mounts.MS_SHARED)
mounts.mount(".", "/", "none", mounts.MS_MOVE)
os.chroot(".")
os.chdir("/")

# LXC binds that of its own terminals, which are none of ours.
os.mkdir(f"{place}/pts")
mounts.mount("devpts", f"{place}/pts", "devpts", 0, "newinstance,ptmxmode=0666")
mounts.mount(f"{place}/pts/ptmx", "/dev/ptmx", "none", mounts.MS_BIND)
mounts.umount2(f"{place}/pts", mounts.MNT_DETACH)

def spaces():
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in (*isolation.NAMESPACES, "cgroup")}

def number(call, *arguments):
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno
    return 0

def reaches():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 5).close()

outer = os.open("/proc/self/ns/mnt", os.O_RDONLY)  # it lives, as that of an engine does
before = spaces()
covered = [f"{place}/file", f"{place}/dir", f"{place}/absent"]
fds = isolation.set_up({"uid": 1000, "anew": anew, "room": None, "place": "", "shm_bytes": 1 << 20,
                        "covered": covered})
after = spaces()
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
mountinfo = [line.split() for line in open("/proc/self/mountinfo")]
mountinfo = [*{line[4]: line for line in mountinfo}.values()]  # what lies below another is not reached
shm = os.statvfs("/dev/shm")
dirty = [line[4] for line in mountinfo if "nosuid" not in line[5].split(",")]
devices = [line[4] for line in mountinfo if "nodev" not in line[5].split(",")]
master, slave = os.openpty()
print(json.dumps({
    "apart": sorted(name for name in before if before[name] != after[name]),
    "ids": [os.getuid(), os.getgid(), open("/proc/self/uid_map").read().split(),
            open("/proc/self/gid_map").read().split()[1:], open("/proc/self/setgroups").read().strip()],
    "capabilities": {int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0},
    "securebits": ctypes.CDLL(None).prctl(27, 0, 0, 0, 0),
    "shared mounts": [line[4] for line in mountinfo if any(":" in word for word in line[6:line.index("-")])],
    "set-id": dirty,
    "devices": [each for each in devices
                if not (each in ("/dev", "/dev/pts") or stat.S_ISCHR(os.stat(each).st_mode))],
    "proc": number(open, "/proc/sys/kernel/hostname", "w"),
    "proc flags": sorted(set(next(line[5] for line in mountinfo if line[4] == "/proc").split(",")) &
                         {"ro", "nosuid", "nodev"}),
    "terminals": next(f",{line[-1]}," for line in mountinfo if line[4] == "/dev/pts"),
    "terminal": os.ttyname(slave).startswith("/dev/pts/"),
    "shm": shm.f_blocks * shm.f_frsize,
    "user namespaces": open("/proc/sys/user/max_user_namespaces").read().strip(),
    "inotify": open("/proc/sys/user/max_inotify_instances").read().strip(),
    "file": [stat.S_ISCHR(os.stat(covered[0]).st_mode), os.stat(covered[0]).st_rdev == os.makedev(1, 3)],
    "dir": [os.listdir(covered[1]), number(os.mkdir, covered[1] + "/new")],
    "absent": os.path.exists(covered[2]),
    "fds": [os.readlink(f"/proc/self/fd/{fd}") == after[name]
            for fd, name in zip(fds, isolation.NAMESPACES, strict=True)],
    "inherited": [fd for fd in fds if os.get_inheritable(fd)],
    "score": os.readlink(f"/proc/self/fd/{users.score_fd}").endswith("/oom_score_adj"),
    "limit": execs._uncharged is not None,
    "interfaces": [name for _, name in socket.if_nameindex()] if not anew else ["lo"],
    "loopback": number(reaches) if not anew else 0,
    "first": os.getpid() == 1,
    "own proc": os.readlink("/proc/self") == str(os.getpid()),
}), flush=True)
"""


def isolated(place: Path, how: str) -> dict[str, Any]:
    (place / "file").write_text("secret")
    (place / "dir").mkdir()
    (place / "dir/file").write_text("secret")
    done = subprocess.run(
        [sys.executable, "-c", _INSIDE, str(place), how],
        env={**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.root
@pytest.mark.parametrize("how", ["beside", "anew"])
def test_each_step_of_the_isolation_is_made(tmp_path: Path, how: str) -> None:
    """Anew: below a launcher that allows no network, in a PID namespace of its own."""
    require("user namespaces")
    found = isolated(tmp_path, how)

    is_anew = how == "anew"
    assert {
        "apart": ["cgroup", "mnt", "pid" if is_anew else "net", "user"],
        "ids": [1000, 1000, ["1000", "0", "1"], ["0", "1"], "deny"],
        "capabilities": True,
        "securebits": privileges.SECUREBITS_LOCKED,
        "shared mounts": [],
        "set-id": [],
        "devices": [],
        "proc": 30,
        "proc flags": ["nodev", "nosuid", "ro"],
        "terminals": found["terminals"],
        "terminal": True,
        "shm": 1 << 20,
        "user namespaces": "0",
        "inotify": "8",
        "file": [True, True],
        "dir": [[], 30],
        "absent": False,
        "fds": [True] * len(isolation.NAMESPACES),
        "inherited": [],
        "score": True,
        "limit": True,
        "interfaces": ["lo"],
        "loopback": 0,
        "first": is_anew,
        "own proc": True,
    } == found
    assert f",max={newroot.TERMINALS}," in found["terminals"]
