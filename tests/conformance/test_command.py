"""The command backend passes the suite over real launchers, as whoever runs it."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
from tests.features import require

from ringfence import Sandbox
from ringfence.backends.command import launchers
from ringfence.backends.command.backend import CommandBackend
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.limits import LimitsThatBite
from ringfence.testing.conformance.network import Network
from ringfence.testing.conformance.reports import Reports

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


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require("user namespaces")
    require("bwrap")


class TestBubblewrap(BackendConformance):
    def make_backend(self) -> CommandBackend:
        return CommandBackend(launchers.bubblewrap())

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=5)"
        return ("/usr/bin/python3", "-c", code)

    def serve_argv(self, port: int) -> tuple[str, ...]:
        return ("/usr/bin/python3", "-c", SERVER, str(port))


# Nothing but our filter keeps a program from asking for a keyring: keyctl(2), KEYCTL_GET_KEYRING_ID.
ASKS_FOR_A_KEYRING = """
import ctypes, platform
number = {"x86_64": 250, "aarch64": 219}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(number, 0, -3, 1) < 0 and ctypes.get_errno())
"""


@pytest.mark.parametrize(("filtered", "refused"), [(True, errno.EPERM), (False, False)])
def test_bubblewraps_programs_run_under_our_filter(filtered: bool, refused: object) -> None:
    launcher = dataclasses.replace(launchers.bubblewrap(), filtered=filtered)
    with Sandbox.create(backend=CommandBackend(launcher)) as sandbox:
        said = sandbox.exec(["/usr/bin/python3", "-c", ASKS_FOR_A_KEYRING]).text

    assert str(refused) == said.strip()


@pytest.mark.root  # the CLI runs as an ordinary user of its own either way
class TestCodex(Execs, Endings, Environment, Network, LimitsThatBite, Reports):
    """The real Codex CLI. Its policy lets no program connect; each of its sandboxes takes a second.

    What is left out here does not depend on the launcher: `tools/conformance.sh codex` runs all of it.
    """

    def make_backend(self) -> CommandBackend:
        require("codex")
        return CommandBackend(launchers.codex())

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        return TestBubblewrap.connect_argv(self, host, port)  # type: ignore[arg-type]

    def serve_argv(self, port: int) -> tuple[str, ...]:
        """No server may even listen: that nobody can connect is said all the same."""
        return ("sh", "-c", "echo up; sleep 600")


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "codex":

    class TestAllOfCodex(TestCodex, BackendConformance):
        """Everything, in five minutes."""
