"""Every process of a sandbox with a root of its own that an ordinary user made, seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.features import require
from tests.posture import expected, maker
from tests.posture.reading import Process, mounts_of, processes_in
from tests.strangers import AS_RANGED, PYTHON, RANGE, RANGED_UID, package_for_others

pytestmark = pytest.mark.root

OF_ROOT = 0xCB  # CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID


@pytest.fixture(scope="module", params=["new", "claimed-limited"])
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Process]]:
    """All of them, PID 1 first."""
    require("id ranges")
    top = tmp_path_factory.mktemp("ranged")
    source = package_for_others(top)
    script = shutil.copy(maker.__file__, top / "maker.py")
    (top / "ro").mkdir(mode=0o700)
    os.chown(top / "ro", RANGED_UID, RANGED_UID)
    child = subprocess.Popen(
        [*AS_RANGED, PYTHON, "-B", script, source, top / "ro", "", request.param, "own_root"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(top)},
        cwd=top,
    )
    with child:
        assert child.stdout is not None
        found = processes_in(json.loads(child.stdout.readline())["pid"])
        yield sorted(found, key=lambda process: process.inside)


def inside_id(process: Process) -> int:
    (seen,) = process.identities
    return expected.inside_id(seen)


@pytest.mark.full
def test_every_thread_is_who_it_should_be(processes: list[Process]) -> None:
    """Only who is root inside has anything, and that is the five; the maker's own id is the first user's."""
    namespaces = next(iter(processes[0].identities)).namespaces
    for process in processes:
        (seen,) = process.identities  # all threads are alike
        inside = inside_id(process)
        own = OF_ROOT if inside == 0 else 0
        wanted = expected.identity_of_range(seen, RANGED_UID, inside=inside, capabilities=own)
        if process.name.startswith("ringfence") and process.inside != 1:
            wanted = expected.identity_of_agent(wanted, 0 if inside else expected.TO_KILL)
        assert wanted == seen, process.command
        assert namespaces == seen.namespaces, process.command
    by_word = {process.command[-1]: inside_id(process) for process in processes}
    assert (0, expected.NOBODY, 1000) == tuple(by_word[word] for word in ("6006", "6007", "6002"))


def test_their_ids_are_the_makers_and_of_its_range(processes: list[Process]) -> None:
    (seen,) = processes[0].identities
    for rows in (seen.uid_map, seen.gid_map):
        outside = {n for _inside, first, count in rows for n in range(first, first + count)}
        assert outside - {RANGED_UID} <= set(RANGE)


def test_who_watches_cannot_be_traced(processes: list[Process]) -> None:
    """PID 1, and the agents of root and of nobody."""
    untraceable = [process for process in processes if not process.traceable]

    assert [1000, 0, expected.NOBODY] == [inside_id(process) for process in untraceable]
    assert 1 == untraceable[0].inside


def test_every_process_has_the_limits(processes: list[Process]) -> None:
    for process in processes:
        found = {name: process.limits[name] for name in expected.LIMITS}
        assert expected.LIMITS_OF_A_USER == found, process.command
        assert "unlimited" not in process.limits["Max processes"]


def test_mounts_are_those_of_every_sandbox(processes: list[Process]) -> None:
    seen = mounts_of(processes[0].pid)

    assert expected.host_directory("ro") == seen.pop("/mnt/read-only").flags
    for target, mount in expected.mounts().items():
        assert mount == seen.pop(target), target
    assert all("ro" in mount.flags for mount in seen.values())
    for process in processes:
        assert mounts_of(processes[0].pid) == mounts_of(process.pid), process.command


def test_streams_are_the_only_files(processes: list[Process]) -> None:
    for process in processes:
        if process.command[-1] in ("6006", "6007"):
            assert {0, 1, 2} == set(process.files)
