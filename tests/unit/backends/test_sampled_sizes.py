"""Files whose size is sampled: how they are counted, and which commands are ended for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.local.mounts import sampler, writers
from ringfence.errors import SandboxLost

pytestmark = pytest.mark.anyone


def test_each_file_counts_once_and_no_link_is_followed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "c").mkdir()
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    (top / "a" / "file").write_bytes(b"x" * 50_000)
    os.link(top / "a" / "file", top / "c" / "again")
    (top / "c" / "link").symlink_to(tmp_path / "outside")
    (top / "c" / "way").symlink_to(tmp_path)
    (top / "a" / "b" / "deep").write_bytes(b"x" * 20_000)
    names = ("a", "a/b", "c", "a/file", "c/link", "c/way", "a/b/deep")
    infos = [os.lstat(top / name) for name in names]
    before = os.listdir("/proc/self/fd")
    assert (sum(each.st_blocks for each in infos) * 512, 7) == sampler.measure(str(top))
    assert before == os.listdir("/proc/self/fd")


def test_it_is_told_again_and_again_until_nobody_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", sampler.__file__, str(tmp_path), "0.001"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"0 0\n" == process.stdout.readline()
        (tmp_path / "file").write_bytes(b"x" * 5000)
        blocks = (tmp_path / "file").stat().st_blocks * 512
        while (line := process.stdout.readline()) == b"0 0\n":
            pass
        assert b"%d 1\n" % blocks == line
        process.stdout.close()
        assert 0 == process.wait(30)


class Run:
    """A command whose first process has that pid inside."""

    def __init__(self, number: int, inside: int, *, is_lost: bool = False) -> None:
        self.number, self._inside, self._is_lost = number, inside, is_lost
        self.ended_for, self.note, self.kills = "", b"", 0

    def pid(self) -> int:
        return self._inside

    def kill(self) -> None:
        self.kills += 1
        if self._is_lost:
            raise SandboxLost("it has ended")


class Sandbox:
    def __init__(self, *runs: Run) -> None:
        self.pid, self.runs = 1, {run.number: run for run in runs}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes written by each process of a made up tree: 1, of which 10, 20 and 30 are children, 11 of 10."""
    written: dict[int, int] = {}
    tree = {1: [10, 20, 30], 10: [11]}

    def read(path: str) -> str:
        pid, _, name = path.removeprefix("/proc/").partition("/")
        if name == "io":
            return f"rchar: 1\nwrite_bytes: {written.get(int(pid), 0)}\ncancelled: 1\n"
        if name == "status":
            inside = {"10": 1, "20": 2, "30": 3}.get(pid, 7)
            return f"Name:\tx\nNSpid:\t{pid}\t{inside}\nKthread: 0\n"
        return " ".join(map(str, tree.get(int(pid), [])))

    monkeypatch.setattr(writers, "_read", read)
    monkeypatch.setattr("glob.glob", lambda path: [path.replace("*", "7")])
    return written


def test_who_has_written_much_since_the_last_look_is_told(written: dict[int, int]) -> None:
    one, two, unknown = Run(1, 1), Run(2, 2), Run(3, 99)
    sandbox: Any = Sandbox(one, two, unknown)
    looks: Any = writers.Writers(sandbox)
    written.update({10: 1 << 19, 11: 1 << 19, 20: (1 << 17) - 1})
    assert [one] == looks.look(), "an eighth of what the other wrote is the least"
    written[20] += 1 << 16
    assert [two] == looks.look()
    written[20] += (1 << 16) - 1
    assert [] == looks.look()
    written.update({11: (1 << 19) + (1 << 20), 20: (3 << 17) + (1 << 16)})
    assert [one, two] == looks.look()
    del sandbox.runs[1]
    written[11] += 1 << 20
    assert [] == looks.look()
    sandbox.runs[4] = Run(4, 3)
    written[30] = 1 << 16
    assert [sandbox.runs[4]] == looks.look()


def test_what_writes_is_ended_and_else_all_and_at_last_nobody_is_left() -> None:
    one, two = Run(1, 1, is_lost=True), Run(2, 2)
    sandbox: Any = Sandbox(one, two)
    looks = writers.Writers(sandbox)
    ended: Any = [one]
    assert looks.relieve(ended, "too large", grows=False)
    assert 0 == one.kills
    assert looks.relieve(ended, "too large", grows=True)
    assert (1, 0, "disk") == (one.kills, two.kills, one.ended_for)
    assert b"ringfence: ended: too large; remove files, or raise the limit\n" == one.note
    assert looks.relieve([], "too large", grows=False)
    assert looks.relieve([], "too large", grows=True), "once may be what was written before"
    assert (1, 0) == (one.kills, two.kills)
    assert looks.relieve([], "too large", grows=True)
    assert (2, 1) == (one.kills, two.kills)
    assert [True, True, False] == [looks.relieve([], "too large", grows=True) for _ in range(3)]
