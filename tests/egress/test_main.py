"""Requests of the host process to an egress process, one by one, in this process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import NetworkPolicy
from ringfence.egress import main
from ringfence.egress.io.loop import sleep
from ringfence.launcher import wire
from tests.egress.scene import tcp_pair

pytestmark = pytest.mark.anyone

ONE, OTHER = "sbx-one", "sbx-other"
TOKEN = bytes(range(16))
HERE = NetworkPolicy(allowed_hosts=("127.0.0.0/8",))


class Process:
    """An egress process's object, its control socket's other end, and what it said there."""

    def __init__(self) -> None:
        ours, self.host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.host.setblocking(False)
        self.program = subprocess.Popen(["sleep", "1000"])
        self.pidfd = os.pidfd_open(self.program.pid)
        self.egress = main.Egress(wire.Socket(fileno=ours.detach()), self.pidfd, None, ["a right"])
        self.places: dict[str, tuple[str, int]] = {}

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        self.egress.commons.close()
        self.egress.loop.close()
        self.egress.control._socket.close()
        self.host.close()
        os.close(self.pidfd)

    def settle(self) -> None:
        self.egress.loop.run_until_done(sleep(0.01))

    def told(self) -> list[dict[str, Any]]:
        """Whatever it has said since the last time."""
        found = []
        while True:
            self.settle()
            try:
                found.append(json.loads(self.host.recv(1 << 17)))
            except BlockingIOError:
                return found

    def ask(self, verb: str, body: dict[str, Any], fds: list[int] | None = None) -> None:
        """As if the request had come over the socket."""
        self.egress._serve((verb, body), fds if fds is not None else [])

    def serve(
        self, sandbox_id: str, policy: dict[str, Any] | None = None, token: bytes = b""
    ) -> list[int]:
        """Have it serve a sandbox; the descriptors that it was given."""
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.places[sandbox_id] = tcp.getsockname()
        fds = [tcp.detach(), udp.detach()]
        settings = {"policy": policy or HERE.to_json(), "secrets": {}, "network_bytes": None}
        body = {"id": sandbox_id, **settings, "ca": None, "token": token.hex()}
        self.ask("serve", body, list(fds))
        return fds

    def ends(self) -> bool:
        """Let it serve; whether it stops, and does so by itself."""
        late = self.egress.loop.later(20, self.egress.loop.stop)
        self.egress.loop.run()
        is_early = late.call is not None
        late.cancel()
        return is_early


@pytest.fixture(name="process")
def fixture_process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def is_cut(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return b"" == sock.recv(1)
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_it_says_what_it_could_not_give_up_before_anything_else(process: Process) -> None:
    assert [{"ready": True, "missing": ["a right"]}] == process.told()


def test_a_sandbox_that_is_refused_leaves_no_socket_and_the_one_before_it(
    process: Process,
) -> None:
    process.serve(ONE)
    before = process.egress.commons.sandboxes[ONE]
    watched = set(process.egress.loop._handlers)
    process.told()
    fds = process.serve(ONE, {"mode": "unrestricted"})
    assert [False, False] == [is_open(fd) for fd in fds]
    assert watched == set(process.egress.loop._handlers)
    message = process.told()[0]
    assert ("serve", ONE) == (message["refused"]["verb"], message["refused"]["id"])
    assert "only a limited policy can be judged" in message["refused"]["reason"]
    assert before is process.egress.commons.sandboxes[ONE]
    assert not before._is_closed


def test_one_that_is_served_anew_takes_the_place_of_the_first(process: Process) -> None:
    process.serve(ONE)
    first = process.egress.commons.sandboxes[ONE]
    process.serve(ONE)
    assert first._is_closed
    assert not process.egress.commons.sandboxes[ONE]._is_closed
    process.ask("drop", {"id": ONE})
    process.ask("drop", {"id": ONE})
    assert {} == process.egress.commons.sandboxes
    assert ["ready"] == [
        word for message in process.told() for word in message if word != "missing"
    ]


def test_what_cannot_be_done_is_told_and_its_descriptors_are_closed(process: Process) -> None:
    process.told()
    reading, writing = os.pipe()
    process.ask("change", {"id": ONE}, [reading, writing])
    assert [False, False] == [is_open(fd) for fd in (reading, writing)]
    (message,) = process.told()
    assert {"verb": "change", "id": ONE} == {
        name: message["refused"][name] for name in ("verb", "id")
    }
    assert message["refused"]["reason"].startswith(f"KeyError: '{ONE}' (main.py:")


def test_who_waits_for_an_answer_gets_one_whatever_happens(process: Process) -> None:
    def fail(_hosts: object) -> None:
        raise ValueError("on purpose")

    process.told()
    process.ask("authority", {"token": 8, "hosts": []})
    assert [{"authority": {"token": 8}}] == process.told(), "it ends no TLS"
    process.egress.commons.terminator = SimpleNamespace(make=fail)  # type: ignore[assignment]
    process.ask("authority", {"token": 9, "hosts": []})
    refused, answered = process.told()
    assert refused["refused"]["reason"].startswith("ValueError: on purpose")
    assert {"flushed": 9} == answered
    process.egress.commons.terminator = None


def test_an_answer_comes_after_what_had_happened_and_with_what_goes_on(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_MOST_LIVE", 2)
    process.serve(ONE, token=TOKEN)
    process.serve(OTHER)
    process.told()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        there = bytes(10) + b"\xff\xff" + socket.inet_aton("127.0.0.1")
        for _ in range(3):
            client = stack.enter_context(socket.create_connection(process.places[ONE]))
            client.sendall(TOKEN + there + listener.getsockname()[1].to_bytes(2, "big"))
        while 3 > len(process.egress.commons.sandboxes[ONE].live()):
            process.settle()
        process.ask("flush", {"token": 1, "id": ONE})
        *found, answered = process.told()
        assert [2, 1] == [len(each["live"]["events"]) for each in found]
        assert {1} == {each["live"]["token"] for each in found}
        assert {"flushed": 1} == answered
        process.ask("flush", {"token": 2, "id": OTHER})
        assert [{"flushed": 2}] == process.told()
        process.ask("drop", {"id": ONE})
        process.ask("flush", {"token": 3, "id": ONE})
        *found, answered = process.told()
    assert {"flushed": 3} == answered
    ended = [event["reason"] for each in found for event in each["events"]]
    assert ["the sandbox is gone"] * 3 == ended


def test_what_has_begun_and_ends_within_four_turns_comes_before_the_answer(
    process: Process,
) -> None:
    process.told()
    loop, record = process.egress.loop, process.egress.commons.record

    def go_on(turns: int) -> None:
        if turns:
            loop.soon(lambda: go_on(turns - 1))
        else:
            record.add(ONE, "tcp", host="a.test", allowed=True)

    go_on(4)
    process.ask("flush", {"token": 1})
    events, answered = process.told()
    assert ["a.test"] == [each["host"] for each in events["events"]]
    assert {"flushed": 1} == answered


@pytest.mark.parametrize("is_ruled", [True, False])
def test_a_connection_into_a_sandbox_ends_with_it(process: Process, is_ruled: bool) -> None:
    """Also into one that may reach nothing, and by the limits of one that has some."""
    if is_ruled:
        process.serve(ONE)
    pairs = [tcp_pair() for _ in range(3)]
    (client, near), (server, far), _ = pairs
    given = [os.dup(sock.fileno()) for sock in (near, far)]
    for sock in (near, far):
        sock.close()
    process.ask("relay", {"id": ONE, "port": 80}, given)
    client.sendall(b"hello")
    process.settle()
    assert b"hello" == server.recv(9)
    assert is_ruled == (ONE not in process.egress.unruled)
    if is_ruled:
        assert 5 == process.egress.commons.sandboxes[ONE].meter.moved_bytes
    assert 1 == process.egress.commons.connections
    process.ask("drop", {"id": ONE})
    process.settle()
    assert is_cut(client)
    assert is_cut(server)
    assert (0, {}) == (process.egress.commons.connections, process.egress.unruled)
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_it_serves_until_the_host_process_is_gone_though_a_child_has_its_socket(
    process: Process,
) -> None:
    process.program.kill()
    assert process.ends()
    process.host.close()
    assert process.ends(), "and when nobody has the socket"


def test_a_fault_is_told_by_its_place_and_nothing_stops(process: Process) -> None:
    process.told()
    process.egress.loop.soon(lambda: list[None]().pop())
    (message,) = process.told()
    assert message["fault"].startswith("IndexError: pop from empty list (")
    assert "test_main.py:" in message["fault"]
    process.ask("flush", {"token": 1})
    assert [{"flushed": 1}] == process.told()
