"""Makes a sandbox with one process of every kind, says where PID 1 is, and stays until told to go.

Run as a program it does so for the test, as another user:
`python maker.py SOURCE READ_ONLY WRITABLE WAY [PROFILE]`.
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


def make(read_only: str, writable: str, way: str = "new", **options: Any) -> Any:
    """A sandbox with processes that are named by how long they sleep.

    Args:
        writable: Empty for none, where a root of its own must not have one.
        way: `claimed` is one of a pool. What ends in `limited` may reach a host. In one that is `idle`
            nothing runs. In a `copied` one, two processes began in the sandbox that it is a fork of.
    """
    from ringfence import Mount, NetworkPolicy, Sandbox, SandboxSpec
    from ringfence.backends.registry import backend_named

    names = [f"{read_only}:/mnt/read-only:ro"]
    if writable:
        names.append(f"{writable}:/mnt/writable:rw")
    if way.endswith("limited"):
        options["network"] = NetworkPolicy.parse("example.com:443")
    spec = SandboxSpec(mounts=tuple(Mount.parse(name) for name in names), **options)
    backend = backend_named("native")
    if way.startswith("claimed"):
        sandbox = Sandbox(backend.prewarm(SandboxSpec(profile=spec.profile)).claim(spec), spec)
    else:
        sandbox = Sandbox.create(spec)
    if "idle" == way:
        return sandbox
    sandbox.start(PROGRAMS["threaded"])
    sandbox.start(PROGRAMS["fed"], stream_stdin=True)
    if "copied" == way:
        sandbox = forked(sandbox)
    sandbox.start(PROGRAMS["terminal"], pty=(24, 80))
    sandbox.start(PROGRAMS["parent"])
    script = (
        "import os, sys, time\n"
        "def begun():\n"
        "    words = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
        "    threads = sum(len(os.listdir(f'/proc/{p}/task')) for p in os.listdir('/proc') if p.isdigit())\n"
        "    return all(any(f'\\0600{n}\\0' in w for w in words) for n in (2, 3, 4, 5)) and threads >= 8\n"
        "end = time.monotonic() + 60\n"
        "while not begun() and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(not begun())"
    )
    assert sandbox.exec(["/usr/bin/python3", "-I", "-S", "-c", script]).ok
    return sandbox


def forked(source: Any) -> Any:
    """A fork in which both processes go on; the source ends."""
    both = "set -- /proc/[0-9]*/task/*; until test $# -ge 5; do sleep 0.01; set -- /proc/[0-9]*/task/*; done"
    assert source.exec(["sh", "-c", both], timeout_s=60).ok
    (made,) = source.fork(processes="required")
    source.terminate()
    return made


def start_others(sandbox: Any) -> None:
    """Two programs of other users, each watched by an agent of that user."""
    sandbox.start(["sleep", "6006"], user="root")
    sandbox.start(["sleep", "6007"], user="nobody")
    for number in ("006", "007"):  # what looks for them does not find itself
        look = f"until grep -q '[6]{number}' /proc/*/cmdline; do sleep 0.01; done"
        assert sandbox.exec(["sh", "-c", look], timeout_s=60).ok


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    read_only_, writable_, way_, *profile = sys.argv[2:]
    made = make(
        read_only_, writable_, way_, allow_degraded=("*",), profile=(profile or ["os_hardened"])[0]
    )
    if profile:
        start_others(made)
    time.sleep(SETTLES_S)
    print(json.dumps({"pid": made._inner.pid}), flush=True)
    sys.stdin.read()
    made.terminate()
