"""A sandbox of the native and of the unconfined backend, and a context in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.contexts import Context
from tests.features import require
from tests.unconfined import Unconfined


@pytest.fixture(scope="module", params=["native", "unconfined"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if "native" == request.param:
        require("user namespaces")
    backend = NativeBackend() if "native" == request.param else Unconfined()
    try:
        with Sandbox.create(backend=backend) as made:
            yield made
    finally:
        backend.close()


@pytest.fixture
def context(sandbox: Sandbox) -> Iterator[Context]:
    with sandbox.context() as made:
        yield made
