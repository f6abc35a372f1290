"""The gVisor backend passes the suite over a real `runsc`, as whoever runs it."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import pytest
from tests.features import require

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.testing.conformance import BackendConformance

SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    client, _ = server.accept()
    while data := client.recv(9999):
        client.sendall(data)
    client.close()
"""
_state = tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-")


@pytest.fixture(scope="module", autouse=True)
def _gvisor() -> None:
    require("user namespaces")
    require("runsc")


class TestGvisor(BackendConformance):
    patience_s: ClassVar[float] = 120.0
    binds_late: ClassVar[bool] = False

    def make_backend(self) -> GvisorBackend:
        return GvisorBackend(state_dir=_state.name)

    def make_spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"tier": STRONG, **changes})

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=5)"
        return ("/usr/bin/python3", "-c", code)

    def serve_argv(self, port: int) -> tuple[str, ...]:
        return ("/usr/bin/python3", "-c", SERVER, str(port))
