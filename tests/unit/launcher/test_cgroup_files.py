"""Limits in files of cgroups, and directories of these: what is tolerated, and what is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.outside import same_descriptors

from ringfence.launcher import cgroups

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """Directories and files in the place of a cgroup's, which any user can have."""
    path = tmp_path / "group"
    path.mkdir()
    for name in ("memory.max", "pids.max", "tasks", "cgroup.procs"):
        (path / name).write_text("")
    return path


def test_values_are_set_and_a_directory_may_be_there(group: Path) -> None:
    made = group / "below"
    cgroups.make([str(group), str(made)], [(f"{group}/pids.max", "7")])

    assert made.is_dir()
    assert "7" == (group / "pids.max").read_text()


def test_only_swap_may_be_unknown(group: Path) -> None:
    cgroups.put([(f"{group}/memory.swap.max", "0"), (f"{group}/memory.max", "9")])
    assert "9" == (group / "memory.max").read_text()
    with pytest.raises(FileNotFoundError):
        cgroups.put([(f"{group}/cpu.max", "0")])


def test_a_refused_value_names_its_file(group: Path) -> None:
    (group / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: 5") as refusal:
        cgroups.put([(f"{group}/full", "5")])

    assert (errno.ENOSPC, f"{group}/full") == (refusal.value.errno, refusal.value.filename)


def test_a_value_that_is_invalid_as_yet_is_set_after_the_others(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1: memory may not be more than memory and swap, whose limit comes later."""
    written: list[str] = []

    def write(path: str, value: str) -> None:
        if path.endswith("memory.max") and "pids.max" not in written:
            raise OSError(errno.EINVAL, "too much")
        written.append(path.rpartition("/")[2])

    monkeypatch.setattr(cgroups, "write", write)
    cgroups.put([(f"{group}/memory.max", "9"), (f"{group}/pids.max", "7")])
    assert ["pids.max", "memory.max"] == written
    written.clear()
    with pytest.raises(OSError, match="too much"):
        cgroups.put([(f"{group}/memory.max", "9")])


def test_who_is_apart_enters_the_first_half_and_comes_back_to_the_second(tmp_path: Path) -> None:
    names = ["a/in", "b/in"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    around = cgroups.around({"programs_cgroups": [f"{tmp_path}/{name}" for name in names]})  # type: ignore[typeddict-item]
    assert [f"{tmp_path}/{name}" for name in (*names, "a", "b")] == around
    for path in around:
        Path(path, "tasks").touch()
    fds = cgroups.open_tasks(around)
    try:
        apart = cgroups.Apart(tuple(fds))
        for step, full in ((apart.enter, around[:2]), (apart.leave, around)):
            step()
            assert full == [path for path in around if Path(path, "tasks").read_text()]
        assert all(Path(path, "tasks").read_text() == "0" for path in around)
        os.close(fds[2])
        apart.leave()  # what cannot be undone is left, and the others are
        assert "00" == Path(around[3], "tasks").read_text()
    finally:
        for fd in (fds[0], fds[1], fds[3]):
            os.close(fd)
    cgroups.Apart().enter()


@pytest.mark.parametrize(("version", "name"), [(1, "tasks"), (2, "cgroup.procs")])
def test_who_joins_writes_to_the_file_of_its_version(group: Path, version: int, name: str) -> None:
    fds = cgroups.open_procs([str(group)], version)
    assert [f"{group}/{name}"] == [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    cgroups.join(fds)

    assert "0" == (group / name).read_text()


def test_both_versions_are_thawed_and_what_is_missing_hinders_none(tmp_path: Path) -> None:
    for name in ("one/freezer.state", "two/cgroup.freeze"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    cgroups.thaw([f"{tmp_path}/{name}" for name in ("absent", "one", "two")])

    assert "THAWED" == (tmp_path / "one/freezer.state").read_text()
    assert "0" == (tmp_path / "two/cgroup.freeze").read_text()


def test_what_is_gone_is_removed_and_what_is_not_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "used/below").mkdir(parents=True)
    (tmp_path / "used/file").touch()
    paths = [f"{tmp_path}/{name}" for name in ("absent", "empty", "used", "used/file")]

    assert paths[2:] == sorted(cgroups.remove(paths, 0.0))
    assert ["used"] == os.listdir(tmp_path)


def test_those_below_come_after_those_above_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    found = cgroups.below(str(tmp_path))

    assert [str(tmp_path), f"{tmp_path}/a", f"{tmp_path}/a/b"] == found
    assert ["/absent-of-ringfence"] == cgroups.below("/absent-of-ringfence")
