"""What a sandbox can reach: what it was given, or a refusal."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from ...model import capabilities as can
from ...model.network import NetworkPolicy
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..lab import Lab
    from .base import MakeSandbox


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

    @needs(can.NETWORK_NONE, can.NETWORK_CHANGE)
    def test_the_policy_changes_while_running(self, sandbox: Lab) -> None:
        process = sandbox.start("cat", stream_stdin=True)

        sandbox.sandbox.apply_network_policy(NetworkPolicy.none())

        assert b"x" == sandbox.finish(process, stdin=b"x").stdout

    @needs(can.NETWORK_HOSTS, can.NETWORK_CHANGE)
    def test_the_policy_changes_to_hosts(self, sandbox: Lab) -> None:
        sandbox.sandbox.apply_network_policy(NetworkPolicy.parse("example.com:443"))

        assert sandbox.run("true").ok
