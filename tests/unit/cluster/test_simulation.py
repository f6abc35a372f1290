"""1,000 nodes and 100,000 sandboxes: churn, skewed images, lost and drained nodes, late samples."""

from __future__ import annotations

from statistics import mean

import pytest
from tests.unit.cluster.simulation import Simulation, choose_at_random

pytestmark = [pytest.mark.anyone, pytest.mark.full]


@pytest.mark.timeout(600)  # of computing alone: half a minute, and over two beside other passes
def test_a_large_cluster_stays_even_and_warm(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Simulation(1_000).run(100_000)
    control = Simulation(100, choose_at_random).run(5_000)
    with capsys.disabled():
        print(f"\nplacement: {outcome}\nat random, 100 nodes: {control}")

    assert 100_000 == outcome.created + outcome.rejected
    assert outcome.rejected <= 100
    assert outcome.lost > 0
    assert mean(outcome.p99) <= 1.6 < mean(control.p99)
    assert mean(outcome.top) <= 2.0 < mean(control.top)
    assert outcome.fetched <= 0.02 * outcome.created
    assert control.fetched >= 0.2 * control.created
    assert outcome.missed_pool <= 0.1 * outcome.had_pool
    assert control.missed_pool >= 0.5 * control.had_pool
