"""Far hosts: the connection, the confinement there, and the protections readable through the agent."""

from __future__ import annotations

import shlex
import shutil

from ...errors import BackendUnavailable
from ...model import capabilities as can
from ...model.base.record import dataclass
from ...model.capabilities import DEGRADED, BackendReport, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents.guest_granted import status_of_agent
from ..local.agents.posture import ContainedReader
from ..local.netns import NetworkTables
from ..local.reports import each_of, never, report_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .stream import StreamBackend, StreamSandbox

_CAN = (
    *(can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, can.PTY, can.CONNECT),
    *(can.OPEN_FILES_LIMIT, can.MEMORY_LIMIT),
)
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
    **dict.fromkeys((can.CPU_LIMIT, can.PIDS_LIMIT), _NO_CGROUP),
    **dict.fromkeys((can.DISK_QUOTA, can.INODE_QUOTA, can.IO_LIMIT), _NO_CGROUP),
}
_LIMITS = (can.CPU_LIMIT, can.DISK_QUOTA, can.INODE_QUOTA)
_SAMPLED = "sampled by the far agent every 50 ms: Ringfence has no cgroup there"
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

    def program(sandbox: StreamSandbox) -> str:
        return f"Linux {sandbox.facts['kernel']}, Python {sandbox.facts['python']}"

    able = [*each_of(_CAN), *never(_CANNOT)]
    return report_of(backend, SandboxSpec(), LIGHT, _CAN, lambda *_: able, reason=program)


class FarReader(ContainedReader):
    """Reads everything through the far agent."""

    def __init__(self, sandbox: StreamSandbox) -> None:
        anyone: Any = sandbox
        super().__init__(anyone)
        self._facts = sandbox.facts
        self._status = status_of_agent(sandbox)
        self._status["Uid"] = " ".join([str(self._facts["uid"])] * 4)  # as the far host has it

    def read(self) -> tuple[Protection, ...]:
        found = [
            Protection(each.name, each.status, f"read by the far agent: {each.why}", each.fix)
            for each in super().read()
            if each.name != "process_trees"
        ]
        found += [Protection(name, DEGRADED, _NO_CGROUP) for name in _LIMITS]
        memory = "" if self.sandbox.spec.limits.memory_bytes else "none asked for; else "
        found += [
            Protection(can.MEMORY_LIMIT, DEGRADED, memory + _SAMPLED),
            Protection(can.PIDS_LIMIT, DEGRADED, "none but samples, which a fork bomb outruns"),
        ]
        trees = self.process_trees()
        return (*found, *([Protection("process_trees", *trees)] if trees else ()))

    def status(self) -> dict[str, str]:
        return self._status

    def shared(self) -> list[str]:
        inner = self._facts["inner"]
        return [name for name, inode in self._facts["outer"].items() if inner.get(name) == inode]

    def tables(self) -> NetworkTables:
        return NetworkTables(lambda name: self.inside(f"/proc/self/net/{name}"))
