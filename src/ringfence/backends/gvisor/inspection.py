"""Kernel facts: the host's about gVisor's processes, the guest's about the guest. Decides nothing."""

from __future__ import annotations

import os
from dataclasses import replace

from ...model.limits import Limits
from ..local.agents import guest_granted
from ..local.agents.inside import descendants, status_of
from ..local.host.mountinfo import MountLine, read_text
from ..local.host.readback import cpu_limit
from ..local.netns import NetworkTables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.granted import SandboxCapabilities
    from .sandbox import GvisorSandbox


class HostProcess:
    """A process of gVisor's: proc_pid_status(5)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = status_of(pid)
        self.command = read_text(f"/proc/{pid}/cmdline").split("\0")

    @property
    def uid(self) -> int:
        """Its effective id on the host."""
        return int(self.status["Uid"].split()[1])

    @property
    def is_filtered(self) -> bool:
        """True if every thread is under a system-call filter."""
        threads = os.listdir(f"/proc/{self.pid}/task")
        texts = [read_text(f"/proc/{self.pid}/task/{thread}/status") for thread in threads]
        return all("\nSeccomp:\t2\n" in text for text in texts)

    def shares(self, namespace: str) -> bool:
        theirs = os.readlink(f"/proc/{self.pid}/ns/{namespace}")
        return theirs == os.readlink(f"/proc/self/ns/{namespace}")

    @property
    def interfaces(self) -> list[str]:
        return self.network.interfaces

    @property
    def network(self) -> NetworkTables:
        return NetworkTables(lambda name: read_text(f"/proc/{self.pid}/net/{name}"))

    def has_same(self, namespace: str, other: HostProcess) -> bool:
        places = [os.readlink(f"/proc/{pid}/ns/{namespace}") for pid in (self.pid, other.pid)]
        return places[0] == places[1]


class Inspection:
    """Readings of one live sandbox, each taken once.

    Attributes:
        launcher: The jail's PID 1, `runsc run`, which no guest can speak to.
        server: Who serves the guest's files: the gofer.
        kernel: The guest's kernel, the sentry, and what it runs the guest's processes in.
    """

    def __init__(self, sandbox: GvisorSandbox) -> None:
        self.sandbox = sandbox
        self.launcher = HostProcess(sandbox.pid)
        self.server: list[HostProcess] = []
        self.kernel: list[HostProcess] = []
        for pid in descendants(sandbox.pid):
            try:
                process = HostProcess(pid)
            except OSError:
                continue  # a process of the guest's that has just ended
            is_server = process.command[0].endswith("-gofer")
            (self.server if is_server else self.kernel).append(process)
        words = sandbox.ask("bounds")[0].split()
        self.pids, self.open_files, self.disk_bytes, self.inodes = map(int, words)

    @property
    def mounts(self) -> list[MountLine]:
        """Every mount of the jail."""
        lines = read_text(f"/proc/{self.sandbox.pid}/mountinfo").splitlines()
        return [MountLine(line) for line in lines]

    @property
    def host_ids(self) -> list[tuple[int, int]]:
        """(first, count) of the host ids that the jail has."""
        rows = [line.split() for line in self._id_map.splitlines()]
        return [(int(first), int(count)) for _inside, first, count in rows]

    @property
    def _id_map(self) -> str:
        return read_text(f"/proc/{self.sandbox.pid}/uid_map")

    def inside(self, path: str) -> str:
        """The text of a file as the guest's user sees it."""
        with self.sandbox.files.open_read(path) as file:
            return file.read().decode("utf-8", "replace")


def granted(sandbox: GvisorSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    asked_inside = guest_granted.granted(sandbox)
    seen, asked = Inspection(sandbox), sandbox.spec.limits
    return replace(
        asked_inside,
        limits=Limits(
            wall_time_s=asked.wall_time_s,
            cpus=cpu_limit(sandbox.group),
            memory_bytes=sandbox.sizes.memory_bytes,
            pids=seen.pids,
            disk_bytes=seen.disk_bytes,
            inodes=seen.inodes,
            open_files=seen.open_files,
            output_bytes=asked.output_bytes,
        ),
        syscall_filter_active=all(process.is_filtered for process in seen.kernel),
    )
