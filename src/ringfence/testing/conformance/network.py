"""Network of a sandbox: allowed destinations are reached, all others refused."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from ...errors import ConnectError
from ...model import capabilities as can
from ...model.net.network import NetworkPolicy
from ..lab import Lab
from ..running import read_until
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...backends.protocol import Backend
    from .base import MakeSandbox

_PORT = 8080


class Network(ConformanceBase):
    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        """A server of the host's, on its loopback."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server

    def _connect(self, lab: Lab, server: socket.socket) -> bool:
        argv = self.connect_argv("127.0.0.1", server.getsockname()[1])
        if argv is None:
            pytest.skip("the sandbox has no program that connects")
        return lab.run(*argv).ok

    @needs(can.NETWORK_NONE)
    def test_no_network_is_the_default(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        """The host's own loopback is the nearest thing to reach."""
        lab = make_sandbox()

        assert not self._connect(lab, listener)

    @needs(can.NETWORK_UNRESTRICTED)
    def test_unrestricted_reaches_the_host(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        """The control of the test above: the same probe succeeds without the protection."""
        lab = make_sandbox(network=NetworkPolicy.unrestricted())

        assert self._connect(lab, listener)

    @needs(can.NETWORK_HOSTS)
    def test_a_list_of_hosts_is_enforced(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        lab = make_sandbox(network=NetworkPolicy.parse("example.com"))

        assert not self._connect(lab, listener)

    @needs(can.NETWORK_HOSTS)
    def test_what_a_rule_names_is_reached(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        """The control of the test above; a service of the host's own must be named to the port."""
        lab = make_sandbox(network=NetworkPolicy.parse(_named(listener)))

        assert self._connect(lab, listener)

    @needs(can.NETWORK_HOSTS)
    def test_every_decision_is_on_record(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        lab = make_sandbox(network=NetworkPolicy.parse(_named(listener)))
        assert [] == lab.sandbox.network_log()
        self._connect(lab, listener)
        listener.accept()[0].close()

        # A connection is told of when it has ended, at the latest because its sandbox has.
        lab.sandbox.terminate()
        events = lab.sandbox.network_log()

        assert [("127.0.0.1", listener.getsockname()[1], True)] == [
            (event.address, event.port, event.allowed) for event in events
        ]

    @needs(can.NETWORK_NONE, can.NETWORK_CHANGE)
    def test_the_policy_changes_while_running(self, sandbox: Lab) -> None:
        process = sandbox.start("cat", stream_stdin=True)

        sandbox.sandbox.apply_network_policy(NetworkPolicy.none())

        assert b"x" == sandbox.finish(process, stdin=b"x").stdout

    @needs(can.NETWORK_OPEN, can.NETWORK_HOSTS, can.NETWORK_CHANGE)
    def test_the_policy_changes_to_hosts_and_back(
        self, sandbox: Lab, listener: socket.socket
    ) -> None:
        self._change_there_and_back(sandbox, listener)

    @needs(can.NETWORK_HOSTS, can.NETWORK_CHANGE)
    def test_a_list_of_hosts_becomes_another_and_none_and_another(
        self, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        lab = make_sandbox(network=NetworkPolicy.parse("example.com"))
        assert not self._connect(lab, listener)

        self._change_there_and_back(lab, listener)
        self._change_there_and_back(lab, listener)

    def _change_there_and_back(self, lab: Lab, listener: socket.socket) -> None:
        policy = NetworkPolicy.parse(_named(listener))
        lab.sandbox.apply_network_policy(policy)

        assert policy == lab.sandbox.spec.network
        assert self._connect(lab, listener)

        lab.sandbox.apply_network_policy(NetworkPolicy.none())
        assert not self._connect(lab, listener)

    @needs(can.NETWORK_HOSTS, can.SNAPSHOT, can.RESTORE)
    def test_a_snapshot_comes_back_with_its_policy(
        self, backend: Backend, make_sandbox: MakeSandbox, listener: socket.socket
    ) -> None:
        policy = NetworkPolicy.parse(_named(listener))
        snapshot = make_sandbox(network=policy).sandbox.snapshot({})
        lab = Lab(backend.restore(snapshot.id), self.patience_s)

        try:
            assert policy == lab.sandbox.spec.network
            assert self._connect(lab, listener)
        finally:
            lab.close()
            backend.delete_snapshot(snapshot.id)

    # -- into the sandbox -------------------------------------------------------------------

    @needs(can.CONNECT)
    def test_a_server_inside_is_reached(self, sandbox: Lab) -> None:
        argv = self.serve_argv(_PORT)
        if argv is None:
            sandbox.sandbox.connect(_PORT)
            pytest.skip("the sandbox has no program that serves")
        read_until(sandbox.start(*argv).stdout, b"up", self.patience_s)

        with sandbox.sandbox.connect(_PORT) as sock:
            sock.settimeout(self.patience_s)
            sock.sendall(b"from outside")

            assert b"from outside" == sock.recv(99)

    @needs(can.CONNECT)
    def test_where_nobody_listens(self, sandbox: Lab) -> None:
        with pytest.raises(ConnectError):
            sandbox.sandbox.connect(_PORT)

        assert sandbox.run("true").ok


def _named(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"
