"""LangChain's suite for sandboxes over langchain-e2b, unmodified, on a Ringfence server."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from langchain_e2b import E2BSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests

from e2b import Sandbox
from tests.suites.remote import serving_e2b

# The SDK leaves the connections of threads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class TestSuite(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[E2BSandbox]:
        with serving_e2b(), Sandbox.create(timeout=600) as made:
            yield E2BSandbox(sandbox=made)
            gc.collect()


def test_it_is_the_whole_suite(request: pytest.FixtureRequest) -> None:
    assert 86 == sum(getattr(item, "cls", None) is TestSuite for item in request.session.items)
