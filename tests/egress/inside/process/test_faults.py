"""The egress process dies, is stopped, or cannot be had: nothing opens, and what can goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ringfence import NetworkPolicy, NetworkRule
from ringfence.egress.host import line as egress_line
from ringfence.egress.host.client import Egress
from ringfence.errors import NetworkPolicyError
from tests.egress.inside.conftest import attempt
from tests.egress.inside.process.clients import Client
from tests.egress.inside.process.conftest import MakeBox
from tests.egress.world import World, places
from tests.native.outside import until

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]


def wait_until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def kill(egress: Egress, signum: int = signal.SIGKILL, kind: str = "plain") -> int:
    pid = egress._lines[kind].pid
    os.kill(pid, signum)
    return pid


def test_killed_in_the_middle_of_a_transfer(box: MakeBox, egress: Egress, world: World) -> None:
    sandbox = box("a.test:19", "a.test:80")
    with Client(sandbox) as client:
        client.do("connect", key="bulk", host="a.test", port=places.SOURCE)
        assert client.do("drain", key="bulk", least=10 << 20) >= 10 << 20

        dead = kill(egress)

        assert {"error": "ECONNRESET"} == client.do("drain", key="bulk", least=1 << 40)
        mark = world.internet.mark()
        assert (
            '"port": 80'
            in attempt(
                sandbox,
                "tcp",
                host="a.test",
                port=80,
                say=["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"],
            )["heard"]
        )
        for host, port in (("evil.test", 80), ("a.test", 8080), (places.WEB_V4, 80)):
            assert attempt(sandbox, "tcp", host=host, port=port)["error"]
        assert [80] == [event["port"] for event in world.internet.seen(mark, kind="connection")]
    assert [dead] != egress.processes


def test_a_new_process_has_the_same_addresses_for_the_same_names(
    box: MakeBox, egress: Egress
) -> None:
    """A program that looked its server up before the death may keep on using what it found."""
    sandbox = box("a.test", "b.test", "echo.test")
    before = [attempt(sandbox, "resolve", name=name) for name in ("a.test", "b.test", "echo.test")]
    kill(egress)
    after = [attempt(sandbox, "resolve", name=name) for name in ("echo.test", "b.test", "a.test")]

    assert before == after[::-1]


def test_killed_again_and_again(box: MakeBox, egress: Egress) -> None:
    sandbox = box("echo.test:7")
    for _ in range(4):
        kill(egress)
        found = attempt(sandbox, "tcp", host="echo.test", port=7, say=["x"], until="x")
        assert found["heard"] == "x" or "AGAIN" == found["error"], found


def test_given_up_when_it_never_stays(
    box: MakeBox, egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody listens inside any more: refused at once is better than waiting for ever."""
    monkeypatch.setattr(egress_line, "_MOST_SHORT_LIVES", 1)
    sandbox = box("echo.test:7")
    synthetic = attempt(sandbox, "resolve", name="echo.test")["addresses"][0]
    for _ in range(2):
        pid = kill(egress)
        wait_until(partial(_is_another, egress, pid))
    wait_until(lambda: _is_over(egress))

    assert "ECONNREFUSED" == attempt(sandbox, "tcp", host=synthetic, port=7)["error"]
    with pytest.raises(NetworkPolicyError, match="does not stay up"):
        box("a.test")


def _is_another(egress: Egress, pid: int) -> bool:
    return egress.processes != [pid] or _is_over(egress)


def _is_over(egress: Egress) -> bool:
    return all(line._given_up for line in egress._lines.values())


def test_stopped_it_is_replaced_and_holds_nobody_up(box: MakeBox, egress: Egress) -> None:
    """Whoever has its uid may stop it: then it dies of the next question, and another one serves."""
    sandbox, other = box("echo.test:7"), box("a.test:7")
    with Client(sandbox) as client:
        client.do("connect", key="x", host="echo.test", port=7)
        client.do("send", key="x", text="x")
        assert "x" == client.do("receive", key="x")  # it was not only queued
        pid = kill(egress, signal.SIGSTOP)

        other.terminate()

        assert {"error": "ECONNRESET"} == client.do("receive", key="x")
        assert client.do("connect", key="y", host="echo.test", port=7) is True
    assert [pid] != egress.processes
    (line,) = egress._lines.values()
    assert "replaced" in line.fault
    line.fault = ""  # what this test has made


