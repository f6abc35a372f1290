"""The native backend passes the suite, as whoever runs it: host root or an ordinary user."""

from __future__ import annotations

import tempfile

import pytest
from tests.features import require

from ringfence.backends.native.backend import NativeBackend
from ringfence.testing.claimed import ClaimingBackend
from ringfence.testing.conformance import BackendConformance

_state = tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-")


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


class TestNative(BackendConformance):
    def make_backend(self) -> NativeBackend:
        return NativeBackend(state_dir=_state.name)

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=5)"
        return ("/usr/bin/python3", "-c", code)

    def serve_argv(self, port: int) -> tuple[str, ...]:
        code = (
            f"import socket\nserver = socket.create_server(('127.0.0.1', {port}))\n"
            "print('up', flush=True)\n"
            "while True:\n"
            "    client, _ = server.accept()\n"
            "    while data := client.recv(9999): client.sendall(data)\n"
            "    client.close()"
        )
        return ("/usr/bin/python3", "-c", code)


class TestNativeClaimed(TestNative):
    """Every sandbox is built ahead and then claimed: whoever gets it cannot tell the difference."""

    def make_backend(self) -> ClaimingBackend:  # type: ignore[override]
        return ClaimingBackend(NativeBackend(state_dir=_state.name))
