"""Tests of what leaves a sandbox. Those marked `in_world` live in a world of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import Sandbox
from tests.egress.world import World
from tests.egress.world.elsewhere import MARK, Elsewhere, world_here

MakeSandbox = Callable[..., Sandbox]


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


@pytest.fixture
def make(world: World) -> Iterator[MakeSandbox]:
    """`make(**options of Sandbox.create)`: gone when the test is over, whatever its state."""
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            environment = {**world.program_environment(), **options.pop("env", {})}
            return stack.enter_context(Sandbox.create(env=environment, **options))

        yield create
