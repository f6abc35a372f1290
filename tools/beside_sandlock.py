"""Compare the backend landlock with sandlock: the time of one command, in turns, and what each lets through.

pip install sandlock; PYTHONPATH=src python tools/beside_sandlock.py
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import time
from typing import Any

import sandlock  # type: ignore[import-not-found]

from ringfence import Sandbox

TURNS = 11
READABLE = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/dev", "/proc"]
ATTEMPTS = """
import multiprocessing, os, resource, socket, sys
pid, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for name, do in {
    'stat a file of the host': lambda: os.stat('/etc/shadow'),
    'list a process of the host': lambda: os.listdir('/proc/1'),
    'signal one': lambda: os.kill(pid, 0),
    'read its limits': lambda: resource.prlimit(pid, resource.RLIMIT_CPU),
    'change the mode of a file of the host': lambda: os.chmod(path, 0o640),
    'take an abstract name': lambda: socket.socket(socket.AF_UNIX).bind('\\0ringfence-beside'),
    'connect to a server of the host': lambda: socket.create_connection(('127.0.0.1', port), 5),
    'use a semaphore': multiprocessing.Lock,
}.items():
    try:
        do()
        print(name + ': yes')
    except OSError as exc:
        print(f'{name}: no ({exc.strerror})')
"""


def by_sandlock(*argv: str) -> str:
    result: Any = sandlock.Sandbox(fs_readable=READABLE).run(list(argv))
    return bytes(result.stdout).decode()


def by_landlock(*argv: str) -> str:
    with Sandbox.create(backend="landlock") as sandbox:
        return sandbox.exec(argv).text


def main() -> None:
    times: dict[str, list[float]] = {"sandlock": [], "landlock": []}
    runs = {"sandlock": by_sandlock, "landlock": by_landlock}
    for _ in range(TURNS):
        for name, run in runs.items():
            began = time.perf_counter()
            run("/usr/bin/true")
            times[name].append((time.perf_counter() - began) * 1000)
    for name, found in times.items():
        print(f"{name}: {statistics.median(found[1:]):.1f} ms from create to end")
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.NamedTemporaryFile(dir="/var/tmp") as file,
    ):
        os.chmod(file.name, 0o644)
        arguments = (str(other.pid), str(server.getsockname()[1]), file.name)
        for name, run in runs.items():
            print(f"-- {name}\n{run('/usr/bin/python3', '-c', ATTEMPTS, *arguments)}")
        other.kill()


if __name__ == "__main__":
    main()