def test_one_that_is_silent_is_replaced(
    box: MakeBox, egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does: nobody waits for it for ever."""
    monkeypatch.setattr(egress_line, "_LOOK_S", 0.05)
    monkeypatch.setattr(egress_line, "_is_stopped", lambda _pid: False)
    sandbox = box("echo.test:7")
    pid = kill(egress, signal.SIGSTOP)

    egress.change(sandbox.id, NetworkPolicy.parse("a.test:7"), {}, None)

    assert "NONAME" == attempt(sandbox, "tcp", host="echo.test", port=7)["error"]
    assert "x" == attempt(sandbox, "tcp", host="a.test", port=7, say=["x"], until="x")["heard"]
    assert [pid] != egress.processes
    egress._lines["plain"].fault = ""


UNREADABLE = {"policy": {"mode": "unrestricted"}}
UNREADABLE_AUTHORITY = {"cert": "no certificate", "key": "no key"}


def test_a_policy_that_is_refused_leaves_the_old_one_in_force(box: MakeBox, egress: Egress) -> None:
    """And what is connected stays so; the same from one kind of process to the other."""
    sandbox = box("echo.test:7")
    line = egress._lines["plain"]
    served = line.served(sandbox.id)
    assert served is not None
    ended = NetworkPolicy(rules=(NetworkRule("a.test", inspect=True),))
    with Client(sandbox) as client:
        client.do("connect", key="x", host="echo.test", port=7)

        with pytest.raises(NetworkPolicyError, match="not applied"):
            line.change({**served.body, **UNREADABLE})
        with pytest.raises(NetworkPolicyError, match="not applied"):
            egress.change(sandbox.id, ended, {}, None, authority=UNREADABLE_AUTHORITY)

        client.do("send", key="x", text="x")
        assert "x" == client.do("receive", key="x")
        for _ in range(2):
            egress.check(sandbox.id)
            assert client.do("connect", key="y", host="echo.test", port=7) is True
            assert "error" in client.do("connect", key="z", host="a.test", port=7)
            kill(egress)
    egress.change(sandbox.id, NetworkPolicy.parse("a.test:7"), {}, None)
    assert "x" == attempt(sandbox, "tcp", host="a.test", port=7, say=["x"], until="x")["heard"]


def test_a_policy_that_is_refused_from_the_first_leaves_nobody_waiting(
    box: MakeBox, egress: Egress
) -> None:
    sandbox = box("echo.test:7")
    line = egress._lines["plain"]
    served = line.served(sandbox.id)
    assert served is not None
    synthetic = attempt(sandbox, "resolve", name="echo.test")["addresses"][0]
    fds = [os.dup(fd) for fd in served.fds]
    egress.drop(sandbox.id)

    line.serve({**served.body, **UNREADABLE}, fds)

    with pytest.raises(NetworkPolicyError, match="not applied"):
        line.settle(sandbox.id)
    assert "ECONNREFUSED" == attempt(sandbox, "tcp", host=synthetic, port=7)["error"]


def test_what_cannot_be_answered_is_told_at_once(egress: Egress) -> None:
    """And the process is not taken for one that is silent."""
    line = egress._line("tls")
    line.flush()
    pid = line.pid

    with pytest.raises(NetworkPolicyError, match="no certificate authority"):
        line.make_authority([{"not": "a host"}])  # type: ignore[list-item]

    line.flush()
    assert pid == line.pid
    line.fault = ""  # what this test has made


def test_a_forked_child_lets_go(egress: Egress, box: MakeBox) -> None:
    """A child that lives on must not keep the process, or a sandbox's network, alive."""
    sandbox = box("echo.test:7")
    (pid,) = egress.processes
    script = (
        "import os, sys, time\n"
        "from ringfence.egress.host import client\n"
        "from ringfence import NetworkPolicy\n"
        "import socket\n"
        "tcp = socket.create_server(('127.0.0.1', 0)); udp = socket.socket(type=socket.SOCK_DGRAM)\n"
        "udp.bind(('127.0.0.1', 0))\n"
        "policy = NetworkPolicy.parse('a.test')\n"
        "client.shared().serve('sbx-1', policy, {}, None, [tcp.fileno(), udp.fileno()])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    os.close(2)\n"
        "    time.sleep(60)\n"
        "print(client.shared().processes[0], child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    served_by, child = map(int, done.stdout.split())
    try:
        wait_until(lambda: not Path(f"/proc/{served_by}").exists())
    finally:
        os.kill(child, signal.SIGKILL)
    assert [pid] == egress.processes
    assert "x" == attempt(sandbox, "tcp", host="echo.test", port=7, say=["x"], until="x")["heard"]


def test_it_ends_with_its_host_process() -> None:
    script = (
        "import os\n"
        "from ringfence.egress.host import client\n"
        "from ringfence.egress.host.line import Line\n"
        "line = Line('plain'); line.flush()\n"
        "print(line.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def test_nothing_is_left_of_a_sandbox_that_ended(box: MakeBox, egress: Egress) -> None:
    before_box = box("a.test")
    before_box.terminate()
    egress._lines["plain"].flush()
    (pid,) = egress.processes
    ours, theirs = _open_files("self"), _open_files(str(pid))
    for _ in range(5):
        sandbox = box("echo.test:7")
        with Client(sandbox) as client:
            client.do("connect", key="x", host="echo.test", port=7)
            client.do("send", key="x", text="x")
            assert "x" == client.do("receive", key="x")
        sandbox.terminate()
    egress._lines["plain"].flush()

    # One that was built ahead is kept for a moment.
    assert until(lambda: ours == _open_files("self"))
    assert theirs >= _open_files(str(pid)) - 2  # a pipe that is kept for the next connection


def _open_files(process: str) -> int:
    if "self" == process:
        return len(os.listdir("/proc/self/fd"))
    limits = Path(
        f"/proc/{process}/limits"
    )  # of a process that is not dumpable, only root sees fds
    assert limits.exists()
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except PermissionError:
        return 0


def test_an_unknown_sandbox_is_told_as_such(egress: Egress) -> None:
    with pytest.raises(NetworkPolicyError, match="sbx-nobody"):
        egress.change("sbx-nobody", NetworkPolicy.parse("a.test"), {}, None)
    egress.drop("sbx-nobody")
    assert [] == egress.events("sbx-nobody")
