"""Suites that others wrote. Each needs packages of its own: `tools/suites.sh` installs and runs them."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from tests.suites import places, remote

# The ordinary test run has none of these packages.
collect_ignore_glob = [] if os.environ.get("RINGFENCE_SUITE") else ["*/test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """NAME-remote: whatever the suite makes is a server's. Modules ask for it while they are imported."""
    if os.environ.get("RINGFENCE_SUITE", "").endswith("-remote"):
        stack = ExitStack()
        os.environ[places.SERVER] = stack.enter_context(remote.serving())
        config.add_cleanup(stack.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some is judged once, and not again over another backend, on a server or as root."""
    name = os.environ.get("RINGFENCE_SUITE", "").replace("-next", "").replace("-middle", "")
    left_out = ["once"] if "-" in name else []
    if "RINGFENCE_TEST_HEAD" not in os.environ:
        left_out.append("by_hand")
    if name.endswith("-remote"):
        left_out.append("here")
    if os.geteuid():
        left_out.append("as_root")
    gone = [item for item in items if any(item.get_closest_marker(each) for each in left_out)]
    if name.endswith("-root") and any(item.get_closest_marker("as_root") for item in items):
        gone = [item for item in items if not item.get_closest_marker("as_root")]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A suite skips what a backend cannot do: here that is a rule not kept."""
    report = yield
    if os.environ.get("RINGFENCE_SUITE") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report
