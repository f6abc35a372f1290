"""Very many: connections one after another and at once, names, datagrams, sandboxes that want too much."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence import NetworkLimits, NetworkPolicy, Sandbox
from ringfence.egress.host.client import Egress
from tests.egress.inside.attempts import AT_ONCE_S
from tests.egress.inside.conftest import attempt
from tests.egress.inside.process.clients import Client
from tests.egress.inside.process.conftest import MakeBox
from tests.egress.inside.process.test_faults import _open_files
from tests.egress.world import World, places
from tests.native.outside import until

pytestmark = [pytest.mark.in_world, pytest.mark.timeout(180), pytest.mark.anyone, pytest.mark.full]

_SEQUENCE = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
address = socket.gethostbyname(host)
for number in range(count):
    with socket.create_connection((address, port), 10) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x", number
print("all")
"""

_STREAMS = """
import selectors, socket, sys, time
host, port, count, size = sys.argv[1], *map(int, sys.argv[2:])
address = socket.gethostbyname(host)
chosen, got, ended = selectors.DefaultSelector(), {}, {}
for number in range(count):
    sock = socket.create_connection((address, port), 10)
    sock.setblocking(False)
    chosen.register(sock, selectors.EVENT_READ)
    got[sock] = 0
started = time.perf_counter()
while len(ended) < count:
    for key, _ in chosen.select():
        sock = key.fileobj
        got[sock] += len(sock.recv(1 << 16))
        if got[sock] >= size:
            ended[sock] = time.perf_counter() - started
            chosen.unregister(sock)
            sock.close()
print(*sorted(ended.values()))
"""


def python(sandbox: Sandbox, script: str, *arguments: object, timeout_s: float = 90) -> str:
    argv = ["python3", "-c", script, *map(str, arguments)]
    result = sandbox.exec(argv, timeout_s=timeout_s)
    assert result.ok, result.stderr_text[-500:]
    return result.stdout_text


def memory_kib(egress: Egress) -> int:
    (pid,) = egress.processes
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def test_one_after_another(box: MakeBox, egress: Egress) -> None:
    """10,000 of them, from a program inside to a server outside, by name: nothing more is held than
    after the first thousand, here or in the egress process."""
    sandbox = box("echo.test:7")
    python(sandbox, _SEQUENCE, "echo.test", 7, 1000)
    (pid,) = egress.processes
    files, memory = _open_files(str(pid)), memory_kib(egress)
    ours = _open_files("self")

    for _ in range(9):
        assert "all\n" == python(sandbox, _SEQUENCE, "echo.test", 7, 1000)

    egress.check(sandbox.id)
    assert _open_files(str(pid)) <= files + 4  # pipes kept for the next one
    assert ours == _open_files("self")
    assert memory_kib(egress) < memory + 1024
    assert 10_000 == egress.totals(sandbox.id)["allowed"] + egress.totals(sandbox.id)[
        "missed"
    ] - _names(egress, sandbox)


def _names(egress: Egress, sandbox: Sandbox) -> int:
    return len(
        [event for event in egress.events(sandbox.id) if "dns" == event.kind and event.allowed]
    )


def test_two_hundred_streams_at_once(box: MakeBox) -> None:
    """None starves: the slowest is not long behind the middle one."""
    sandbox = box("a.test:19")
    times = list(
        map(float, python(sandbox, _STREAMS, "a.test", places.SOURCE, 200, 1 << 20).split())
    )

    assert 200 == len(times)
    assert times[197] < 5 * statistics.median(times)


def test_a_flood_of_connections_of_one_sandbox_leaves_the_other_alone(box: MakeBox) -> None:
    flooding = box(
        network=NetworkPolicy(allowed_hosts=("echo.test:7",), limits=NetworkLimits(connections=64))
    )
    other = box("echo.test:7")
    flood = (
        "import socket, time\n"
        "address = socket.gethostbyname('echo.test')\n"
        "kept = []\n"
        "while True:\n"
        "    sock = socket.socket()\n"
        "    try:\n"
        "        sock.connect((address, 7))\n"
        "    except OSError:\n"
        "        continue\n"
        "    kept.append(sock)\n"
        "    if len(kept) > 200: kept.pop(0).close()\n"
    )
    python(other, _SEQUENCE, "echo.test", 7, 100)
    process = flooding.start(["python3", "-c", flood])
    try:
        python(other, _SEQUENCE, "echo.test", 7, 500)
    finally:
        process.kill()
        process.wait()


