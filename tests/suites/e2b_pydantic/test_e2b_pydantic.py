"""Pydantic AI's suite for workspaces over its E2B backend, unmodified, on a Ringfence server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite
from pydantic_ai_harness.e2b_sandbox import E2BSandboxBackend

from e2b import AsyncSandbox
from tests.suites.remote import serving_e2b


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with serving_e2b():
        yield


async def _destroy(backend: WorkspaceBackend) -> None:
    if backend.ref is not None:
        await AsyncSandbox.kill(backend.ref.id)


class TestSuite(WorkspaceBackendSuite):
    # That backend has no realpath of its own: it would be skipped.
    test_native_realpath_keeps_the_working_dir_and_missing_names: Any = None

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The SDK is of asyncio."""
        return "asyncio"

    @pytest.fixture
    async def backend(self) -> AsyncIterator[WorkspaceBackend]:
        made = E2BSandboxBackend(sandbox_timeout=300)
        yield made
        await _destroy(made)

    @pytest.fixture
    def fresh_backend(self) -> Callable[[], WorkspaceBackend]:
        return lambda: E2BSandboxBackend(sandbox_timeout=300)

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return lambda ref: E2BSandboxBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        return _destroy


def test_it_is_the_whole_suite(request: pytest.FixtureRequest) -> None:
    assert 37 == sum(getattr(item, "cls", None) is TestSuite for item in request.session.items)
