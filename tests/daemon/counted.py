"""`ringfence serve` that says how many Python objects it has, to whoever connects to a unix socket.

    python -m tests.daemon.counted SOCKET serve --state-dir ...

Counted are those that the garbage collector knows, after it has collected.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading

from ringfence.cli.main import main


def answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            gc.collect()
            connection.sendall(b"%d" % len(gc.get_objects()))


def count(path: str) -> int:
    """What the daemon at the other end says."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        return int(connection.recv(64))


if __name__ == "__main__":
    made = socket.socket(socket.AF_UNIX)
    made.bind(sys.argv.pop(1))
    made.listen()
    threading.Thread(target=answer, args=(made,), daemon=True).start()
    sys.exit(main())
