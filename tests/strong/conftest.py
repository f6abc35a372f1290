"""The backend that these tests are about, unless a file makes one of another kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence.backends.gvisor.backend import GvisorBackend
from tests.features import require


@pytest.fixture
def backend() -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend()
    yield made
    made.close()
