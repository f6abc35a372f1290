"""Connections over a line: what arrives, how they end, and what a guest's side cannot do to the host's."""

from __future__ import annotations

import marshal
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from ringfence.launcher import network, wire
from ringfence.launcher.link import connection_relay
from ringfence.launcher.link.connection_relay import OPEN, PLAN, QUERY, RESET, Inside, Outside
from ringfence.launcher.link.line import CONTROL, DATA, ROOM, frame

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relayed:
    """Both sides, with a server where every connection was meant for, and a resolver."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.resolver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.resolver.bind(("127.0.0.1", 0))
        self.meant = (socket.inet_aton("127.0.0.1"), self.server.getsockname()[1])
        made = self.made = list[int]()
        self.make()
        for sock in (self.server, self.resolver):
            sock.settimeout(PATIENCE_S)
        monkeypatch.setattr(connection_relay, "destination", lambda _sock, _peer: self.meant)
        monkeypatch.setattr(connection_relay, "_RESOLVER", self.resolver.getsockname())
        monkeypatch.setattr(
            network, "set_up", lambda plan: [made.pop(0), made.pop(0)] if plan["port"] else []
        )
        self.near, self.far = (stack.enter_context(each) for each in socket.socketpair())
        self.control, theirs = (stack.enter_context(closing(each)) for each in wire.socketpair())
        self.control.settimeout(PATIENCE_S)
        sides = Inside(self.far.fileno()), Outside(self.near.fileno(), theirs)
        self.threads = [threading.Thread(target=side.run) for side in sides]
        for thread in self.threads:
            thread.start()
        assert b"O" == self.order({"port": 1021}, is_open=True)

    def make(self) -> None:
        """The guest's listener and its resolver's socket, for the next plan that asks for them."""
        listener = socket.create_server(("127.0.0.1", 0))
        asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        asked.bind(("127.0.0.1", 0))
        for sock in (listener, asked):
            sock.setblocking(False)
        self.inner = listener.getsockname(), asked.getsockname()
        self.made += [listener.detach(), asked.detach()]

    def order(self, plan: dict[str, int], *, is_open: bool) -> bytes:
        wire.send(self.control, (plan, is_open))
        return self.control.recv(1000)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """A program's end, and the server's."""
        client = socket.create_connection(self.inner[0], PATIENCE_S)
        served = self.server.accept()[0]
        served.settimeout(PATIENCE_S)
        return client, served


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relayed]:
    with ExitStack() as stack:
        made = Relayed(stack, monkeypatch)
        yield made
        for sock in (made.near, made.far):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in made.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def everything(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def say_and_end(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def pour_until_full(sock: socket.socket) -> None:
    """More than all buffers on the way hold together."""
    sock.settimeout(1.0)
    try:
        while True:
            sock.send(bytes(1 << 16))
    except TimeoutError:
        pass


def is_reset(sock: socket.socket, connecting_to: tuple[str, int] | None = None) -> bool:
    try:
        if connecting_to:
            sock.connect(connecting_to)
        everything(sock)
    except ConnectionResetError:
        return True
    return False


def test_all_arrives_and_half_a_connection_may_end_first(relayed: Relayed) -> None:
    question, reply = b"q" * 700_000, bytes(range(256)) * 4000
    client, served = relayed.connect()
    with client, served:
        asking = threading.Thread(target=say_and_end, args=(client, question))
        asking.start()
        assert question == everything(served)
        asking.join()
        answering = threading.Thread(target=say_and_end, args=(served, reply))
        answering.start()
        assert reply == everything(client)
        answering.join()


@pytest.mark.parametrize("by", [0, 1], ids=["the program", "the server"])
def test_what_breaks_on_one_side_is_reset_on_the_other(relayed: Relayed, by: int) -> None:
    """The control is the test above: what ends in order, ends so."""
    ends = relayed.connect()
    ends[by].sendall(b"half of it")
    assert b"half of it" == ends[1 - by].recv(100)

    ends[by].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    ends[by].close()

    with ends[1 - by]:
        assert is_reset(ends[1 - by])


def test_where_nobody_listens_the_program_is_reset(relayed: Relayed) -> None:
    relayed.server.close()

    with socket.socket() as client:
        client.settimeout(PATIENCE_S)
        assert is_reset(client, relayed.inner[0])


def test_when_the_line_ends_all_that_was_connected_is_reset(relayed: Relayed) -> None:
    client, served = relayed.connect()
    with client, served:
        relayed.near.shutdown(socket.SHUT_RDWR)

        assert is_reset(client)
        assert is_reset(served)


def test_one_that_reads_nothing_stops_no_other(relayed: Relayed) -> None:
    slow, pouring = relayed.connect()
    with slow, pouring:
        pour_until_full(pouring)
        client, served = relayed.connect()
        with client, served:
            served.sendall(b"still here")
            assert b"still here" == client.recv(100)


def test_names_are_asked_for_and_answered(relayed: Relayed) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(PATIENCE_S)
        asker.sendto(b"who?", relayed.inner[1])
        data, peer = relayed.resolver.recvfrom(100)
        relayed.resolver.sendto(data + b" me", peer)

        assert b"who? me" == asker.recv(100)


def test_a_policy_that_leads_nowhere_cuts_all_and_lets_nobody_in(relayed: Relayed) -> None:
    client, served = relayed.connect()
    with client, served:
        assert b"O" == relayed.order({"port": 0}, is_open=False)

        assert is_reset(client)
        assert is_reset(served)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(relayed.inner[0], PATIENCE_S)


def test_a_policy_that_follows_another_leaves_nothing_of_it(relayed: Relayed) -> None:
    """Neither connections that the first let through, nor answers to what was asked under it."""
    before = relayed.inner
    client, served = relayed.connect()
    with client, served, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(PATIENCE_S)
        asker.sendto(b"before?", before[1])
        _, waits = relayed.resolver.recvfrom(100)
        relayed.make()
        assert b"O" == relayed.order({"port": 1021}, is_open=True)

        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(before[0], PATIENCE_S)
        assert is_reset(client)
        assert is_reset(served)
        relayed.resolver.sendto(b"too late", waits)
        client, served = relayed.connect()
        with client, served:
            say_and_end(client, b"the next is let in")
            assert b"the next is let in" == everything(served)
        asker.sendto(b"after?", relayed.inner[1])
        question, peer = relayed.resolver.recvfrom(100)
        relayed.resolver.sendto(question + b" me", peer)
        assert (b"after? me", relayed.inner[1]) == asker.recvfrom(100)


class Host:
    """The host's side alone, and the other end of its line, where a guest may say what it likes."""

    def __init__(self, stack: ExitStack) -> None:
        self.line, far = (stack.enter_context(each) for each in socket.socketpair())
        self.control, theirs = (stack.enter_context(closing(each)) for each in wire.socketpair())
        self.line.settimeout(PATIENCE_S)
        self.outside = Outside(far.fileno(), theirs)
        self.thread = threading.Thread(target=self._run, args=(far,))
        self.thread.start()

    def _run(self, far: socket.socket) -> None:
        self.outside.run()
        far.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def host() -> Iterator[Host]:
    with ExitStack() as stack:
        made = Host(stack)
        yield made
        made.control.close()
        made.thread.join(PATIENCE_S)
        assert not made.thread.is_alive()


