"""The jailer's own records: what it takes back, holds, removes and ends, for whom, and when."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.features import require
from tests.unit.linux.child import result_of

from ringfence.launcher import wire
from ringfence.launcher.jail.jailer import Jailer, JailRecord
from ringfence.linux import files, namespaces, privileges

_PATIENCE_S = 20

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


# -- its records, and what it does without the host -----------------------------------------------


class OfProcesses(Jailer):
    """A jailer whose jails are processes that wait, without namespaces. In a process of its own."""

    def __init__(self) -> None:
        signal.alarm(_PATIENCE_S)
        self.host_end, inner = wire.socketpair()
        super().__init__(inner)

    def add(self, jail_id: str, *directories: Path, server: int = 0) -> int:
        pid = namespaces.fork_with(0)
        if pid == 0:
            privileges.die_with_parent(signal.SIGKILL)
            files.close_from(0)
            while True:
                signal.pause()
        plan: Any = {"id": jail_id, "cgroup_dirs": [*map(str, directories)]}
        self.jails[pid] = record = JailRecord(plan)
        record.server = server
        return pid

    def ask(self, verb: str, argument: Any, fds: Sequence[int] = ()) -> bytes:
        """Serve one request; its answer."""
        ours, theirs = wire.socketpair()
        wire.send(self.host_end, (verb, argument), [theirs.fileno(), *fds])
        theirs.close()
        assert self.serve_one()
        data, received = wire.receive_raw(ours)
        assert [] == received
        ours.close()
        return data


def made(path: Path) -> tuple[str, str, int, int]:
    """Make a placeholder."""
    path.mkdir()
    info = path.stat()
    return str(path.parent), path.name, info.st_dev, info.st_ino


@pytest.mark.anyone
def test_with_the_host_every_jail_ends_and_goes_with_all_that_was_made_for_it(
    tmp_path: Path,
) -> None:
    """Each of its cgroups, the frozen too; placeholders on the host, with their notes."""
    cgroups, place, notes = (tmp_path / name for name in ("cgroups", "place", "notes"))
    for each in (cgroups / "one", cgroups / "two", cgroups / "frozen", place, notes):
        each.mkdir(parents=True)
    (cgroups / "frozen/cgroup.freeze").write_text("1")
    for name in ("one", "two"):
        (notes / name).touch()

    def play() -> Any:
        jailer = OfProcesses()
        pids = [jailer.add("one", cgroups / "one"), jailer.add("two", cgroups / "two")]
        pids.append(jailer.add("three", cgroups / "frozen"))
        for name, note in (("one", str(notes / "one")), ("two", str(notes / "two")), ("odd", "")):
            jailer.placeholders[name] = [made(place / name)], note
        jailer.ask("released", "two")
        jailer.ask("released", "of no jail")
        jailer.host_end.close()
        jailer.run()
        left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        return [left, len(jailer.jails)]

    assert [[], 0] == result_of(play)
    assert ["frozen"] == os.listdir(cgroups), "which is no cgroup, and holds a file"
    assert "0" == (cgroups / "frozen/cgroup.freeze").read_text()
    assert ["two"] == os.listdir(place) == os.listdir(notes), "the host had removed its own"


@pytest.mark.anyone
def test_placeholders_of_later_mounts_are_its_own_too(tmp_path: Path) -> None:
    """A request names all of a sandbox's, and one without any takes none away."""

    def play() -> Any:
        jailer = OfProcesses()
        for verb, name in (("enter", "one"), ("join", "two")):
            request = {"op": "absent", "id": name, "note": f"/none/{name}"}
            both = [["/", name, 1, 1], ["/", "more", 2, 2]]
            told = [both[:1], both] if "enter" == verb else [both]
            said = [jailer.ask(verb, {**request, "placeholders": each}) for each in told]
            said.append(jailer.ask(verb, {"op": "absent", "id": name}))
            assert {b"E71 absent: "} == {each[:12] for each in said}, "there is no such operation"
        for _ in range(5):
            os.wait()
        return jailer.placeholders

    assert {
        name: [[["/", name, 1, 1], ["/", "more", 2, 2]], f"/none/{name}"] for name in ("one", "two")
    } == result_of(play)


@pytest.mark.anyone
def test_a_lock_of_the_hosts_is_held_until_it_ends(tmp_path: Path) -> None:
    """And a descriptor that came with another request is not."""

    def play() -> Any:
        jailer = OfProcesses()
        before = len(os.listdir("/proc/self/fd"))
        lock = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert b"" == jailer.ask("hold", None, [lock])
        assert b"" == jailer.ask("released", "one", [lock, lock])
        os.close(lock)
        again = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return len(os.listdir("/proc/self/fd")) - before
        return -1

    assert 2 == result_of(play), "the one that it holds, and the one that it is tried with"
    again = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)


@pytest.mark.anyone
def test_the_cgroups_of_an_ended_jail_go_before_another_is_made(tmp_path: Path) -> None:
    """It may be of the same id. That others end meanwhile is noticed as well, and is no jail's end."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()

    def play() -> Any:
        jailer = OfProcesses()
        ended, other = jailer.add("one", tmp_path / "one"), jailer.add("two", tmp_path / "two")
        os.kill(ended, signal.SIGKILL)
        os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
        if namespaces.fork_with(0) == 0:  # as a helper ends
            os._exit(0)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        plan: Any = {"passes": 0, "share": None, "guest": {"has_content": False}, "argv": ["/none"]}
        plan |= {"trees": [{"source": "/none", "inode": 1, "fd": -1}], "view": None}
        null = os.open("/dev/null", os.O_RDWR)
        before = len(os.listdir("/proc/self/fd"))
        said = jailer.ask("create", {**plan, "trusted_root": True}, [null, null])
        return [
            said.decode(),
            [*jailer.jails] == [other],
            len(os.listdir("/proc/self/fd")) - before,
        ]

    said, is_other, kept = result_of(play)
    assert said.startswith("E2 create: [Errno 2]")
    assert (True, 0) == (is_other, kept)
    assert ["two"] == os.listdir(tmp_path)
