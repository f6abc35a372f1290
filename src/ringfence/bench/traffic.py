"""Two small programs that make traffic: a server on the host, and the client that is sent inside.

Both run as `python3 -c SOURCE WORDS...` in processes of their own, the same for every contender, and
the client does its own timing: what is measured is the way, never the starting of anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

# First byte of a connection: `e` says each byte back, `s` and a length sends so much, `d` and a
# length takes so much and then says one byte. The echo is answered by the accepting thread.
_SERVER = """
import selectors, socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
selector = selectors.DefaultSelector()
selector.register(listener, selectors.EVENT_READ)
zeros, sink = memoryview(bytes(1 << 20)), memoryview(bytearray(1 << 20))

def stream(sock, verb):
    try:
        sock.setblocking(True)
        left = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
        while left > 0:
            left -= sock.send(zeros[:left]) if verb == b"s" else sock.recv_into(sink) or left
        if verb == b"d":
            sock.sendall(b".")
        sock.recv(1)
    except OSError:
        pass
    sock.close()

while True:
    for key, _ in selector.select():
        sock = key.fileobj
        if sock is listener:
            sock = listener.accept()[0]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ)
            continue
        try:
            said = sock.recv(1)
        except OSError:
            said = b""
        if said == b"e":
            sock.send(b"e")
            continue
        selector.unregister(sock)
        if said in (b"s", b"d"):
            threading.Thread(target=stream, args=(sock, said), daemon=True).start()
        else:
            sock.close()
"""

_CLIENT = """
import base64, json, os, selectors, socket, sys, time, urllib.parse
verb, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
clock = time.perf_counter
via = os.environ.get("TRAFFIC_PROXY") and os.environ.get("HTTP_PROXY")
proxy = urllib.parse.urlsplit(via) if via else None

def connect():
    if proxy is None:
        sock = socket.create_connection((host, port), 30)
    else:
        sock = socket.create_connection((proxy.hostname, proxy.port), 30)
        who = urllib.parse.unquote(f"{proxy.username or ''}:{proxy.password or ''}")
        word = base64.b64encode(who.encode()).decode()
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n"
                     f"Proxy-Authorization: Basic {word}\\r\\n\\r\\n".encode())
        said = b""
        while not said.endswith(b"\\r\\n\\r\\n"):
            said += sock.recv(1) or sys.exit("the proxy closed")
        if b" 200" not in said[:16]:
            sys.exit(said.decode(errors="replace"))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock

def connections():
    taken = []
    for _ in range(count):
        started = clock()
        sock = connect()
        sock.sendall(b"e")
        if sock.recv(1) != b"e":
            sys.exit("no echo")
        taken.append(clock() - started)
        sock.close()
    return sorted(taken)

def down():
    sock, buffer, left = connect(), bytearray(1 << 20), count
    started = clock()
    sock.sendall(b"s" + count.to_bytes(8, "big"))
    while left:
        got = sock.recv_into(buffer)
        if not got:
            sys.exit("the stream ended early")
        left -= got
    return [clock() - started]

def up():
    sock, zeros, left = connect(), memoryview(bytes(1 << 20)), count
    started = clock()
    sock.sendall(b"d" + count.to_bytes(8, "big"))
    while left:
        left -= sock.send(zeros[:left])
    if sock.recv(1) != b".":
        sys.exit("the stream ended early")
    return [clock() - started]

def many():
    selector, buffer, taken, size = selectors.DefaultSelector(), bytearray(1 << 18), [], int(sys.argv[5])
    socks = [connect() for _ in range(count)]
    left = {}
    started = clock()
    for sock in socks:
        sock.sendall(b"s" + size.to_bytes(8, "big"))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        left[sock] = size
    while left:
        ready = selector.select(60) or sys.exit("the streams stand still")
        for key, _ in ready:
            sock = key.fileobj
            got = sock.recv_into(buffer)
            if not got:
                sys.exit("a stream ended early")
            left[sock] -= got
            if not left[sock]:
                taken.append(clock() - started)
                selector.unregister(sock)
                del left[sock]
    return sorted(taken)

print(json.dumps(globals()[verb]()), flush=True)
"""


class Server:
    """The server on the host's loopback; a context manager.

    Attributes:
        port: Where it listens.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def client(verb: str, host: str, port: int, *counts: int, python: str = "python3") -> list[str]:
    """The command that makes traffic and prints its seconds, sorted, as a JSON list.

    Args:
        verb: `connections` COUNT, `down` BYTES, `up` BYTES, or `many` STREAMS BYTES-of-each.
    """
    return [python, "-S", "-c", _CLIENT, verb, host, str(port), *map(str, counts)]


def seconds(output: bytes) -> list[float]:
    found: Any = json.loads(output.splitlines()[-1])
    return [float(each) for each in found]


def quantile(ordered: Sequence[float], part: float) -> float:
    """Of sorted values, the one below which `part` of them lie."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
