"""A process on its way to being a sandbox: what it is given, and what is taken back where that fails."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher import newborn, wire
from ringfence.launcher.newborn import Newborn
from ringfence.launcher.pid1.init import SPARED


@pytest.fixture
def child() -> Iterator[int]:
    """A process that waits."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def ended() -> Iterator[int]:
    """One that nobody has waited for."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shape_of(directory: Path, **more: Any) -> Any:
    """One whose cgroups are plain directories."""
    return {
        "cgroup_dirs": [str(directory)], "cgroup_values": [], "cgroup_version": 2, "namespaces": 0,
        "trusted_root": False, "id_helpers": [], "uid_map": "0 0 1", "gid_map": "0 0 1",
        "deny_setgroups": True, "programs_cgroups": [], **more,
    }  # fmt: skip


@pytest.mark.root
def test_it_is_the_last_to_be_killed_for_memory_and_runs_before_others(child: int) -> None:
    score = Path(f"/proc/{child}/oom_score_adj")
    try:
        score.write_bytes(SPARED)
        wanted = int(SPARED)
    except PermissionError:
        wanted = 0  # without CAP_SYS_RESOURCE, as in most containers
    else:
        score.write_text("0")
    newborn.spare(child)
    newborn.prefer(child)

    assert wanted == int(score.read_text())
    assert os.getpriority(os.PRIO_PROCESS, child) == -15
    assert os.SCHED_OTHER | os.SCHED_RESET_ON_FORK == os.sched_getscheduler(child)


def test_one_that_is_gone_is_nobody_to_spare() -> None:
    before = descriptors()
    newborn.spare(0x7FFFFFF0)
    assert before == descriptors()


def test_one_that_cannot_be_cloned_leaves_no_cgroup_and_no_socket(tmp_path: Path) -> None:
    """Version 2 clones into its cgroup, and a directory that is none cannot be one."""
    control, other = wire.socketpair()
    before = descriptors()
    with pytest.raises(OSError, match=r".") as refused:
        newborn.clone(
            shape_of(tmp_path / "group"),
            ([], []),
            control,
            [],
            -1,
            -1,
            waits=False,
            rehearses=False,
        )

    assert errno.EBADF == refused.value.errno
    assert before == descriptors()
    assert [] == os.listdir(tmp_path)
    control.close()
    other.close()


def test_one_that_has_ended_is_said_to_have_whatever_fails_then(ended: int, tmp_path: Path) -> None:
    """Its files in /proc are root's by then: an ordinary user would read of missing rights."""
    for name in ("group", "group/programs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tasks").touch()
    ours, theirs = wire.socketpair()
    before = descriptors()
    born = Newborn(ended, -1, ours, [])
    shape = shape_of(
        tmp_path / "group", cgroup_version=1, programs_cgroups=[f"{tmp_path}/group/programs"]
    )
    with pytest.raises(ProcessLookupError):
        born.let_go(shape)

    assert before == descriptors()
    ours.close()
    theirs.close()


def test_a_word_to_go_on_comes_with_its_own_descriptor_and_its_cgroups(
    child: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its own, then those of its programs and of itself."""
    for name in ("group", "group/programs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tasks").touch()
    monkeypatch.setattr(Newborn, "map_ids", lambda _self, _shape: None)  # it has no user namespace
    ours, theirs = wire.socketpair()
    born = Newborn(child, os.pidfd_open(child), ours, [])
    inner = f"{tmp_path}/group/programs"
    before = descriptors()
    born.let_go(shape_of(tmp_path / "group", cgroup_version=1, programs_cgroups=[inner]))

    assert before == descriptors()
    data, fds = wire.receive_raw(theirs)
    assert b"%d" % child == data
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    assert "pidfd" in names[0]
    tasks = [f"{tmp_path}/group/tasks", f"{inner}/tasks", f"{tmp_path}/group/tasks"]
    assert tasks == names[1:]
    for fd in fds:
        os.close(fd)
    born.close()
    assert wire.receive_raw(theirs) == (b"", []), "who waits for a word hears that there is none"
    theirs.close()


@pytest.mark.parametrize("brings_control", [True, False])
def test_the_word_whose_it_is_says_what_comes_along(brings_control: bool, tmp_path: Path) -> None:
    (tmp_path / "tasks").touch()
    (tmp_path / "tree").touch()
    ours, theirs = wire.socketpair()
    control, other = wire.socketpair()
    tasks, tree = (os.open(tmp_path / name, os.O_RDONLY) for name in ("tasks", "tree"))
    born = Newborn(0, os.open("/dev/null", os.O_RDONLY), ours, [])
    born.give(control if brings_control else None, [tasks], [tree])

    word, fds = wire.receive(theirs)
    assert (brings_control, 1) == word
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    assert [str(tmp_path / name) for name in ("tasks", "tree")] == names[-2:]
    assert 2 + brings_control == len(names)
    assert not brings_control or names[0].startswith("socket:")
    for fd in (*fds, tasks, tree):
        os.close(fd)
    born.close()
    for each in (theirs, control, other):
        each.close()


def test_the_owner_of_its_namespace_is_its_first_user_alone() -> None:
    ids: Any = {"uid_map": "0 231072 1\n1000 231073 1"}
    assert 231072 == newborn.namespace_owner(ids)
