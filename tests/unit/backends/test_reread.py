"""Files that are read again and again are found once, and never more of them are open than a few."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.backends.local.host import reread

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    """What other tests have left open comes back after this one.

    Descriptors in cycles, of which tests of spools leave a thousand, are not collected while they are counted.
    """
    before = dict(reread._open)
    reread._open.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    for path in list(reread._open):
        reread.forget(path)
    reread._open.update(before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_read_again_is_what_is_there_now(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("oom_kill 0\n")
    assert "oom_kill 0\n" == reread.read(str(path))

    path.write_text("oom_kill 1\n")

    assert "oom_kill 1\n" == reread.read(str(path))


def test_one_stays_open_until_it_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("oom_kill 0\n")
    before = descriptors()

    reread.read(str(path))
    reread.read(str(path))
    assert before + 1 == descriptors()
    reread.forget(str(path))
    reread.forget(str(path))

    assert before == descriptors()


def test_of_many_the_oldest_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    for number in range(2 * reread._MOST):
        (tmp_path / str(number)).write_text(str(number))
        assert str(number) == reread.read(str(tmp_path / str(number)))

    assert before + reread._MOST == descriptors()
    assert "0" == reread.read(str(tmp_path / "0"))  # it is found again


def test_where_few_more_may_be_open_none_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("oom_kill 0\n")
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fill = [os.dup(0)]
    while fill[-1] <= highest:  # so that the lowest free one tells how many are open
        fill.append(os.dup(0))
    before, lowest_free = descriptors(), fill[-1] + 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest_free, limits[1]))
        assert "oom_kill 0\n" == reread.read(str(path))
        assert before == descriptors()

        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest_free + 2, limits[1]))
        assert "oom_kill 0\n" == reread.read(str(path))
        assert before + 1 == descriptors()  # the control: with room for one more it is kept
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in fill:
            os.close(each)


def test_what_is_not_there_is_empty_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = descriptors()

    assert "" == reread.read(str(tmp_path / "events"))

    assert before == descriptors()


def test_a_child_may_read_although_its_parent_was_about_to(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("oom_kill 0\n")
    with reread._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(reread.read(str(path)) != "oom_kill 0\n")

        assert 0 == os.waitpid(pid, 0)[1]
