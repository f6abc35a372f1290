"""The agent asks for no memory while the kernel still charges that of processes which have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.outside import same_descriptors

from ringfence.guest.execs import Uncharged

pytestmark = pytest.mark.anyone

LIMIT, FULL, ENOUGH = 96 << 20, 95 << 20, 92 << 20


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """Files as a memory cgroup has them: usage, limit and kills."""
    (tmp_path / "usage").write_text(f"{FULL}\n")
    (tmp_path / "limit").write_text(f"{LIMIT}\n")
    (tmp_path / "kills").write_text("low 0\noom 7\noom_kill 2\noom_group_kill 9\n")
    return tmp_path


@pytest.fixture
def uncharged(group: Path) -> Iterator[Uncharged]:
    made = waiter(group)
    yield made
    made.close()


def waiter(group: Path) -> Uncharged:
    there = str(group / "usage"), str(group / "limit"), str(group / "kills")
    return Uncharged((("/no/such/usage", "/no/such/limit", "/no/such/kills"), there))


def test_it_goes_on_as_soon_as_there_is_room(group: Path, uncharged: Uncharged) -> None:
    freed = threading.Timer(0.05, lambda: (group / "usage").write_text(f"{ENOUGH}\n"))
    freed.start()

    assert uncharged.wait()
    freed.join()
    assert str(ENOUGH) == (group / "usage").read_text().strip()
    assert uncharged.wait(), "and waits for nothing where there is room"


def test_a_guest_that_stays_at_its_limit_holds_the_agent_once_a_second_at_most(
    uncharged: Uncharged, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep
    slept: list[float] = []

    def counted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)

    assert not uncharged.wait()
    assert slept
    slept.clear()
    assert not uncharged.wait()
    assert [] == slept


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", ""])
def test_where_there_is_no_limit_nothing_waits(group: Path, limit: str) -> None:
    (group / "limit").write_text(limit)

    with same_descriptors():
        assert waiter(group).wait()


def test_only_after_a_kill_is_room_waited_for(
    group: Path, uncharged: Uncharged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that is reached with files of the page cache is no reason: the kernel takes those back."""
    waited: list[int] = []
    monkeypatch.setattr(uncharged, "wait", lambda: waited.append(1))
    for kills, count in ((2, 0), (3, 1), (3, 1), (5, 2)):
        (group / "kills").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        uncharged.wait_after_kill()
        assert count == len(waited), kills


def test_one_without_a_count_of_kills_waits_for_nothing(group: Path) -> None:
    (group / "kills").unlink()
    with same_descriptors():
        uncharged = waiter(group)
        uncharged.wait_after_kill()
        assert uncharged.wait()
