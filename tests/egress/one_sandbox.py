"""Sandbox of an egress process, and its client and servers, in one process.

Where a client meant to go is told by the test instead of the kernel, and so is which server is behind
a name.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from ringfence import NetworkPolicy
from ringfence.egress import reach
from ringfence.egress import sandbox as sandboxes
from ringfence.egress.commons import Commons
from ringfence.egress.dns.resolve import Found, Resolver
from ringfence.egress.io.loop import Loop, sleep
from ringfence.egress.io.streams import prepare
from ringfence.egress.sandbox import Sandbox


class Scene:
    """One sandbox with one client, and what came to whichever server was dialled."""

    def __init__(self, policy: NetworkPolicy) -> None:
        self.loop = Loop()
        self.meant: tuple[bytes, int] = (b"", 0)
        self.told: list[dict[str, Any]] = []
        self.dialled: list[tuple[str, int]] = []
        self._servers: list[socket.socket] = []
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(reach, "connect", self._connect)
        self._patch.setattr(sandboxes, "destination", lambda *_: self.meant)
        self.commons = Commons(self.loop, self._tell, resolver=Resolver(self.loop, self._look_up))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sandbox = Sandbox(
            self.commons,
            "sbx-1",
            self._settings(policy),
            self._listener.dup(),
            self._datagrams.dup(),
        )
        self._name = self.sandbox.names.addresses("a.test")[0]

    @staticmethod
    def _settings(policy: NetworkPolicy, **secrets: str) -> dict[str, Any]:
        return {"policy": policy.to_json(), "secrets": secrets, "network_bytes": None, "ca": None}

    def change(self, policy: NetworkPolicy, **secrets: str) -> None:
        self.sandbox.apply(self._settings(policy, **secrets))

    def answer(self, data: bytes) -> None:
        """Let the server that was dialled last say it, once one was."""
        while not self._servers:
            self.settle()
        self._servers[-1].sendall(data)
        self.settle()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Everything on record by now."""
        self.commons.record.flush()
        return [event for message in self.told for event in message.get("events", ())]

    def begin(self, port: int, data: bytes) -> socket.socket:
        """Say it at the name's address, and return the client's end once the sandbox waits for more."""
        self.meant = self._name, port
        client = socket.create_connection(self._listener.getsockname())
        client.settimeout(30)
        client.sendall(data)
        self.settle()
        return client

    def settle(self) -> None:
        """Let the sandbox do all that it can do now."""
        self.loop.run_until_done(sleep(0.02))

    def _tell(self, message: dict[str, Any]) -> bool:
        self.told.append(message)
        return True

    @staticmethod
    def _look_up(_name: str) -> Found:
        return ((socket.AF_INET, "127.0.0.1"),)

    async def _connect(self, places: list[tuple[int, str]], port: int) -> tuple[socket.socket, str]:
        self.dialled.append((places[0][1], port))
        ours, theirs = socket.socketpair()
        prepare(ours)
        theirs.setblocking(False)
        self._servers.append(theirs)
        return ours, places[0][1]

    def say(self, port: int, pieces: list[bytes], *, to: bytes = b"") -> bytes:
        """Say it, end, and wait until all is over; returns what the server heard."""
        self.meant = (to or self._name), port
        heard = bytearray()
        client = socket.create_connection(self._listener.getsockname())
        client.setblocking(False)
        try:
            for piece in pieces:
                try:
                    client.send(piece)
                except OSError:
                    break
                for _ in range(3):
                    self.loop.run_until_done(sleep(0))
                heard += self._hear()
            try:
                client.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            until = time.monotonic() + 30  # a thread looks names up, and may have to wait
            while time.monotonic() < until:
                self.loop.run_until_done(sleep(0.001))
                heard += self._hear()
                self._answer()
                if not self.sandbox.connections:
                    return bytes(heard)
            raise AssertionError("it does not end")
        finally:
            client.close()

    def _hear(self) -> bytes:
        heard = b""
        for server in self._servers:
            try:
                heard += server.recv(1 << 20)
            except OSError:
                pass
        return heard

    def _answer(self) -> None:
        for server in self._servers:
            try:
                server.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def close(self) -> None:
        self.sandbox.close()
        if self.sandbox.connections:
            self.settle()  # they end in the next turn
        self.commons.close()
        self.loop.close()
        self._patch.undo()
        for sock in (self._listener, self._datagrams, *self._servers):
            sock.close()
