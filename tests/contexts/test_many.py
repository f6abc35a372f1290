"""Two hundred sandboxes with a context each."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from tests.features import require

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
_COUNT = 200


def test_two_hundred_sandboxes_with_a_context_each() -> None:
    """Each keeps its own variable; together they take less than 24 MiB each."""
    require("user namespaces")
    with ExitStack() as stack:
        backend = NativeBackend()
        stack.callback(backend.close)
        before = _available()
        contexts = []
        for number in range(_COUNT):
            sandbox = stack.enter_context(Sandbox.create(backend=backend))
            contexts.append(sandbox.context())
            contexts[-1].run(f"n = {number}")
        taken = (before - _available()) / _COUNT
        print(f"{taken / 2**20:.1f} MiB each")

        assert [str(n) for n in range(_COUNT)] == [each.run("n").text for each in contexts]
        assert taken < 24 << 20


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
