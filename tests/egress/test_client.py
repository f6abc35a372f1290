"""The library's side of egress processes: which is started, what is told of whom, what is left at the end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography import x509

from ringfence import NetworkPolicy, NetworkRule
from ringfence.egress.host import client
from ringfence.egress.host import client as client_module
from ringfence.egress.host import line as line_module
from ringfence.egress.host.client import Egress
from ringfence.egress.host.line import Line
from ringfence.egress.host.served import Served
from ringfence.errors import NetworkPolicyError
from ringfence.launcher import wire
from ringfence.model.net.netlog import NetworkEvent

pytestmark = pytest.mark.anyone

ONE, OTHER = "sbx-one", "sbx-other"


@pytest.fixture(name="egress")
def fixture_egress() -> Iterator[Egress]:
    egress = Egress()
    yield egress
    egress.close()


def serve(egress: Egress, sandbox_id: str) -> int:
    """Let a sandbox reach nothing; return the port on loopback that its connections come to."""
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    port: int = tcp.getsockname()[1]
    policy = NetworkPolicy.parse("a.test")
    egress.serve(sandbox_id, policy, {}, None, [tcp.detach(), udp.detach()])
    return port


def refused(port: int) -> None:
    """Connect to what is at no address of the sandbox's own names."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(30)
        try:
            assert b"" == client.recv(1)
        except ConnectionResetError:
            pass


def test_only_a_sandbox_that_has_a_network_is_served(egress: Egress) -> None:
    serve(egress, ONE)

    egress.check(ONE)
    with pytest.raises(NetworkPolicyError, match="has no network"):
        egress.check(OTHER)


def test_events_are_told_of_the_one_sandbox_to_its_end(egress: Egress) -> None:
    ports = [serve(egress, each) for each in (ONE, OTHER)]
    egress.check(ONE)
    refused(ports[0])
    assert 1 == egress.totals(ONE)["refused"]
    assert 0 == egress.totals(OTHER)["refused"]

    assert [] == egress.drop(OTHER)
    assert [False] == [each.allowed for each in egress.drop(ONE)]
    assert [] == egress.drop(ONE)
    assert {} == egress._kinds
    with pytest.raises(NetworkPolicyError, match="has no network"):
        egress.check(ONE)


def test_what_ends_tls_is_started_where_a_policy_needs_it(egress: Egress) -> None:
    egress.expect(NetworkPolicy.parse("a.test"))
    assert [] == egress.processes
    egress.expect(NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),)))
    assert 1 == len(egress.processes)


def held() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    }


def _is_open(fd: str) -> bool:
    try:
        os.fstat(int(fd))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("fails", ["_line", "serve"])
