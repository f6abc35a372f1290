"""Counts, percentiles and the page that Prometheus reads."""

from __future__ import annotations

import re
import statistics
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.api.measured import Requests, of_process
from ringfence.model.manager_stats import Health, ManagerStats, Percentiles
from ringfence.sessions.counts import metrics
from ringfence.sessions.counts.statistics import Counters, Durations

pytestmark = pytest.mark.anyone


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=300))
def test_percentiles_are_values_that_were_measured(seconds: list[float]) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)

    found = durations.percentiles()

    for part, value in ((0.50, found.p50_ms), (0.95, found.p95_ms), (0.99, found.p99_ms)):
        assert value is not None
        assert value in {each * 1000 for each in seconds}
        at_most = sum(each * 1000 <= value for each in seconds)
        below = sum(each * 1000 < value for each in seconds)
        assert below < part * len(seconds) + 1e-9 <= at_most + 1e-9
    average = durations.average_ms
    assert average is not None
    assert abs(statistics.fmean(seconds) * 1000 - average) < 1e-6 * (1 + average)


def test_nothing_is_known_of_nothing() -> None:
    assert Percentiles() == Durations().percentiles()
    assert Durations().average_ms is None


def test_only_the_last_thousand_count_for_percentiles() -> None:
    durations = Durations()
    for _ in range(1000):
        durations.add(1000.0)
    for _ in range(1000):
        durations.add(1.0)

    assert 1000.0 == durations.percentiles().p99_ms
    assert 500_500.0 == durations.average_ms


def test_many_threads_count() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(1000):
            counters.add("x")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 8000 == counters["x"]
    assert 0 == counters["y"]


FULL = ManagerStats(
    uptime_s=12.5,
    created=7,
    active_sandboxes=3,
    active_sessions=1,
    detached_sessions=1,
    suspended_sessions=1,
    pool_size=2,
    pool_hits=3,
    pool_misses=1,
    pool_hit_rate=0.75,
    average_creation_ms=4.0,
    creation=Percentiles(3.0, 8.0, 9.0),
    timeout_destroys=2,
    terminated=4,
    lost=1,
    refused=5,
    waiting=6,
    max_sandboxes=100,
)


def samples(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_page_says_what_the_stats_say() -> None:
    found = samples(metrics.render(FULL))

    assert 7 == found["ringfence_sandboxes_created_total"]
    assert 3 == found["ringfence_sandboxes"]
    assert 1 == found['ringfence_sessions{state="suspended"}']
    assert 2 == found["ringfence_sessions_expired_total"]
    assert 0.009 == found['ringfence_creation_seconds{quantile="0.99"}']
    assert not any("pool_claim" in name for name in found), "unknown is left out, never zero"


def test_the_page_is_in_the_format() -> None:
    """Source: the exposition format's grammar: HELP, TYPE, then samples of that family."""
    family = ""
    page = metrics.render(FULL)
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
        elif line.startswith("# TYPE "):
            assert [family] == line.split(" ")[2:3]
            assert line.split(" ")[3] in ("counter", "gauge", "summary")
        else:
            match = re.fullmatch(r'(\w+)(\{\w+="[^"\\\n]*"\})? ([0-9.e+-]+)', line)
            assert match, line
            assert family == match[1]


def test_every_count_is_on_the_page() -> None:
    known = {*metrics._COUNTERS, *metrics._GAUGES, "creation", "pool_claim"}
    told_otherwise = {
        "active_sessions",
        "detached_sessions",
        "suspended_sessions",
        "pool_hit_rate",
        "average_creation_ms",
    }

    assert set(ManagerStats.__match_args__) == known | told_otherwise


def test_they_cross_the_wire() -> None:
    assert FULL == ManagerStats.from_json(FULL.to_json())
    health = Health.from_json({"ok": False, "checks": [{"name": "store", "ok": False}]})
    assert health == Health.from_json(health.to_json())


def test_requests_are_timed_by_route_and_the_process_tells_of_itself() -> None:
    requests = Requests()
    requests.add("/a", "GET", 200, 0.002)
    requests.add("/a", "POST", 201, 20.0)
    requests.add("/b", "GET", 200, 0.5)
    found = samples(requests.render(1) + of_process())

    bucket = 'ringfence_http_request_seconds_bucket{{route="{}",le="{}"}}'
    assert [1, 2] == [found[bucket.format("/a", most)] for most in ("0.0025", "+Inf")]
    assert [0, 1] == [found[bucket.format("/b", most)] for most in ("0.25", "0.5")]
    assert 20.002 == found['ringfence_http_request_seconds_sum{route="/a"}']
    assert abs(time.time() - found["process_start_time_seconds"]) < 86_400
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert 0 < found["process_open_fds"] <= found["process_max_fds"]
