"""What fails, fails closed: the egress process, the host process, floods, and very many of everything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence import NetworkLimits, NetworkPolicy, Sandbox
from ringfence.egress.host import client
from tests.egress.inside.conftest import MakeSandbox, attempt, new_sandbox
from tests.egress.world import World, places
from tests.native.callers import Caller
from tests.native.outside import children_of, open_fds, until

pytestmark = [pytest.mark.in_world, pytest.mark.full]

GET = ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"]


@pytest.fixture(autouse=True)
def _an_egress_process_of_its_own() -> Iterator[None]:
    """A process that dies again and again is given up: what one test kills is not the next one's."""
    yield
    client.close_shared()


def egress_processes(parent: int = 0) -> list[int]:
    """Those that only pass on, among the children of a process: their command says so."""
    found = []
    for pid in children_of(parent or os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"ringfence.egress.main" in command and b"\0plain\0" in command:
                found.append(pid)
        except OSError:
            continue  # it ended while we looked
    return found


def the_egress_process() -> int:
    """The one of this process, which may have just taken the place of one that was killed."""
    assert until(lambda: 1 == len(egress_processes()))
    return egress_processes()[0]


def reaches(sandbox: Sandbox, host: str = "a.test") -> bool:
    say = [f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"]
    return (
        " 200 " in attempt(sandbox, "tcp", host=host, port=80, say=say, until=" 200 ")["heard"][:20]
    )


# -- the egress process dies ------------------------------------------------------------------------


def test_a_killed_egress_process_opens_nothing_and_comes_back(
    make: MakeSandbox, world: World
) -> None:
    sandbox = make(network="a.test,echo.test")
    download = sandbox.start(["curl", "-sS", "-o", "/dev/null", "http://a.test/bytes/100000000000"])
    assert world.internet.wait(kind="request", target="/bytes/100000000000")
    victim = the_egress_process()

    os.kill(victim, signal.SIGKILL)

    assert not download.wait(timeout_s=10).ok  # what it carried is cut, not carried on by anybody
    assert reaches(sandbox)  # without anything done for it
    assert not reaches(sandbox, "evil.test")
    successor = the_egress_process()
    assert successor != victim


def test_while_it_is_gone_nothing_leaves(make: MakeSandbox, world: World) -> None:
    """Stopped it answers nobody; killed then, what waited for it is refused or served, never let out."""
    sandbox = make(network="a.test")
    victim = the_egress_process()
    os.kill(victim, signal.SIGSTOP)
    mark = world.mark()
    try:
        for host, port in ((places.WEB_V4, 80), ("8.8.8.8", 53), (places.METADATA_V4, 80)):
            assert not attempt(sandbox, "tcp", host=host, port=port)["connected"]
        assert "" == attempt(sandbox, "udp", host=places.WEB_V4, port=7)["heard"]
        assert [] == world.left(mark)
    finally:
        os.kill(victim, signal.SIGKILL)
    assert until(lambda: reaches(sandbox))


def test_a_restart_keeps_every_policy(make: MakeSandbox) -> None:
    names = ["a.test", "b.test", "c.test"]
    sandboxes = [make(network=name) for name in names]
    sandboxes[2].apply_network_policy("v4.test")
    names[2] = "v4.test"
    for _ in range(2):
        victim = the_egress_process()
        os.kill(victim, signal.SIGKILL)
        for sandbox, own in zip(sandboxes, names, strict=True):
            for name in ("a.test", "b.test", "c.test", "v4.test"):
                assert (name == own) == reaches(sandbox, name), (name, own)


def test_addresses_of_names_survive_a_restart(make: MakeSandbox) -> None:
    """A program that resolved once, as servers do, goes on."""
    sandbox = make(network="a.test,b.test,c.test")
    before = attempt(sandbox, "resolve", name="b.test")["addresses"]
    victim = the_egress_process()

    os.kill(victim, signal.SIGKILL)

    say = ["GET / HTTP/1.1\r\nHost: b.test\r\n\r\n"]
    for address in before:
        found = attempt(sandbox, "tcp", host=address, port=80, say=say)
        assert " 200 " in found["heard"][:20], found
    assert before == attempt(sandbox, "resolve", name="b.test")["addresses"]


def test_a_policy_can_be_changed_while_it_is_gone(make: MakeSandbox) -> None:
    """Asked between two egress processes: answered by the next."""
    sandbox = make(network="a.test")
    victim = the_egress_process()
    os.kill(victim, signal.SIGKILL)

    for name in ("c.test", "a.test", "b.test"):
        sandbox.apply_network_policy(name)

    assert reaches(sandbox, "b.test")
    assert not reaches(sandbox, "a.test")


# -- the host process dies --------------------------------------------------------------------------

LIBRARY = """
sandbox = Sandbox.create(network="a.test")
process = sandbox.start(["sh", "-c", "curl -sS -o /dev/null http://a.test/bytes/100000000000"])
say(os.getpid())
listen()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_host_process(world: World, signum: signal.Signals) -> None:
    mark = world.internet.mark()
    with Caller(LIBRARY) as caller:
        pid = caller.hear()
        assert world.internet.wait(mark, kind="request", target="/bytes/100000000000")
        (egress,) = egress_processes(pid)
        caller.kill(signum)
    assert until(lambda: not Path(f"/proc/{egress}").exists())


def test_the_egress_process_has_no_more_than_it_needs(make: MakeSandbox) -> None:
    assert reaches(make(network="a.test"))  # whatever is served comes after
    pid = the_egress_process()
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":\t" in line
    )

    assert ("1", "2") == (status["NoNewPrivs"], status["Seccomp"])
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert 0 == int(status[name], 16), name
    assert "0" not in status["Uid"].split()
    assert "0" not in status["Gid"].split()
    if 0 == os.geteuid():
        assert "" == status["Groups"].strip()


# -- many, and few that want everything -----------------------------------------------------------------


def test_one_sandboxs_flood_is_not_anothers(make: MakeSandbox) -> None:
    flood = make(
        network=NetworkPolicy(allowed_hosts=("echo.test",), limits=NetworkLimits(connections=100))
    )
    other = make(network="a.test")
    script = """
import socket
kept = []
while True:
    try:
        sock = socket.create_connection(("echo.test", 7), 5)
        sock.sendall(b"x")
        kept.append(sock)
        kept = kept[-500:]
    except OSError:
        pass
"""
    flooding = [flood.start(["python3", "-c", script]) for _ in range(3)]
    try:
        for _ in range(20):
            assert reaches(other)
    finally:
        for process in flooding:
            process.kill()


def test_slow_heads_hold_up_nobody(make: MakeSandbox) -> None:
    """Two hundred connections that never say enough; the next one is served at once."""
    limits = NetworkLimits(header_s=100)  # longer than the next one waits
    sandbox = make(network=NetworkPolicy(allowed_hosts=("a.test",), limits=limits))
    script = """
import socket, sys
kept = [socket.create_connection(("a.test", 80), 20) for _ in range(200)]
for sock in kept:
    sock.sendall(b"GET / HTTP/1.1\\r\\nHo")
print("open", flush=True)
sys.stdin.readline()
"""
    process = sandbox.start(["python3", "-c", script], stream_stdin=True)
    assert "open" == next(process.stdout.lines()).strip()

    assert reaches(sandbox)

    process.kill()


def test_connections_beyond_the_limit_are_refused(make: MakeSandbox) -> None:
    limits = NetworkLimits(connections=5)
    sandbox = make(network=NetworkPolicy(allowed_hosts=("echo.test",), limits=limits))
    script = """
import socket
kept, served = [], 0
for _ in range(20):
    try:
        sock = socket.create_connection(("echo.test", 7), 5)
        kept.append(sock)
        sock.sendall(b"x")
        served += bool(sock.recv(1))
    except OSError:
        pass
print(served)
"""
    result = sandbox.exec(["python3", "-c", script], timeout_s=30)

    assert "5\n" == result.stdout_text, result.stderr_text


def test_bytes_beyond_the_limit_are_refused(make: MakeSandbox) -> None:
    sandbox = make(network="a.test", limits={"network_bytes": 1_000_000})

    small = sandbox.exec(["sh", "-c", "curl -sS http://a.test/bytes/100000 | wc -c"], timeout_s=10)
    large = sandbox.exec(
        ["curl", "-sS", "-o", "/dev/null", "http://a.test/bytes/5000000"], timeout_s=10
    )

    assert "100000" == small.stdout_text.strip()
    assert not large.ok
    assert not large.timed_out
    assert not reaches(sandbox)


@pytest.mark.anyone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_sandboxes_with_policies(world: World) -> None:
    sandboxes: list[Sandbox] = []
    try:
        with ThreadPoolExecutor(8) as pool:
            for made in pool.map(
                lambda n: Sandbox.create(network=f"n{n}.wild.test,a.test"), range(1_000)
            ):
                sandboxes.append(made)
        assert 1 == len(egress_processes())
        for number in (0, 1, 499, 998, 999):
            sandboxes[number].files.write(
                "/tmp/attempts.py", Path(__file__).with_name("attempts.py").read_bytes()
            )
            assert reaches(sandboxes[number], f"n{number}.wild.test")
            assert not reaches(sandboxes[number], f"n{number + 1}.wild.test")
        victim = the_egress_process()
        os.kill(victim, signal.SIGKILL)
        assert until(lambda: reaches(sandboxes[999], "n999.wild.test"), 30)
        assert reaches(sandboxes[0], "n0.wild.test")
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Sandbox.terminate, sandboxes))
    pid = the_egress_process()
    if os.access(f"/proc/{pid}/fd", os.R_OK):  # it is not dumpable: an ordinary user may not look
        assert until(lambda: len(open_fds(pid)) < 50)


@pytest.mark.root
def test_create_and_terminate_leaves_nothing_in_the_egress_process(world: World) -> None:
    with new_sandbox(world, network="a.test") as sandbox:
        assert reaches(sandbox)
        pid = the_egress_process()
        before = len(open_fds(pid))
    for _ in range(100):
        with Sandbox.create(network="a.test,b.test:80"):
            pass
    assert until(lambda: len(open_fds(pid)) <= before)
