"""Makes a sandbox with one process of every kind, says where PID 1 is, and stays until told to go.

Run as a program it does so for the test, as another user: `python maker.py SOURCE READ_ONLY WRITABLE`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

THREADED = "import threading, time; threading.Thread(target=time.sleep, args=(6001,)).start(); time.sleep(6001)"
# PID 1 answers first that an exec has ended, and closes its socket then.
SETTLES_S = 0.2
PROGRAMS = {
    "threaded": ["/usr/bin/python3", "-I", "-S", "-c", THREADED],
    "terminal": ["sleep", "6002"],
    "fed": ["sleep", "6003"],
    "parent": ["sh", "-c", "setsid sleep 6004 & exec sleep 6005"],
}


def make(read_only: str, writable: str, *, claimed: bool = False, **options: Any) -> Any:
    """A sandbox, perhaps one that was built ahead; its processes are named by how long they sleep."""
    from ringfence import Mount, Sandbox, SandboxSpec
    from ringfence.backends.registry import backend_named

    names = (f"{read_only}:/mnt/read-only:ro", f"{writable}:/mnt/writable:rw")
    spec = SandboxSpec(mounts=tuple(Mount.parse(name) for name in names), **options)
    backend = backend_named("native")
    inner = backend.prewarm(SandboxSpec()).claim(spec) if claimed else backend.provision(spec)
    sandbox = Sandbox(inner, spec)
    sandbox.start(PROGRAMS["threaded"])
    sandbox.start(PROGRAMS["terminal"], pty=(24, 80))
    sandbox.start(PROGRAMS["fed"], stream_stdin=True)
    sandbox.start(PROGRAMS["parent"])
    script = (
        "import os, sys, time\n"
        "def begun():\n"
        "    words = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
        "    threads = sum(len(os.listdir(f'/proc/{p}/task')) for p in os.listdir('/proc') if p.isdigit())\n"
        "    return all(any(f'\\0600{n}\\0' in w for w in words) for n in (2, 3, 4, 5)) and threads >= 8\n"
        "end = time.monotonic() + 10\n"
        "while not begun() and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(not begun())"
    )
    assert sandbox.exec(["/usr/bin/python3", "-I", "-S", "-c", script]).ok
    return sandbox


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    is_claimed = "claimed" in sys.argv[4:]
    made = make(sys.argv[2], sys.argv[3], claimed=is_claimed, allow_degraded=("*",))
    time.sleep(SETTLES_S)
    print(json.dumps({"pid": made._inner.pid}), flush=True)
    sys.stdin.read()
    made.terminate()
