"""Sockets that the agent connects while threads swap addresses, descriptors, paths and directories."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.landlock.sandbox import LandlockSandbox
from ringfence.guest.without_namespaces.landlocked import members
from ringfence.policy.seccomp import MACHINES
from tests.features import require
from tests.strangers import let_others_in

pytestmark = pytest.mark.full
PYTHON = "/usr/bin/python3"
SECONDS = float(os.environ.get("RINGFENCE_RACE_S", "10"))
"""Ten minutes: RINGFENCE_RACE_S=600, as `tools/races.sh` sets it."""

RACES = """
import ctypes, mmap, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
port, host_path, seconds = int(sys.argv[1]), sys.argv[2].encode(), float(sys.argv[3])
until = time.monotonic() + seconds
shared = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(shared))
server = socket.create_server(('127.0.0.1', 0)); own = server.getsockname()[1]
os.mkdir('in')
local = socket.socket(socket.AF_UNIX); local.bind('in/s'); local.listen()
def inet(port): return struct.pack('=H', 2) + struct.pack('!H4s8x', port, bytes([127, 0, 0, 1]))
def unix(path): return struct.pack('=H', 1) + path + b'\\0'
inside = os.path.join(os.getcwdb(), b'in', b's')
pairs = [(inet(own), inet(port)), (unix(inside), unix(host_path)), (inet(own), unix(host_path))]
length = max(len(each) for pair in pairs for each in pair)
def accept(listener):
    while True:
        try: listener.accept()[0].close()
        except OSError: pass
for each in (server, local):
    threading.Thread(target=accept, args=(each,), daemon=True).start()
current, number = 0, os.dup(0)
def swap_address():
    while time.monotonic() < until:
        for each in pairs[current]: shared[:len(each)] = each
def swap_directory():
    place = os.path.dirname(host_path)
    while time.monotonic() < until:
        try:
            os.rename('in', 'was'); os.symlink(place, 'in'); os.unlink('in'); os.rename('was', 'in')
        except OSError: pass
def swap_descriptor():
    while time.monotonic() < until:
        for family in (socket.AF_INET, socket.AF_UNIX):
            with socket.socket(family) as sock: os.dup2(sock.fileno(), number)
def listen_unbound():
    while time.monotonic() < until:
        with socket.socket() as sock:
            sock.listen()
            assert sock.getsockname()[0].startswith('127.'), sock.getsockname()
for each in (swap_address, swap_directory, swap_descriptor, listen_unbound):
    threading.Thread(target=each, daemon=True).start()
done = refused = 0
while time.monotonic() < until:
    for family in (socket.AF_INET, socket.AF_UNIX):
        for current in range(len(pairs)):
            with socket.socket(family) as sock:
                sock.settimeout(1)
                for fd in (sock.fileno(), number):
                    size = len(pairs[current][0])
                    result = libc.connect(fd, ctypes.c_void_p(at), size)
                    done += result == 0; refused += result != 0
                try: sock.sendto(b'x', 0x20000000, ('127.0.0.1', port))
                except (OSError, TypeError): pass
print(done, refused, flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


@contextmanager
def outside(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Servers of the host's, and what came to them."""
    came: list[str] = []
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(path))
        os.chmod(path, 0o777)
        unix.listen()

        def accept(server: socket.socket, name: str) -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return
                came.append(name)

        for server, name in ((tcp, "tcp"), (unix, "unix")):
            threading.Thread(target=accept, args=(server, name), daemon=True).start()
        yield tcp.getsockname()[1], came
        for server in (tcp, unix):
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(120 + SECONDS)
def test_swapped_addresses_descriptors_and_paths_reach_no_server_of_the_host(
    tmp_path: Path,
) -> None:
    let_others_in(tmp_path)
    path = tmp_path / "s"
    with outside(path) as (port, came), Sandbox.create(backend="landlock") as sandbox:
        with socket.create_connection(("127.0.0.1", port)), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
        deadline = time.monotonic() + 20
        while len(came) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ["tcp", "unix"] == sorted(came)  # the control
        ran = sandbox.exec(
            [PYTHON, "-c", RACES, str(port), str(path), str(SECONDS)], timeout_s=100 + SECONDS
        )
        assert ran.ok, ran.stderr_text
        done, refused = map(int, ran.text.split())

    assert ["tcp", "unix"] == sorted(came)
    assert min(done, refused) > 3, ran


def test_without_the_agent_nothing_is_connected() -> None:
    """A stopped agent lets the call wait, and the end of it ends the caller."""
    connect = str(MACHINES[os.uname().machine].numbers["connect"])
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\nsock = socket.socket()\n"
        "input('up')\nsock.connect(server.getsockname())\nprint('connected', flush=True)"
    )
    with Sandbox.create(backend="landlock") as sandbox:
        inner = sandbox._inner
        assert isinstance(inner, LandlockSandbox)
        process = sandbox.start([PYTHON, "-uc", code], stream_stdin=True)
        assert process.stdin is not None
        assert b"up" == process.stdout.read()
        (caller,) = [pid for pid in members(inner._tag_base) if pid != inner.pid]
        os.kill(inner.pid, signal.SIGSTOP)
        process.stdin.write(b"\n")
        waiting, deadline = Path(f"/proc/{caller}/syscall"), time.monotonic() + 20
        while waiting.read_text().split()[0] != connect and time.monotonic() < deadline:
            time.sleep(0.01)
        waited = waiting.read_text().split()[0]
        os.kill(inner.pid, signal.SIGKILL)
        while Path(f"/proc/{caller}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

        assert connect == waited
        assert not Path(f"/proc/{caller}").exists()
        assert b"connected" not in process.stdout.read()
