"""Samples of what sandboxes of E2B's API use: when they are taken, and for how long they are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence.e2b import metering
from ringfence.e2b.notes import Notes
from ringfence.errors import IoError
from ringfence.model.state import State
from ringfence.model.stats import SandboxStats
from ringfence.sessions.live import Live
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone


class Use:
    """What every sandbox uses, and how often it was asked for."""

    def __init__(self) -> None:
        self.cpu_ns: int | None = 5
        self.memory_bytes: int | None = 7
        self.error: Exception | None = None
        self.asked = 0

    def stats(self) -> SandboxStats:
        self.asked += 1
        if self.error is not None:
            raise self.error
        more: dict[str, Any] = {"cpu_ns": self.cpu_ns, "memory_bytes": self.memory_bytes}
        return SandboxStats(state=State.RUNNING, pids=1, uptime_s=1.0, execs=1, **more)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    found = Use()
    monkeypatch.setattr(UnconfinedSandbox, "stats", lambda _self: found.stats())
    return found


@pytest.fixture
def here() -> Iterator[Here]:
    with ExitStack() as stack:
        yield Here(stack)


async def until_more(meter: metering.Meter, live: Live, than: int) -> int:
    """Wait for more samples; return how many there are."""
    async with asyncio.timeout(30):
        while len(meter._samples.get(live.sandbox_id, ())) <= than:
            await asyncio.sleep(0.001)
    return len(meter._samples[live.sandbox_id])


async def test_samples_are_of_those_that_run_and_end_with_the_last(
    here: Here, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (5.0, 720) == (metering._EVERY_S, metering._MOST)
    monkeypatch.setattr(metering, "_EVERY_S", 0.001)
    meter, one, other = here.shared.meter, here.live(notes=Notes()), here.live(notes=Notes())
    meter.begin()
    task = meter._task
    meter.begin()
    assert task is not None
    assert task is meter._task, "it is begun once"
    for each in (one, other):
        await until_more(meter, each, 1)
    assert 720 == meter._samples[one.sandbox_id].maxlen
    here.manager.suspend(one.id)
    await until_more(meter, other, len(meter._samples[other.sandbox_id]) + 1)
    kept = len(meter._samples[one.sandbox_id])
    await until_more(meter, other, len(meter._samples[other.sandbox_id]) + 2)
    assert kept == len(meter._samples[one.sandbox_id]), "nobody looks at a paused one"

    here.manager.terminate(one.id)
    async with asyncio.timeout(30):
        while one.sandbox_id in meter._samples:
            await asyncio.sleep(0.001)
        here.manager.terminate(other.id)
        await task
    assert {} == meter._samples
    third = here.live(notes=Notes())
    meter.begin()
    await until_more(meter, third, 0)
    here.manager.terminate(third.id)
    assert meter._task is not None
    await meter._task


async def test_what_cannot_be_read_is_left_out_and_tried_again(here: Here, use: Use) -> None:
    meter, live = here.shared.meter, here.live(notes=Notes())
    use.error = IoError("gone")
    await meter.look(live)
    use.error = None
    for name in ("cpu_ns", "memory_bytes"):
        setattr(use, name, None)
        await meter.look(live)
        setattr(use, name, 3)
    assert {} == meter._samples
    await meter.look(live)
    assert [(3, 3, 0)] == [
        (each.cpu_ns, each.memory, each.disk) for each in meter._samples[live.sandbox_id]
    ]


async def test_who_asks_gets_a_sample_that_is_no_older_than_a_second(here: Here, use: Use) -> None:
    meter, live = here.shared.meter, here.live(notes=Notes())
    for _ in range(2):
        assert 1 == len(await meter.points(live, 0, time.time() + 60))
    assert 1 == use.asked
    (sample,) = meter._samples[live.sandbox_id]
    meter._samples[live.sandbox_id][0] = metering._Sample(sample.at - 2, 5, 7, 0)
    assert 2 == len(await meter.points(live, 0, time.time() + 60))
    meter._samples[live.sandbox_id].clear()
    here.manager.suspend(live.id)
    assert [] == await meter.points(live, 0, time.time() + 60)
    assert 2 == use.asked, "a paused one is not woken by it"
