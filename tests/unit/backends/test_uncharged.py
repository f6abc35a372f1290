"""The agent asks for no memory while the kernel still charges that of processes which have ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ringfence.guest.execs import Uncharged

pytestmark = pytest.mark.anyone

LIMIT, FULL, ENOUGH = 96 << 20, 95 << 20, 92 << 20


@pytest.fixture
def group(tmp_path: Path) -> tuple[Path, Path]:
    """Files as a memory cgroup has them."""
    usage, limit = tmp_path / "usage", tmp_path / "limit"
    usage.write_text(f"{FULL}\n")
    limit.write_text(f"{LIMIT}\n")
    return usage, limit


def waiter(group: tuple[Path, Path]) -> Uncharged:
    usage, limit = group
    return Uncharged((("/no/such/usage", "/no/such/limit"), (str(usage), str(limit))))


def test_it_goes_on_as_soon_as_there_is_room(group: tuple[Path, Path]) -> None:
    uncharged = waiter(group)
    freed = threading.Timer(0.05, lambda: group[0].write_text(f"{ENOUGH}\n"))
    freed.start()

    assert uncharged.wait()
    freed.join()
    assert str(ENOUGH) == group[0].read_text().strip()
    assert uncharged.wait(), "and waits for nothing where there is room"


def test_a_guest_that_stays_at_its_limit_holds_the_agent_once_a_second_at_most(
    group: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    uncharged, sleep = waiter(group), time.sleep
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
def test_where_there_is_no_limit_nothing_waits(group: tuple[Path, Path], limit: str) -> None:
    group[1].write_text(limit)

    assert waiter(group).wait()
