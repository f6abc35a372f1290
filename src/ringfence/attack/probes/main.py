"""Runs probes one by one, each in a process of its own, and prints one JSON line for each.

Standard input holds one JSON object: `context` (what was planted), `numbers` (system calls of this
machine) and `probes` (which to run).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

from . import (
    devices_proc,
    egress,
    files,
    hellos,
    identity,
    ipc,
    kit,
    leaks,
    lifecycle,
    network,
    resources,
    syscalls,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AREAS = (
    *(identity, files, devices_proc, syscalls, ipc, network, egress, hellos),
    *(resources, leaks, lifecycle),
)
_PATIENCE_MS = 5000


def main() -> None:
    inherited = _open_descriptors()
    request = json.load(sys.stdin)
    request["context"]["inherited"] = inherited
    kit.NUMBERS.update(request["numbers"])
    for id in request["probes"]:
        answer = json.dumps([id, *run_apart(kit.PROBES[id], request["context"])])
        os.write(1, answer.encode() + b"\n")


def copied() -> None:
    """`main`, in a child, once both were copied: it says that it waits for standard input."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.write(1, b"\n")
    main()


def _open_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # the descriptor that the directory was listed with
        found.append(int(name))
    return sorted(found)


def run_apart(probe: kit.Probe, context: dict[str, Any]) -> tuple[str, str]:
    """Run one probe in a child, so that what it does to itself, or what kills it, stays there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setpgid(0, 0)
        outcome = run(probe, context)
        os.write(write, json.dumps([outcome.status, outcome.evidence[:600]]).encode())
        os._exit(0)
    os.close(write)
    poll = select.poll()
    poll.register(read, select.POLLIN)
    said = os.read(read, 1 << 16) if poll.poll(_PATIENCE_MS) else b""
    os.close(read)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        # It may have no group of its own yet. Where it is gone, nothing happens.
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said:
        found, evidence = json.loads(said)
        return found, evidence
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return kit.HELD, "the system-call filter killed it (SIGSYS)"
    return kit.INCONCLUSIVE, f"ended without a word, wait status {status:#x}"


def run(probe: kit.Probe, context: dict[str, Any]) -> kit.Outcome:
    try:
        return probe.run(context)
    except OSError as exc:
        if exc.errno in kit.NO_SOCKET:
            return kit.held(f"no socket of that kind can be made: {exc.strerror}")
        return kit.inconclusive(f"{type(exc).__name__}: {exc}")
    except Exception as exc:  # noqa: BLE001  a broken probe must not pass for a closed door
        return kit.inconclusive(f"{type(exc).__name__}: {exc}")
