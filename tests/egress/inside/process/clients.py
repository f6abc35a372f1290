"""Clients inside a sandbox that live longer than one request, told by the test what to do."""

from __future__ import annotations

from ringfence import Sandbox
from tests.egress.inside.asked import Asked

# Reads one JSON list a line: a function and its arguments; answers with one JSON value a line.
_SCRIPT = r"""
import errno, json, socket, sys
open_sockets = {}
def name_of(exc):
    return errno.errorcode.get(exc.errno, str(exc)) if isinstance(exc, OSError) and exc.errno else str(exc)
def connect(key, host, port, patience_s=20.0):
    open_sockets[key] = socket.create_connection((host, port), patience_s)
    return True
def send(key, text):
    open_sockets[key].sendall(text.encode("latin-1"))
    return len(text)
def receive(key, most=65536, patience_s=20.0):
    open_sockets[key].settimeout(patience_s)
    return open_sockets[key].recv(most).decode("latin-1")
def drain(key, least, patience_s=20.0):
    open_sockets[key].settimeout(patience_s)
    got = 0
    while got < least:
        piece = open_sockets[key].recv(1 << 20)
        if not piece:
            break
        got += len(piece)
    return got
def close(key):
    open_sockets.pop(key).close()
    return True
for line in sys.stdin:
    function, arguments = json.loads(line)
    try:
        answer = globals()[function](**arguments)
    except OSError as exc:
        answer = {"error": name_of(exc)}
    except KeyError:
        answer = {"error": "never connected"}
    print(json.dumps(answer), flush=True)
"""


class Client(Asked):
    """One process inside, which keeps connections by name. A context manager."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox, "python3", "-c", _SCRIPT)
