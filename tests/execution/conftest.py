"""Execution services over real sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from ringfence.backends.native.backend import NativeBackend
from ringfence.execution.service import ExecutionService
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import ExecutionRequest, ExecutionResult
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.features import require

MakeService = Callable[..., ExecutionService]
Run = Callable[..., ExecutionResult]
NO_POOL = PoolConfig(enabled=False)


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    backend = NativeBackend(state_dir=str(tmp_path_factory.mktemp("snapshots")))
    yield backend
    backend.close()


@pytest.fixture
def make_service(native: NativeBackend) -> Iterator[MakeService]:
    """`make_service(state_dir=..., network_enabled=..., ...)`: closed when the test is over."""
    with ExitStack() as stack:

        def make(state_dir: str | None = None, **config: Any) -> ExecutionService:
            manager = SessionManager(
                ManagerConfig(pool=NO_POOL), state_dir=state_dir, backends=(native,)
            )
            stack.enter_context(manager)
            given = ExecutionConfig(**config)
            return stack.enter_context(closing(ExecutionService(manager, given)))

        yield make


@pytest.fixture
def service(make_service: MakeService) -> ExecutionService:
    return make_service()


@pytest.fixture
def run(service: ExecutionService) -> Run:
    """`run("ls", "-l", env=...)`: to its end."""

    def run(command: str, *args: str, **options: Any) -> ExecutionResult:
        request = ExecutionRequest(command, args, **options)
        return service.execute(request, client_id="tester")

    return run
