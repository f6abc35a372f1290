"""Cgroups of ours around a launcher: what it starts is born in them, whatever it does itself."""

from __future__ import annotations

import os
import subprocess

from ...errors import IsolationError
from ...launcher import cgroups as launcher_cgroups
from ..local.host import cgroups
from ..local.host.facts import host
from ..local.host.mountinfo import read_text
from ..local.sizes import sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...model.spec import SandboxSpec

LEAST_MEMORY = (32 << 20, "the agent lives in it too")
_SHELL = "/bin/sh"
_WAITS = 'read -r _ <&1; exec "$@" >&2'  # its shells know numbers of one digit
_OWN_PROCESSES = 1  # the launcher's, besides PID 1


def held(layout: cgroups.Layout) -> tuple[str, ...]:
    """Which limits can be had, by their names in `Limits`.

    Without a cgroup the agent samples memory and processes; a fork bomb is faster than that.
    """
    if not layout.version:
        return ("memory_bytes",)
    return ("memory_bytes", "pids", *(("cpus",) if layout.has("cpu") else ()))


def make(group: cgroups.Group, spec: SandboxSpec) -> None:
    """Make the group, with the limits of the spec.

    Raises:
        OSError: A limit cannot be set.
    """
    size = sizes(spec, host())
    pids = size.pids + _OWN_PROCESSES
    launcher_cgroups.make(group.directories, group.values(spec.limits, size.memory_bytes, pids))


def join(group: cgroups.Group, pid: int) -> None:
    """Move a process into the group. Precondition: it has no children yet."""
    for directory in group.directories:
        launcher_cgroups.write(f"{directory}/cgroup.procs", str(pid))


def start(
    group: cgroups.Group, spec: SandboxSpec, argv: Sequence[str], /, **how: Any
) -> subprocess.Popen[bytes]:
    """A process that is in the group before it is the launcher.

    Args:
        how: As for Popen; its standard output is its standard error.

    Raises:
        OSError: It does not start, or a limit cannot be set.
    """
    make(group, spec)
    read, write = os.pipe2(os.O_CLOEXEC)
    process: subprocess.Popen[bytes] | None = None
    try:
        # Nothing may run between a fork and its exec in a process that has threads: so a shell waits.
        waits = [_SHELL, "-c", _WAITS, _SHELL]
        process = subprocess.Popen([*waits, *argv], stdout=read, **how)
        join(group, process.pid)
        os.write(write, b"\n")
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        launcher_cgroups.remove(group.directories)
        raise
    finally:
        os.close(read)
        os.close(write)
    return process


def check(group: cgroups.Group, pid: int) -> None:
    """See that what was started has stayed there.

    Raises:
        IsolationError: Somebody has moved it: no limit would hold.
    """
    found = read_text(f"/proc/{pid}/cgroup").splitlines()
    # A launcher may make a cgroup below, as LXC does: all limits of ours hold there too.
    ours = f"/{os.path.basename(group.directories[0])}/"
    joined = [line for line in found if ours in f"{line}/"]
    if len(joined) < len(group.directories):
        raise IsolationError(
            "the launcher, or a supervisor of it, left the cgroup that it was started in",
            hint="use a launcher that starts its programs itself",
        )
