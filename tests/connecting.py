"""Programs of the suite for `network`: one that connects, one that answers. They need Python inside.

`socket` and what is around it take four times as long to import as Python takes to start: seconds in a machine
whose processor is imitated.
"""

from __future__ import annotations

_PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")
_CLIENT = """
import _socket, sys
host, port, refused = sys.argv[1], int(sys.argv[2]), None
for family, kind, protocol, _, address in _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM):
    client = _socket.socket(family, kind, protocol)
    client.settimeout(5)
    try:
        client.connect(address)
        sys.exit(0)
    except OSError as exc:
        refused = exc
raise refused
"""
_SERVER = """
import _socket, sys
server = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
print("up", flush=True)
while True:
    number, _ = server._accept()
    client = _socket.socket(fileno=number)
    while data := client.recv(9999):
        client.sendall(data)
    client.close()
"""


class Connecting:
    """Comes first among the bases of a class of tests."""

    def connect_argv(self, host: str, port: int) -> tuple[str, ...]:
        return (*_PYTHON, _CLIENT, host, str(port))

    def serve_argv(self, port: int) -> tuple[str, ...]:
        return (*_PYTHON, _SERVER, str(port))