def test_sockets_of_a_sandbox_that_nobody_can_serve_are_closed(
    egress: Egress, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Else its network would be kept, and whoever connects would wait."""
    serve(egress, ONE)
    egress.check(ONE)

    def fail(*_args: object, **_more: object) -> None:
        raise NetworkPolicyError("there is no process that could")

    if fails == "_line":
        monkeypatch.setattr(egress, "_line", fail)
    else:
        monkeypatch.setattr(Line, "_check", fail)
    before = held()
    with pytest.raises(NetworkPolicyError):
        serve(egress, OTHER)
    assert before == held()
    monkeypatch.undo()
    with pytest.raises(NetworkPolicyError):
        egress.check(OTHER)
    egress.check(ONE)


def test_a_change_that_is_refused_leaves_what_was_there_also_for_the_next_process(
    egress: Egress,
) -> None:
    """The settings are told again where the process is replaced."""
    serve(egress, ONE)
    egress.check(ONE)
    line = egress._lines["plain"]
    before = line.served(ONE)
    assert before is not None
    good = before.body
    bad = {**good, "policy": {**good["policy"], "mode": "unrestricted", "allowed_hosts": []}}

    with pytest.raises(NetworkPolicyError, match="was not applied"):
        line.change(bad)
    assert (good, "") == (before.body, before.refusal)
    egress.check(ONE)
    egress.change(ONE, NetworkPolicy.parse("b.test"), {}, None)
    assert ["b.test"] == before.body["policy"]["allowed_hosts"]

    with pytest.raises(NetworkPolicyError, match="no network"):
        line.change({**good, "id": OTHER})
    with pytest.raises(NetworkPolicyError, match="no network"):
        egress.change(OTHER, NetworkPolicy.parse("b.test"), {}, None)


def test_a_sandbox_that_is_served_anew_is_served_once(egress: Egress) -> None:
    """Its first sockets are closed with what they were for."""
    first = serve(egress, ONE)
    egress.check(ONE)
    second = serve(egress, ONE)
    egress.check(ONE)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first))
    refused(second)
    egress.drop(ONE)
    egress._lines["plain"].flush()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", second))


def test_a_policy_that_moves_to_another_process_leaves_the_first(egress: Egress) -> None:
    port = serve(egress, ONE)
    egress.check(ONE)
    refused(port)
    judged = NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),))
    authority = egress.make_authority(judged)
    egress.change(ONE, judged, {}, None, authority=authority)

    assert {"plain", "tls"} == {*egress._lines}
    assert egress._lines["plain"].served(ONE) is None
    egress.check(ONE)
    refused(port)
    assert 2 == egress.totals(ONE)["refused"], "what was before is still told"
    egress.drop(ONE)
    egress._lines["tls"].flush()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_move_that_is_refused_leaves_the_sandbox_where_it_was(egress: Egress) -> None:
    """Its sockets are not shut down: the process that had them still serves them."""
    port = serve(egress, ONE)
    egress.check(ONE)
    judged = NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),))
    for _ in range(2):
        with pytest.raises(NetworkPolicyError, match="was not applied"):
            egress.change(ONE, judged, {}, None, authority={"cert": "none", "key": "none"})
        assert egress._lines["tls"].served(ONE) is None
        assert "plain" == egress._kinds[ONE]
        egress.check(ONE)
        refused(port)
    assert 2 == egress.totals(ONE)["refused"]
    egress.change(ONE, judged, {}, None, authority=egress.make_authority(judged))
    egress.check(ONE)
    refused(port)
    assert 3 == egress.totals(ONE)["refused"]


def test_one_that_moved_is_told_of_as_before_and_moves_back(egress: Egress) -> None:
    """Its listener stays, its events keep their order, and connections into it go the way it went."""
    heard: list[NetworkEvent] = []
    port = serve(egress, ONE)
    egress.check(ONE)
    egress.listen(ONE, heard.append)
    refused(port)
    egress._lines["plain"].flush()
    judged = NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),))
    egress.change(ONE, judged, {}, None, authority=egress.make_authority(judged))
    moved = egress._lines["tls"].served(ONE)
    assert moved is not None
    assert not moved.is_move, "from now on its sockets are this process's alone"
    refused(port)
    egress.check(ONE)
    egress._lines["tls"].flush()
    assert 2 == len(heard)
    assert heard == egress.events(ONE)
    relayed(egress, ONE)
    assert "tls" == egress._kinds[ONE]

    egress.change(ONE, NetworkPolicy.parse("a.test"), {}, None)
    assert "plain" == egress._kinds[ONE]
    assert egress._lines["tls"].served(ONE) is None
    refused(port)
    egress._lines["plain"].flush()
    assert heard == egress.events(ONE)
    assert 3 == len(heard) == egress.totals(ONE)["refused"]
    relayed(egress, OTHER)
    assert "plain" == egress._kinds[OTHER], "one that may reach nothing is reached all the same"


def relayed(egress: Egress, sandbox_id: str) -> None:
    """Pass a few bytes from a client to a server inside, and close both."""
    pairs = [socket.socketpair() for _ in range(2)]
    (client, near), (server, far) = pairs
    try:
        egress.relay(sandbox_id, 80, near.fileno(), far.fileno())
        near.close()
        far.close()
        for sock in (client, server):
            sock.settimeout(30)
        client.sendall(b"hello")
        assert b"hello" == server.recv(5)
    finally:
        for sock in (client, near, server, far):
            sock.close()


TOKEN = bytes(range(16))


def reach(
    egress: Egress, policy: NetworkPolicy, said: bytes
) -> tuple[socket.socket, socket.socket]:
    """Serve a sandbox whose agent says where connections lead; one to a server of ours, and its other end."""
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    place, fds = tcp.getsockname(), [tcp.detach(), udp.detach()]
    egress.serve(ONE, policy, {}, None, fds, token=TOKEN.hex())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(place)
        leads = bytes(10) + b"\xff\xff" + socket.inet_aton("127.0.0.1")
        client.sendall(TOKEN + leads + listener.getsockname()[1].to_bytes(2, "big") + said)
        listener.settimeout(30)
        server, _ = listener.accept()
    for sock in (client, server):
        sock.settimeout(30)
    return client, server


def test_what_goes_on_is_told_after_what_was_and_counts_once_it_has_ended(egress: Egress) -> None:
    here = NetworkPolicy(allowed_hosts=("127.0.0.0/8",))
    client, server = reach(egress, here, b"out")
    with client, server:
        assert b"out" == server.recv(9)
        server.sendall(b"back")
        assert b"back" == client.recv(9)
        port = server.getsockname()[1]
        (going_on,) = egress.events(ONE)
        assert ("127.0.0.1", port, True, 3, 4) == (
            going_on.address,
            going_on.port,
            going_on.allowed,
            going_on.bytes_out,
            going_on.bytes_in,
        )
        assert ONE == going_on.sandbox_id
        assert [] == egress.events(OTHER)
        assert (0, 0) == (egress.totals(ONE)["allowed"], egress.totals(ONE)["bytes_in"])
        egress.change(ONE, here, {}, None, token=TOKEN.hex())
        server.sendall(b"more")
        assert b"more" == client.recv(9), "what is allowed as before goes on"
        egress.change(ONE, NetworkPolicy.parse("a.test"), {}, None, token=TOKEN.hex())
        with pytest.raises(ConnectionResetError):
            client.recv(9)
        (ended,) = egress.events(ONE)
        assert ("no longer allowed: ", 8) == (ended.reason[:19], ended.bytes_in)
        assert {"allowed": 1, "refused": 0, "missed": 0, "bytes_in": 8, "bytes_out": 3} == (
            egress.totals(ONE)
        )


def test_what_a_sandbox_had_open_is_cut_and_told_when_it_is_dropped(egress: Egress) -> None:
    client, server = reach(egress, NetworkPolicy(allowed_hosts=("127.0.0.0/8",)), b"out")
    with client, server:
        assert b"out" == server.recv(9)
        (ended,) = egress.drop(ONE)
        assert ("the sandbox is gone", 3) == (ended.reason, ended.bytes_out)
        with pytest.raises(ConnectionResetError):
            client.recv(9)
    assert [] == egress.events(ONE)
    assert dict.fromkeys(egress.totals(ONE), 0) == egress.totals(ONE)


def test_a_bound_of_bytes_is_set_and_changed(egress: Egress) -> None:
    here = NetworkPolicy(allowed_hosts=("127.0.0.0/8",))
    client, server = reach(egress, here, b"out")
    with client, server:
        assert b"out" == server.recv(9)
        egress.change(ONE, here, {}, 5, token=TOKEN.hex())
        client.sendall(b"morethan")
        heard = b""
        try:
            while more := server.recv(9):
                heard += more
        except ConnectionResetError:
            pass
        assert b"mo" == heard, "with those of before it is five"
        (ended,) = egress.events(ONE)
        assert ("used up its network bytes" in ended.reason, 5) == (True, ended.bytes_out)


def test_nobody_else_is_told_of_after_a_listener_was_taken_back(egress: Egress) -> None:
    heard: list[NetworkEvent] = []
    port = serve(egress, ONE)
    egress.check(ONE)
    egress.listen(OTHER, heard.append)
    for listener in (heard.append, None):
        egress.listen(ONE, listener)
        refused(port)
        egress.totals(ONE)
    assert 1 == len(heard)
    assert 2 == len(egress.events(ONE))


def test_what_is_dropped_while_its_process_is_replaced_is_dropped_by_the_next_one_too(
    egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is told of every sandbox that is known when it starts."""
    monkeypatch.setattr(line_module, "_LOOK_S", 0.05)
    ports = [serve(egress, each) for each in (ONE, OTHER)]
    line = egress._lines["plain"]
    line.flush()
    before = line.pid
    os.kill(before, signal.SIGSTOP)
    egress.drop(ONE)
    assert before != line.pid
    line.flush()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))
    egress.check(OTHER)
    refused(ports[1])
    assert "replaced" in line.fault


