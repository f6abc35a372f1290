"""How a native sandbox's network is changed from outside, and how its servers are reached."""

from __future__ import annotations

import os
import select
import time

from ...errors import ConnectError
from ...model.base import checks
from ..local.agents.streams import reset_on_close
from ..local.network import SandboxNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from ...launcher.plan import NetworkPlan
    from .live import LiveSandbox

_CHANGE_S = 30.0
_DIAL_S = 10.0
_NAMESPACE = "/proc/self/ns/net"


class NativeNetwork(SandboxNetwork):
    _sandbox: LiveSandbox

    def _keep(self, sockets: list[int]) -> None:
        self._sandbox.backend.handover.change_network(self._sandbox, sockets)

    def _enter(self, plan: NetworkPlan) -> list[int]:
        sandbox = self._sandbox
        with sandbox.awake():
            _body, borrowed = sandbox.ask("open", _NAMESPACE, os.O_RDONLY, 0)
        try:
            borrowed += sandbox.borrow_namespaces()
            net_fd, user_fd = borrowed[:2]
            request = {"op": "network", "network": plan}
            _body, sockets = sandbox.zygote.ask(
                "enter", request, [user_fd, net_fd], timeout_s=_CHANGE_S
            )
        finally:
            for fd in borrowed:
                os.close(fd)
        return sockets

    # -- coming in --------------------------------------------------------------------------

    def dial(self, port: int) -> socket.socket:
        """A connection to a server inside, on 127.0.0.1 or ::1.

        Raises:
            ConnectError: Nothing accepts connections there.
        """
        checks.integer(port, "port", 1, 65535)
        self._sandbox.require_awake()
        deadline = time.monotonic() + _DIAL_S
        for version in (4, 6):
            sock = self._dial(version, port, deadline)
            if sock is not None:
                return sock
        raise ConnectError(
            f"no server in the sandbox accepts connections on port {port}",
            hint="the server must listen on 127.0.0.1, ::1 or all addresses",
            field="port",
        )

    def _dial(self, version: int, port: int, deadline: float) -> socket.socket | None:
        try:
            _body, [fd] = self._sandbox.ask("dial", version, port)
        except OSError:  # refused at once, or a kernel without IPv6
            return None
        import socket  # half a millisecond, which a run without connections need not pay

        sock = socket.socket(fileno=fd)
        try:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            in_time = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if in_time and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                sock.setblocking(True)
                return sock
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None

    def forward(self, port: int, client: socket.socket) -> None:
        """Join `client`, which is ours from then on, with a connection to a server inside.

        The egress process does it: data flows whatever this process does.

        Raises:
            ConnectError: Nothing accepts connections there; the client was reset.
        """
        try:
            with self.dial(port) as inside:
                self._known = True
                self._egress.relay(self._sandbox.id, port, client.fileno(), inside.fileno())
        except BaseException:
            reset_on_close(client)
            raise
        finally:
            client.close()
