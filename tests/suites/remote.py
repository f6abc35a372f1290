"""A server of our own, for adapters to work over."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(place: Path) -> Iterator[str]:
    """`ringfence serve` with its state in `place`; yields the address of its socket."""
    command = ["ringfence", "serve", "--json", "--state-dir", str(place / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            (address,) = json.loads(server.stdout.readline())["listening"]
            yield address
        finally:
            server.terminate()
            server.wait(30)
