"""Memory that a process is charged with where PID 1 samples it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.launcher.pid1 import processes

pytestmark = pytest.mark.anyone

_STATUS = (
    "Name:\tpython3\nPPid:\t{}\nRssAnon:\t    600 kB\nRssFile:\t  10 kB\nRssShmem:\t     24 kB\n"
)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of the test's own."""
    monkeypatch.setattr(processes, "directory", lambda pid: f"{tmp_path}/{pid}")
    return tmp_path


def put(proc: Path, pid: int, parent: int, rollup: str = "") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "status").write_text(_STATUS.format(parent))
    if rollup:
        (proc / str(pid) / "smaps_rollup").write_text(rollup)


def test_shared_pages_are_divided_by_their_users(proc: Path) -> None:
    put(
        proc,
        5,
        2,
        "00400000-7fff rollup\nPss_Anon:     100 kB\nPss_File:   9 kB\nPss_Shmem:  4 kB\n",
    )

    assert 104 << 10 == processes.own_bytes(5)


def test_what_forbids_a_closer_look_is_charged_with_all_but_a_helper(proc: Path) -> None:
    """A helper's parent is outside. While it makes a copy its memory is another helper's, and the copy's."""
    put(proc, 5, 2)
    put(proc, 6, 0)
    put(proc, 1, 0)

    assert [624 << 10, 0, 624 << 10] == [processes.own_bytes(pid) for pid in (5, 6, 1)]
    assert 0 == processes.own_bytes(99)