def test_a_certificate_authority_speaks_for_the_hosts_that_are_judged_and_no_others(
    egress: Egress,
) -> None:
    rules = (NetworkRule("a.test", methods=("GET",)), NetworkRule("b.test"))
    made = egress.make_authority(NetworkPolicy(rules=rules))
    certificate = x509.load_pem_x509_certificate(made["cert"].encode())
    permitted = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    assert {"a.test"} == {str(each.value) for each in permitted.permitted_subtrees or ()}


def test_a_forked_child_lets_go_of_what_is_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its networks would live as long as the child, and the process with them."""
    line: Any = Line.__new__(Line)
    (control, its_end), (kept, other) = (socket.socketpair() for _ in range(2))
    line._socket = wire.Socket(fileno=control.detach())
    line._served = {ONE: Served({}, [kept.detach()])}
    before = Egress()
    before._lines, before._kinds = {"plain": line}, {ONE: "plain"}
    monkeypatch.setattr(client_module, "_shared", before)
    monkeypatch.setattr(client_module, "_lock", client_module._lock)

    client_module._after_fork()

    for sock in (its_end, other):
        sock.settimeout(30)
        assert b"" == sock.recv(1)
        sock.close()
    assert ({}, {}) == (before._lines, before._kinds)
    assert client_module.shared() is not before
    monkeypatch.setattr(client_module, "_shared", None)


def test_a_forked_child_lets_go_of_its_parents_and_has_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents, let_go = Egress(), list[bool]()
    monkeypatch.setattr(parents, "abandon", lambda: let_go.append(True))
    monkeypatch.setattr(client, "_shared", parents)
    monkeypatch.setattr(client, "_lock", client._lock)
    assert parents is client.shared()

    with client._lock:  # as another thread of the parent may have it
        client._after_fork()
    assert [True] == let_go
    assert parents is not client.shared()
    monkeypatch.setattr(client, "_shared", parents)
    monkeypatch.setattr(parents, "owner", 1)
    assert parents is not client.shared()
