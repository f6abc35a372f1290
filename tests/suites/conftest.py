"""Suites that others wrote. Each needs packages of its own: `tools/suites.sh` installs and runs them."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# The ordinary test run has none of these packages.
collect_ignore_glob = [] if os.environ.get("RINGFENCE_SUITE") else ["*/test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some is judged once, and not again over another backend or as root."""
    if "-" not in os.environ.get("RINGFENCE_SUITE", "").replace("-next", ""):
        return
    once = [item for item in items if item.get_closest_marker("once")]
    config.hook.pytest_deselected(items=once)
    items[:] = [item for item in items if item not in once]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A suite skips what a backend cannot do: here that is a rule not kept."""
    report = yield
    if os.environ.get("RINGFENCE_SUITE") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report
