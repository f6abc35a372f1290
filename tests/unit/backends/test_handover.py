"""What is with the fd store is changed by many threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from ringfence.backends.native.fd_store.handover import Handover


class _Run:
    """An exec, as far as its handover looks at it."""

    def __init__(self, home_id: str, number: int) -> None:
        self.home_id, self.number = home_id, number


class _Sandbox:
    def __init__(self, name: str) -> None:
        self.id = name


class _FdStore:
    """Takes everything."""

    def change(self, *_: Any) -> bool:
        return True


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_a_sandbox_ends_while_execs_start_in_others() -> None:
    handover: Any = Handover(None, _FdStore())  # type: ignore[arg-type]
    many = [_Run("busy", number) for number in range(2000)]
    for each in many:
        handover._watch(_Sandbox("busy"), each)
    over = threading.Event()

    def start() -> None:
        numbers = count()
        while not over.is_set():
            made = _Run("other", next(numbers))
            handover._watch(_Sandbox("other"), made)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        for _ in range(300):
            handover.end(_Sandbox("ended"))
        assert set(many) <= set(handover._all_runs())
        handover.end(_Sandbox("busy"))
    finally:
        over.set()
        thread.join()
    assert not set(many) & set(handover._all_runs())
