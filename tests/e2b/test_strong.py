"""E2B's fork of sandboxes with a kernel of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box, Client
from tests.e2b.test_interpreter import (  # noqa: F401
    test_a_fork_has_the_variables_and_processes,
)
from tests.features import require

pytestmark = [pytest.mark.root, pytest.mark.full]


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """A daemon of gVisor sandboxes."""
    require("runsc")
    config = tmp_path_factory.mktemp("c") / "config.json"
    config.write_text(json.dumps({"backends": ["gvisor"], "manager": {"pool": {"enabled": False}}}))
    e2b = ("--e2b", "--domain", "sbx.test", "--listen", "127.0.0.1:0")
    return start_daemon(*e2b, "--config", str(config))


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[Box]:
    """A sandbox without a network: gVisor saves no other one."""
    made = client.create(allow_internet_access=False, timeout=600)
    yield made
    client.api("DELETE", f"/sandboxes/{made.id}")
