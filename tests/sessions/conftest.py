"""Managers of real sandboxes, as whoever runs the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence.backends.native.backend import NativeBackend
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.features import require

MakeManager = Callable[..., SessionManager]
NO_POOL = PoolConfig(enabled=False)
ALLOWED = ("cpu_limit",)
"""What may be missing where there are no cgroups."""


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    """One backend for a module: its zygote need not be started for every test."""
    backend = NativeBackend(state_dir=str(tmp_path_factory.mktemp("snapshots")))
    yield backend
    backend.close()


@pytest.fixture
def make_manager(native: NativeBackend) -> Iterator[MakeManager]:
    """`make_manager(idle_s=..., max_sandboxes=..., ...)`: closed when the test is over."""
    with ExitStack() as stack:

        def make(
            *,
            state_dir: str | None = None,
            backends: tuple[Any, ...] | None = None,
            background: bool = True,
            pool: PoolConfig = NO_POOL,
            **config: Any,
        ) -> SessionManager:
            times = {
                name: config.pop(name)
                for name in ("idle_s", "detach_s", "suspend_s", "on_idle")
                if name in config
            }
            manager = SessionManager(
                ManagerConfig(timeouts=SessionTimeouts(**times), pool=pool, **config),
                state_dir=state_dir,
                backends=backends or (native,),
                background=background,
            )
            return stack.enter_context(manager)

        yield make


@pytest.fixture
def manager(make_manager: MakeManager) -> SessionManager:
    return make_manager()