def test_a_flood_of_queries_of_one_sandbox_leaves_the_other_alone(
    box: MakeBox, egress: Egress
) -> None:
    flooding, other = box("*.wild.test"), box("a.test", "b.test")
    flood = (
        "import socket, struct, time\n"
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "sock.setblocking(False)\n"
        "sock.connect(('127.0.0.53', 53))\n"
        "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    label = b'%d' % number\n"
        "    zone = b'\\4wild\\4test\\0' if number % 2 else b'\\4evil\\4test\\0'\n"
        "    name = bytes([len(label)]) + label + zone\n"
        "    try:\n"
        "        sock.send(struct.pack('!6H', 1, 256, 1, 0, 0, 0) + name + b'\\0\\1\\0\\1')\n"
        "    except OSError:\n"
        "        pass\n"
    )
    process = flooding.start(["python3", "-c", flood])
    try:
        # Else ten queries may be over before a busy machine has begun the flood.
        assert until(lambda: egress.totals(flooding.id)["missed"])
        for _ in range(10):
            found = attempt(other, "resolve", name="a.test")
            assert found["addresses"], found
    finally:
        process.kill()
        process.wait()
    assert memory_kib(egress) < 64 << 10
    assert len(egress.events(flooding.id)) < 3000
    assert egress.totals(flooding.id)["missed"]


def test_names_that_never_resolve_hold_up_only_who_asks(box: MakeBox, world: World) -> None:
    greedy, other = box("*.tunnel.test:7", "silent.test:7", "slow.test:7"), box("echo.test:7")
    for number in range(40):
        world.internet.zone(f"{number}.tunnel.test", {})
    with Client(greedy) as client:
        for number in range(40):
            client.do("connect", key=str(number), host=f"{number}.tunnel.test", port=7)
        for _ in range(3):
            found = attempt(other, "tcp", host="echo.test", port=7, say=["x"], until="x")
            assert "x" == found["heard"]
            assert found["seconds"] < AT_ONCE_S


_FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from ringfence import NetworkLimits, NetworkPolicy, Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.egress.host import client
backend = NativeBackend(egress=client.shared)
limits = NetworkLimits(connections=9999)
policy = NetworkPolicy(allowed_hosts=("echo.test:7",), limits=limits)
greedy, other = (Sandbox.create(network=policy, backend=backend) for _ in range(2))
process = greedy.start(["python3", "-c", sys.argv[1]])
held = next(iter(process.stdout)).decode()
print("held", held.strip())
one = '''import socket
sock = socket.create_connection(("echo.test", 7), 5)
sock.sendall(b"x"); print("other", sock.recv(1).decode())'''
print(other.exec(["python3", "-c", one]).stdout_text.strip())
process.kill()
process.wait()
again = "for number in range(50):" + "".join("\\n    " + line for line in one.splitlines()[1:])
print(greedy.exec(["python3", "-c", "import socket\\n" + again]).stdout_text.count("other x"))
print({event.reason for event in client.shared().events(greedy.id)})
greedy.terminate(); other.terminate(); backend.close(); client.close_shared()
"""

_HOLD = """
import socket, time
address = socket.gethostbyname("echo.test")
kept = []
for number in range(300):
    try:
        sock = socket.create_connection((address, 7), 5)
        sock.sendall(b"x")
        if sock.recv(1):
            kept.append(sock)
    except OSError:
        pass
print(len(kept), flush=True)
time.sleep(60)
"""


def test_more_connections_than_descriptors(world: World) -> None:
    """One sandbox takes what there is and is refused the rest, and the other still gets its share."""
    argv = [sys.executable, "-c", _FEW_FILES, _HOLD]
    path = os.pathsep.join(
        [str(Path(ringfence.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )

    assert "" == done.stderr
    held, other, again, reasons = done.stdout.splitlines()
    assert 10 < int(held.removeprefix("held ")) < 60
    assert "other x" == other
    assert "50" == again
    assert "this host has no room for more connections" in reasons
