"""Callers whose connection is under way: how much is done for them before others are heard."""

from __future__ import annotations

import time

import pytest

from ringfence.launcher.pid1.connects import Connects, _Waiting
from ringfence.linux import seccomp

pytestmark = pytest.mark.anyone


class Counting(Connects):
    """Knows how many callers it has looked at; none is connected."""

    def __init__(self, waiting: int) -> None:
        super().__init__(-1, 0)
        self.looks = 0
        asked = seccomp.Notification(0, 0, 0, ())
        self._waiting = [_Waiting(asked, time.monotonic() - 60, 0) for _ in range(waiting)]

    def _is_over(self, each: _Waiting, now: float) -> bool:
        self.looks += 1
        return False


@pytest.mark.parametrize(("is_asked", "looks"), [(True, 1), (False, 16)])
def test_who_has_just_asked_waits_for_one_look_at_the_others(is_asked: bool, looks: int) -> None:
    connects = Counting(1000)

    connects.look(is_asked=is_asked)

    assert looks == connects.looks
