"""Suites that others wrote. Each needs packages of its own: `tools/suites.sh` installs and runs them."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# The ordinary test run has none of these packages.
collect_ignore_glob = [] if os.environ.get("RINGFENCE_SUITE") else ["*/test_*.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A suite skips what a backend cannot do: here that is a rule not kept."""
    report = yield
    if os.environ.get("RINGFENCE_SUITE") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report
