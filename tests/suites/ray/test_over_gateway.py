"""Tests of clients and API of the ordinary run, unchanged, against a gateway over three nodes.

`RINGFENCE_TEST_GATEWAY=1 tools/suites.sh ray` runs all of them, RINGFENCE_TEST_GATEWAY=PATHS those. What
differs by design is skipped, with the reason: `OF_ONE_SERVER` of `tests/api/conftest.py`. The tests of
`tests/sessions` make session managers in the test's process; over HTTP, `tests/client/test_sessions.py` has
the verbs of one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from .conftest import node_options

ROOT = Path(__file__).parents[3]
PORTION = ["tests/client/test_sandbox.py"]
"""What CI runs: each module has a gateway and three servers of its own, which cost more than its tests."""
NOT_OVER_HTTP = {
    "tests/api/test_agreement.py": "about schemas in this process, with a package that is not here",
    "tests/api/test_openapi.py": "about the document of the API, which a gateway has from the same code",
    "tests/api/test_routers.py": "about routers in this process",
    "tests/api/test_workers.py": "about worker processes that one server starts",
    "tests/client/test_surface.py": "about the client's source, with tools that are not here",
}
"""Modules that cannot differ over a gateway, or need what is not in this environment."""


@pytest.fixture(scope="module")
def address(cluster: Any) -> Iterator[str]:
    """The address of a Ray cluster of three nodes."""
    added = [cluster.add_node(**node_options()) for _ in range(2)]
    yield cluster.address
    for each in added:
        cluster.remove_node(each, allow_graceful=False)
    until = time.monotonic() + 60
    while sum(each["Alive"] for each in ray.nodes()) > 1:
        assert time.monotonic() < until, "Ray does not notice"
        time.sleep(0.1)


def _chosen() -> list[str]:
    wanted = os.environ.get("RINGFENCE_TEST_GATEWAY", "")
    if wanted != "1":
        return wanted.split() or PORTION
    every = [each for kind in ("client", "api") for each in (ROOT / "tests" / kind).glob("test_*")]
    return sorted({str(each.relative_to(ROOT)) for each in every} - NOT_OVER_HTTP.keys())


@pytest.fixture
def short() -> Iterator[str]:
    """A directory for the nodes' state: a socket's path has at most 107 bytes."""
    made = tempfile.mkdtemp(prefix="pytest", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", _chosen())
def test_passes_over_a_gateway(address: str, path: str, short: str) -> None:
    """One process for each module: Ray's settings and sockets of one do not reach the next."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", path]
    command.append(f"--basetemp={short}/t")
    done = subprocess.run(
        [*command, "--timeout=300"],
        cwd=ROOT,
        env={**os.environ, "RINGFENCE_TEST_CLUSTER": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert 0 == done.returncode, done.stdout[-4000:]
