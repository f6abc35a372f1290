"""A zygote that a killed process has left is ended, and no later process that has its number."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from ringfence.backends.local.host import owner
from ringfence.backends.native.fd_store import leftovers

pytestmark = pytest.mark.anyone


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_BY_ITSELF_MS", 1)


@pytest.mark.parametrize("later", [-1, 1])
def test_a_later_process_of_its_number_is_left_alone(
    left: subprocess.Popen[bytes], later: int
) -> None:
    started = owner.start_time(left.pid)
    assert started is not None
    before = len(os.listdir("/proc/self/fd"))

    assert not leftovers.end(left.pid, started + later)
    assert left.poll() is None
    assert leftovers.end(left.pid, started)
    assert -9 == left.wait()
    assert not leftovers.end(left.pid, started)
    assert before == len(os.listdir("/proc/self/fd"))
