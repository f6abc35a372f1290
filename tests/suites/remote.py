"""A server of our own, for adapters to work over."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving() -> Iterator[str]:
    """`ringfence serve` with a state of its own; yields the address of its socket.

    That state is not below a test's own directory: the path of a socket must be short.
    """
    with tempfile.TemporaryDirectory(prefix="rf-") as place:
        yield from _serving(["ringfence", "serve", "--json", "--state-dir", f"{place}/state"])


def _serving(command: list[str]) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            (address,) = json.loads(server.stdout.readline())["listening"]
            yield address
        finally:
            server.terminate()
            server.wait(30)
