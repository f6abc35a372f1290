"""Verification from the host of a hole that a probe reported inside, where the view may mislead.

Ids are shown as the parent namespace has them, which may be a launcher's and not the host's; and a
parent namespace may forbid what the child would allow.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ..model.capabilities import ENFORCED
from .lab import first_host_pid
from .probes.kit import Outcome, escaped, held, inconclusive
from .result import ESCAPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..sandbox.sync import Sandbox
    from .inside import Found

_BOUNDED_BY_PROCESSES = ("resources.inotify-instances", "resources.open-files")
_PATIENCE_S = 30
# Enters the user namespace of a process, and asks for one below it: 0 when there may be one, else the
# errno below a hundred that refused it; a hundred and more: it could not be entered.
_NEST = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
theirs, ours = (f"/proc/{pid}/ns/user" for pid in (sys.argv[1], "self"))
if os.readlink(theirs) != os.readlink(ours):
    if libc.setns(os.open(theirs, os.O_RDONLY), 0x10000000):
        sys.exit(100 + ctypes.get_errno())
if libc.unshare(0x10000000):
    sys.exit(ctypes.get_errno())
"""


def seen_from_the_host(sandbox: Sandbox, found: Found) -> Found:
    """The same, with the host's word where a probe inside cried out and the host can tell."""
    pid = first_host_pid(sandbox)
    if not pid:
        return found
    cried = [id for id, (status, _) in found.items() if status == ESCAPED]
    again = {id: _LOOKS[id](pid) for id in cried if id in _LOOKS}
    for id in cried:
        if id in _BOUNDED_BY_PROCESSES and (weaker := declared_weaker(sandbox, "pids_limit")):
            again[id] = inconclusive(f"{found[id][1]}; declared: {weaker}")
    return {**found, **{id: (said.status, said.evidence) for id, said in again.items()}}


def declared_weaker(sandbox: Sandbox, word: str) -> str:
    """Return the sandbox's own report of a limit that is not enforced; empty when it is enforced."""
    for protection in sandbox.protections():
        if word in protection.name and protection.status != ENFORCED:
            return f"{protection.name} {protection.status}: {protection.why}"
    return ""


def _ids(pid: int) -> Outcome:
    shown = []
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", encoding="ascii") as file:
            shown += [f"{name} {' '.join(line.split())}" for line in file]
    roots = [line for line in shown if line.split()[2] == "0"]
    return escaped(f"on the host: {roots[0]}") if roots else held(f"on the host: {shown[0]}")


def _nested(pid: int) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _NEST, str(pid)],
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=_PATIENCE_S,
    )
    if done.returncode == 0:
        return escaped("one can be made in its user namespace, but for the filter")
    if done.returncode >= 100:
        return escaped(f"the host may not look: {os.strerror(done.returncode - 100)}")
    return held(f"its user namespace allows none, even to the host: {os.strerror(done.returncode)}")


_LOOKS: dict[str, Callable[[int], Outcome]] = {
    "identity.not-host-root": _ids,
    "syscalls.namespaces-left": _nested,
}
