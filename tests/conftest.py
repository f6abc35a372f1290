"""Identity markers, `require`, and the leak check around every run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.features import require as require_feature
from tests.leaks import Census, parentage, take_census, too_deep, wait_for_calm
from tests.passes import GEAR, Claims, is_left_out, is_of_another_gear

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("first", settings.get_profile("all"), max_examples=40)
_in_a_hurry = "first" == os.environ.get(GEAR) and not os.environ.get("CI")
settings.load_profile("first" if _in_a_hurry else "all")

# Reading the tests makes a million objects that stay. The collector would look at each of them time and again.
gc.disable()

# In the background of a script, or under nohup(1), some signals are ignored. What we start would ignore
# them too, and tests that send them would wait for ever.
for _ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.SIG_IGN == signal.getsignal(_ignored):
        signal.signal(_ignored, signal.SIG_DFL)

_PATIENCE_S = 30.0


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out, unread, the files of another gear and of the other pass."""
    return is_left_out(collection_path) or None


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run this pass's own tests, then files of the shared ones that the other pass has not begun."""
    directory = os.environ.get("RINGFENCE_TEST_CLAIMS")
    if not directory or session.testsfailed or session.config.option.collectonly:
        return None
    claims = Claims(Path(directory))
    mine = claims.of(session.items)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that this identity can run; `make test` runs the others in its other pass."""
    am_root = 0 == os.geteuid()
    other = "rootless" if am_root else "root"
    other_gear = set(filter(is_of_another_gear, items))
    config.hook.pytest_deselected(items=list(other_gear))
    items[:] = [item for item in items if item not in other_gear]
    not_mine = {item for item in items if item.get_closest_marker(other)}
    if os.environ.get("RINGFENCE_TEST_BOTH"):
        config.hook.pytest_deselected(items=list(not_mine))
        items[:] = [item for item in items if item not in not_mine]
        return
    wants = "an unprivileged user" if am_root else "root"
    for item in not_mine:
        item.add_marker(pytest.mark.skip(reason=f"needs {wants}"))


def pytest_collection_finish() -> None:
    """Collect garbage again, but never what was made until here."""
    gc.freeze()
    gc.enable()


def pytest_report_collectionfinish() -> list[str]:
    """Why some are deselected, and some that are collected do not run."""
    if not os.environ.get("RINGFENCE_TEST_BOTH"):
        return []
    shared = "; tests marked `anyone` run in the pass that comes to them first"
    return [
        "deselected: tests that only the other pass can run"
        + (shared if os.environ.get("RINGFENCE_TEST_CLAIMS") else "")
    ]


@pytest.fixture(name="require")
def fixture_require() -> Callable[[str], None]:
    """`require("landlock")`: skip by name where it is missing; in CI fail."""
    return require_feature


def _close_shared_backends() -> None:
    """End what lives as long as its process, on purpose: shared backends, their zygotes and egress."""
    registry = sys.modules.get("ringfence.backends.registry")
    if registry is not None:
        registry.close_all()
    egress = sys.modules.get("ringfence.egress.host.client")
    if egress is not None:
        egress.close_shared()


@pytest.fixture(scope="session", autouse=True)
def nothing_leaks(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """What the whole run leaves on the machine: nothing that was not there before."""
    if os.environ.get("RINGFENCE_TEST_CLUSTER"):
        yield  # other suites run beside this one, as the same user
        return
    before: Census = take_census()
    yield
    # Its last fixtures end with it: the test that it expected next may have run in the other pass.
    elsewhere = pytestconfig.pluginmanager.unregister(name="elsewhere")
    if elsewhere is not None:
        elsewhere.close()
    _close_shared_backends()
    grown = wait_for_calm(before, patience_s=_PATIENCE_S)
    grown += [("deep tree", path) for path in too_deep(str(tmp_path_factory.getbasetemp()))]
    if grown:
        lines = "\n".join(f"  {kind}: {thing}{parentage(kind, thing)}" for kind, thing in grown)
        pytest.fail(f"the test run left behind:\n{lines}", pytrace=False)
