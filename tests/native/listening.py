"""Stands in for the egress process: takes a sandbox's sockets, and lets the test accept on them."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Mapping

from ringfence import NetworkPolicy
from ringfence.egress.host.client import Egress
from ringfence.model.net.netlog import NetworkEvent

SO_ORIGINAL_DST = 80  # include/uapi/linux/netfilter_ipv4.h; IP6T_SO_ORIGINAL_DST is the same
PATIENCE_S = 60.0


class Listening(Egress):
    """Decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.served: dict[str, tuple[NetworkPolicy, Mapping[str, str], int | None]] = {}
        self.sockets: dict[str, tuple[socket.socket, socket.socket]] = {}
        self.said: list[tuple[str, str]] = []
        self.fails: set[str] = set()
        self.missing: list[str] = []
        self.threads: list[threading.Thread] = []

    def _say(self, verb: str, sandbox_id: str) -> None:
        self.said.append((verb, sandbox_id))
        if verb in self.fails:
            raise OSError(f"no {verb} today")

    def serve(
        self,
        sandbox_id: str,
        policy: NetworkPolicy,
        secrets: Mapping[str, str],
        network_bytes: int | None,
        listeners: list[int],
        *,
        authority: Mapping[str, str] | None = None,
        token: str = "",
    ) -> None:
        tcp, udp = (socket.socket(fileno=fd) for fd in listeners)
        try:
            self._say("serve", sandbox_id)
        except BaseException:
            tcp.close()
            udp.close()
            raise
        self.served[sandbox_id] = (policy, secrets, network_bytes)
        for sock in (tcp, udp):
            sock.settimeout(PATIENCE_S)
        self.sockets[sandbox_id] = (tcp, udp)

    def change(
        self,
        sandbox_id: str,
        policy: NetworkPolicy,
        secrets: Mapping[str, str],
        network_bytes: int | None,
        *,
        authority: Mapping[str, str] | None = None,
        token: str = "",
    ) -> None:
        self._say("change", sandbox_id)
        self.served[sandbox_id] = (policy, secrets, network_bytes)

    def drop(self, sandbox_id: str) -> list[NetworkEvent]:
        self._say("drop", sandbox_id)
        self.served.pop(sandbox_id, None)
        for sock in self.sockets.pop(sandbox_id, ()):
            sock.close()
        return []

    def relay(self, sandbox_id: str, port: int, client: int, server: int) -> None:
        self._say("relay", sandbox_id)
        ends = [socket.socket(fileno=os.dup(fd)) for fd in (client, server)]
        for one, other in (ends, reversed(ends)):
            thread = threading.Thread(target=_pump, args=(one, other), daemon=True)
            thread.start()
            self.threads.append(thread)

    def events(self, sandbox_id: str) -> list[NetworkEvent]:
        self._say("events", sandbox_id)
        return []

    def check(self, sandbox_id: str) -> list[str]:
        self._say("check", sandbox_id)
        return self.missing

    def close(self) -> None:
        for sandbox_id in list(self.sockets):
            self.drop(sandbox_id)
        for thread in self.threads:
            thread.join(PATIENCE_S)


def _pump(one: socket.socket, other: socket.socket) -> None:
    while data := one.recv(1 << 16):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)


def original(sock: socket.socket) -> tuple[str, int] | None:
    """Where the client of an accepted connection wanted to go; None: to the listener itself."""
    mapped = ipaddress.IPv6Address(sock.getpeername()[0]).ipv4_mapped is not None
    level, size = (socket.SOL_IP, 16) if mapped else (socket.IPPROTO_IPV6, 28)
    try:
        found = sock.getsockopt(level, SO_ORIGINAL_DST, size)
    except FileNotFoundError:
        return None
    port = int.from_bytes(found[2:4], "big")
    return str(ipaddress.ip_address(found[4:8] if mapped else found[8:24])), port
