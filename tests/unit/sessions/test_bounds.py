"""The least value of each setting that is refused, beside the last that is taken; and who hears of events."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unconfined import Unconfined

from ringfence.errors import InvalidRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.shells.bash import BashConfig

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("make", "field", "taken", "refused"),
    [
        (BashConfig, "cpus", 8192, 8193),
        (BashConfig, "cpus", 0.001, 0.0009),
        (BashConfig, "memory_mib", 1, 0),
        (PoolConfig, "warm_ttl_s", 0.001, 0.0009),
        (PoolConfig, "max_warm", 2, 1.5),
        (PoolConfig, "max_warm", 2, True),
        (PoolConfig, "max_warm", 2, 1),  # two are kept warm by default
        (PoolConfig, "min_warm", 0, -1),
    ],
)
def test_a_setting_beyond_its_bound_is_refused_by_name(
    make: Any, field: str, taken: float, refused: float
) -> None:
    make(**{field: taken})
    with pytest.raises(InvalidRequest) as caught:
        make(**{field: refused})
    assert caught.value.field in (field, "min_warm")


def test_listeners_hear_of_events_until_they_stop() -> None:
    heard: list[str] = []
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with SessionManager(config, backends=[Unconfined()]) as manager:
        stop = manager.events.listen(lambda event: heard.append(event.kind))
        lease = manager.acquire(client_id="ann")
        manager.release(lease.id)
        before = list(heard)
        stop()
        manager.acquire(client_id="ann")

    assert "created" == before[0]
    assert len(before) > 1
    assert before == heard