def place(port: int, address: str = "127.0.0.1") -> bytes:
    return struct.pack("!H", port) + socket.inet_aton(address)


@pytest.mark.parametrize(
    "said",
    [
        frame(OPEN, 1, b"\0\1short"),
        frame(OPEN, CONTROL, place(80)),
        frame(DATA, 7, b"of a channel that never was"),
        frame(RESET, 7, b""),
        frame(b"?", CONTROL, b""),
        frame(QUERY, CONTROL, b"1"),
        frame(DATA, CONTROL, bytes(1 << 17)),
    ],
    ids=[
        "no address",
        "no number",
        "no channel",
        "nothing to reset",
        "an unknown kind",
        "a question too short",
        "a frame too long",
    ],
)
def test_a_guest_that_breaks_the_rules_ends_its_line(host: Host, said: bytes) -> None:
    host.line.sendall(said)

    assert b"" == host.line.recv(100)


def test_a_guest_gets_no_more_room_than_there_is(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        opened = frame(OPEN, 1, place(server.getsockname()[1]))
        host.line.sendall(opened + frame(ROOM, 1, b"1"))

        assert b"" == host.line.recv(100)


def test_a_number_that_was_used_opens_nothing(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        place_of_it = place(server.getsockname()[1])
        host.line.sendall(frame(OPEN, 2, place_of_it))
        server.accept()[0].close()

        host.line.sendall(frame(OPEN, 1, place_of_it))
        host.line.sendall(frame(OPEN, 3, place(1, "127.0.0.1")))

        assert frame(RESET, 3, b"") in _read_until(host.line, frame(RESET, 3, b""))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_guest_that_does_not_listen_is_not_listened_to() -> None:
    """What would be answered waits in its own line, and not in our memory; a guest's side always listens."""
    with ExitStack() as stack:
        lines = [stack.enter_context(each) for _ in range(2) for each in socket.socketpair()]
        control, theirs = (stack.enter_context(closing(each)) for each in wire.socketpair())
        control.setblocking(False)
        heard = []
        for side, line in ((Outside(lines[0].fileno(), theirs), 0), (Inside(lines[2].fileno()), 2)):
            side._out += bytes(1 << 24)
            side._flush()
            heard.append(side._events[lines[line].fileno()])
            side._over = True
            side.run()

    assert [select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT] == heard


def test_an_answer_of_a_guests_kernel_is_told_and_an_order_passed_on(host: Host) -> None:
    order = ({"port": 0, "batches": []}, False)
    wire.send(host.control, order)

    said = _read_until(host.line, marshal.dumps(order))
    host.line.sendall(frame(PLAN, CONTROL, b"E1 no"))

    assert frame(PLAN, CONTROL, marshal.dumps(order)) == said
    host.control.settimeout(PATIENCE_S)
    assert b"E1 no" == host.control.recv(100)


def _read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = sock.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def test_a_guest_opens_so_many_connections_and_no_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a descriptor of the host's; one that has ended makes room."""
    monkeypatch.setattr(connection_relay, "_MOST_CONNECTIONS", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        there = place(server.getsockname()[1])
        host.line.sendall(b"".join(frame(OPEN, number, there) for number in (1, 2, 3)))

        assert frame(RESET, 3, b"") == _read_until(host.line, frame(RESET, 3, b""))
        host.line.sendall(frame(RESET, 1, b"") + frame(OPEN, 4, there))
        for _ in range(3):
            server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_guest_asks_so_many_questions_at_once_and_no_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_relay, "_MOST_QUERIES", 2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.bind(("127.0.0.1", 0))
        resolver.settimeout(PATIENCE_S)
        monkeypatch.setattr(connection_relay, "_RESOLVER", resolver.getsockname())
        host.line.sendall(b"".join(frame(QUERY, CONTROL, b"\0%cask" % n) for n in (1, 2, 3)))
        for _ in range(3):
            data, asker = resolver.recvfrom(100)
            assert b"ask" == data
            resolver.sendto(b"told", asker)

        told = _read_until(host.line, frame(QUERY, CONTROL, b"\0\3told"))

    assert frame(QUERY, CONTROL, b"\0\2told") in told
    assert frame(QUERY, CONTROL, b"\0\1told") not in told


@pytest.mark.parametrize("is_host", [True, False])
def test_on_a_line_that_was_used_before_each_side_begins_at_the_token(is_host: bool) -> None:
    """The guest's side says it at once, the host's once it has heard it, and what came before is nobody's."""
    with ExitStack() as stack:
        near, far = (stack.enter_context(each) for each in socket.socketpair())
        control, theirs = (stack.enter_context(closing(each)) for each in wire.socketpair())
        near.settimeout(PATIENCE_S)
        control.settimeout(PATIENCE_S)
        token, order = b"a token", ({"port": 0, "batches": []}, False)
        side = Outside(far.fileno(), theirs, token) if is_host else Inside(far.fileno(), token)
        thread = threading.Thread(target=side.run)
        thread.start()
        near.sendall(frame(b"?", CONTROL, b"of somebody before") + token[:3])
        if is_host:
            wire.send(control, order)
        near.sendall(token)
        near.sendall(frame(PLAN, CONTROL, b"O" if is_host else marshal.dumps(order)))
        wanted = token + frame(PLAN, CONTROL, marshal.dumps(order) if is_host else b"O")
        assert wanted == _read_until(near, wanted[len(token) :])
        if is_host:
            assert b"O" == control.recv(100)
        near.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
