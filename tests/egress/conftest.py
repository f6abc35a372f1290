"""Tests of what leaves a sandbox. Those marked `in_world` live in a world of their own."""

from __future__ import annotations

import pytest

from tests.egress.world import World
from tests.egress.world.elsewhere import MARK, Elsewhere, world_here


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    marked = any(item.get_closest_marker(MARK) for item in session.items)
    if marked and not session.config.option.collectonly:
        session.config.pluginmanager.register(Elsewhere(session), "elsewhere")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    elsewhere = session.config.pluginmanager.unregister(name="elsewhere")
    if isinstance(elsewhere, Elsewhere):
        elsewhere.close()


@pytest.fixture(scope="session")
def world() -> World:
    return world_here()
