"""Far hosts: the connection, the confinement there, and the protections readable through the
agent.
"""

from __future__ import annotations

import shlex
import shutil

from ...errors import BackendUnavailable, RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents import posture
from ..local.agents.agents import wants_filter
from ..local.agents.guest_granted import status_of_agent
from ..local.agents.posture_inside import of_isolation
from ..local.reports import read_or_last, unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import Any

    from .stream import StreamBackend, StreamSandbox
else:
    from ...model.base.record import dataclass

_CAN = (can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, can.PTY, can.CONNECT, can.OPEN_FILES_LIMIT)
_ELSEWHERE = "the sandbox is on another host, which has none of this one's files"
_NO_RULES = "the far host does not go through the egress engine"
_NO_CGROUP = "none: Ringfence has no cgroup on the far host"
_NOBODY = "not available on the far host"
_CANNOT = {
    **dict.fromkeys((can.MOUNT, can.ATTACH, can.PROTECTED_PATHS, can.DENIED_PATHS), _ELSEWHERE),
    **dict.fromkeys((can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN), _NO_RULES),
    **dict.fromkeys((can.NETWORK_LIMIT, can.SECRETS), _NO_RULES),
    can.NETWORK_UNRESTRICTED: "it gets no network of the far host's",
    **dict.fromkeys((can.SUSPEND, can.RESUME, can.SUSPEND_ON_IDLE), _NOBODY),
    **dict.fromkeys((can.SNAPSHOT, can.RESTORE, can.MEMORY_SNAPSHOT, can.FORK), _NOBODY),
    can.PREWARM: _NOBODY,
    can.IMAGE: "the far host's programs are shown",
    can.GPU: _NOBODY,
    **dict.fromkeys((can.MEMORY_LIMIT, can.CPU_LIMIT, can.PIDS_LIMIT), _NO_CGROUP),
    **dict.fromkeys((can.DISK_QUOTA, can.INODE_QUOTA, can.IO_LIMIT), _NO_CGROUP),
}
_LIMITS = (can.MEMORY_LIMIT, can.CPU_LIMIT, can.PIDS_LIMIT, can.DISK_QUOTA, can.INODE_QUOTA)
_FIXED = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes")


@dataclass(frozen=True, eq=False, repr=False)
class FarLauncher:
    """A command whose standard input and output lead to another host, or into a container.

    Attributes:
        name: Of the backend.
        argv: The command; what is to run there follows.
        quoted: Whether a shell at the far end reads that as one line, as with ssh.
        python: The Python there, 3.9 or newer.
        there: The launcher there, `{uid}` being the user inside; empty for bubblewrap. It must make the
            agent PID 1 of a namespace.
    """

    name: str
    argv: tuple[str, ...]
    quoted: bool = False
    python: str = "python3"
    there: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BackendUnavailable where the command is not installed here."""
        if shutil.which(self.argv[0]) is None:
            raise BackendUnavailable(f"{self.name}: {self.argv[0]!r} is not installed")

    def command(self, there: list[str]) -> list[str]:
        """All of it."""
        return [*self.argv, *([shlex.join(there)] if self.quoted else there)]


def ssh(
    name: str,
    host: str,
    *,
    user: str = "",
    port: int = 0,
    identity: str = "",
    options: tuple[str, ...] = (),
    program: str = "ssh",
    python: str = "python3",
    there: tuple[str, ...] = (),
) -> FarLauncher:
    """`ssh HOST`: no terminal, no forwarding, no question.

    Args:
        options: As for `ssh -o`.
        identity: A file with the private key.
    """
    argv = [program, *_FIXED]
    for each in options:
        argv += ["-o", each]
    if identity:
        argv += ["-i", identity, "-o", "IdentitiesOnly=yes"]
    if port:
        argv += ["-p", str(port)]
    argv += ["--", f"{user}@{host}" if user else host]
    return FarLauncher(name, tuple(argv), quoted=True, python=python, there=there)


def report(backend: StreamBackend) -> BackendReport:
    """Found by making a real sandbox there."""
    try:
        sandbox = backend.provision(SandboxSpec())
    except (RingfenceError, OSError) as exc:
        return unavailable(backend.name, exc, _CAN)
    try:
        found = protections(sandbox)
        facts = sandbox.facts
    finally:
        sandbox.terminate()
    return BackendReport(
        backend=backend.name,
        available=True,
        reason=f"Linux {facts['kernel']}, Python {facts['python']}",
        tiers=(LIGHT,),
        capabilities=(
            *(Capability(name, True) for name in _CAN),
            *(Capability(name, False, why) for name, why in _CANNOT.items()),
        ),
        protections=found,
    )


def protections(sandbox: StreamSandbox) -> tuple[Protection, ...]:
    """As the agent reads them of the far kernel; of one that has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: StreamSandbox) -> tuple[Protection, ...]:
    facts: dict[str, Any] = sandbox.facts
    shared = [name for name, inode in facts["outer"].items() if facts["inner"].get(name) == inode]
    seen = status_of_agent(sandbox)
    seen["Uid"] = " ".join([str(facts["uid"])] * 4)  # as the far host has it
    with sandbox.files.open_read("/proc/self/net/dev") as file:
        interfaces = file.read().decode("utf-8", "replace")
    anyone: Any = sandbox
    found = [*posture.of_seen(seen, shared, interfaces), *of_isolation(anyone)]
    found = [
        Protection(each.name, each.status, f"read by the far agent: {each.why}", each.fix)
        for each in found
    ]
    found += [Protection(name, DEGRADED, _NO_CGROUP) for name in _LIMITS]
    return (*found, *(() if wants_filter(sandbox.spec) else (posture.TREES,)))
