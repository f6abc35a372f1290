"""Programs of the suite for `network`: one that connects, one that answers. They need Python inside."""

from __future__ import annotations

_SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    client, _ = server.accept()
    while data := client.recv(9999):
        client.sendall(data)
    client.close()
"""


class Connecting:
    """Comes first among the bases of a class of tests."""

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=5)"
        return ("/usr/bin/python3", "-c", code)

    def serve_argv(self, port: int) -> tuple[str, ...]:
        return ("/usr/bin/python3", "-c", _SERVER, str(port))
