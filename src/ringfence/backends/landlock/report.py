"""Protections of a sandbox without namespaces: what is missing, and what follows from that."""

from __future__ import annotations

from ...model import capabilities as can
from ...model.capabilities import BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ...policy.landlock import SCOPE_SIGNAL
from ..local.agents.posture import AgentReader
from ..local.host.facts import host
from ..local.host.mountinfo import read_text
from ..local.host.readback import cpu_limit, memory_limit_bytes, memory_said, pids_limit
from ..local.protections import degraded, enforced, missing
from ..local.reports import QUOTAS, RULES, STOPPING, each_of, never, report_of
from ..local.sizes import sizes
from .rules import handled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..local.protections import Verdict
    from .backend import LandlockBackend
    from .sandbox import LandlockSandbox

LACKS = {
    "namespaces": "processes of the host and their command lines can be listed, files of the host be "
    "found by name and size, and its network tables be read",
    "host_identity": "a user id of the host",
    "network": "the network is the host's: the agent makes each TCP connection, by the policy, and has "
    "servers inside listen at loopback addresses of the sandbox's own, which programs of the host reach",
}
"""Protections that no sandbox of this backend has, and what follows."""

_CAN = (
    *(can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, *RULES, can.SECRETS, can.CONNECT),
    *(can.OPEN_FILES_LIMIT, can.PTY, *STOPPING, can.SNAPSHOT, can.RESTORE),
)
_NO_MOUNT = "it takes a mount namespace"
_OWN_PATH = (
    "programs find a host path by an argument, the working directory and links in the home, not by a name"
    " of one's choice, and it is writable only if nothing in it is protected"
)
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "list the destinations",
    **dict.fromkeys((can.ATTACH, can.PROTECTED_PATHS, can.DENIED_PATHS), _NO_MOUNT),
    can.MOUNT: _OWN_PATH,
    **dict.fromkeys(
        QUOTAS, "its files are in a directory of the host, which has no quota for them"
    ),
    can.IMAGE: _NO_MOUNT,
    can.MEMORY_SNAPSHOT: "it saves files only",
    can.FORK: "it copies files only, and no running processes",
    can.PREWARM: "it starts in one fork",
    can.GPU: "it shows no devices",
    can.IO_LIMIT: "what files move is not counted",
}


def backend_report(backend: LandlockBackend) -> BackendReport:
    """Found by making a real sandbox."""

    def abilities(
        _sandbox: LandlockSandbox, _protections: tuple[Protection, ...]
    ) -> Iterable[Capability]:
        yield from each_of((*_CAN, can.MEMORY_LIMIT))
        for name, field in ((can.PIDS_LIMIT, "pids"), (can.CPU_LIMIT, "cpus")):
            yield from each_of([name], "" if field in backend.held else backend.no_limits)
        yield from never(_CANNOT)

    return report_of(backend, SandboxSpec(), LIGHT, _CAN, abilities)


class LandlockReader(AgentReader):
    """Reads what the kernel says of the agent; the lacks are named without looking."""

    def __init__(self, sandbox: LandlockSandbox) -> None:
        super().__init__(sandbox, {})
        self._landlocked = sandbox

    def namespaces(self) -> Verdict:
        return missing(f"all are the host's: {LACKS['namespaces']}")

    def host_identity(self) -> Verdict:
        if self._landlocked.host_ids:
            return missing(f"uid {self._landlocked.uid} of the host, which nobody else has")
        return missing(
            f"uid {self._landlocked.uid} of the host, its user's: Landlock and the filters alone keep "
            "its files and processes"
        )

    def network(self) -> Verdict:
        return missing(LACKS["network"])

    def landlock(self) -> Verdict:
        _files, _network, scoped, abi = handled(_abi())
        if not scoped & SCOPE_SIGNAL:
            return degraded(
                f"ABI {abi}: signals and abstract unix sockets are refused by the filter, also inside",
                "Linux 6.12 or newer",
            )
        return enforced(f"ABI {abi}, without mounts behind it")

    def unix_sockets(self) -> Verdict:
        return enforced(
            "the agent connects, by path to those in the sandbox's own directories only"
        )

    def root_file_system(self) -> Verdict:
        return missing("the root is the host's; what may be read is in Landlock's rules")

    def kernel_interfaces(self) -> Verdict:
        return degraded("/proc can be read, not written, and parts of /sys be read")

    def nested_user_namespaces(self) -> Verdict:
        return degraded("no count forbids them: a filter alone does")

    def _held(self, value: int | None, text: str) -> Verdict:
        if not self._landlocked.group.version:
            return degraded("approximate: sampled every 50 ms, as no cgroup may be used here")
        return missing("the cgroup has none") if value is None else enforced(text)

    def memory_limit(self) -> Verdict:
        group = self._landlocked.group
        found = memory_limit_bytes(group) if group.version else None
        return self._held(found, f"{(found or 0) >> 20} MiB {memory_said(group, found or 0)}")

    def pids_limit(self) -> Verdict:
        sandbox = self._landlocked
        group = sandbox.group
        if group.version:
            found = pids_limit(group)
            return self._held(found, f"{found}, the guardian included, by cgroup v{group.version}")
        if sandbox.host_ids:
            text = read_text(f"/proc/{sandbox.pid}/limits")
            hard = text.partition("Max processes")[2].split(None, 2)[1]
            if not hard.isdigit():
                return missing(f"the kernel says {hard}")
            return enforced(
                f"{hard} by RLIMIT_NPROC of its own user, the guardian and the agent included"
            )
        wanted = sizes(sandbox.spec, host()).pids
        if not sandbox.asks_about_forks:
            from .backend import UNASKED

            why = f"{wanted}: sampled every 50 ms, which a fork bomb outruns"
            if sandbox.spec.limits.pids:
                return degraded(f"{why}; {UNASKED}")
            return degraded(why, "set limits.pids (--pids): then each fork waits for the agent")
        return degraded(
            f"{wanted}: each fork waits for the agent, which counts; forks at the same moment may "
            "exceed it, at most twofold, and are ended; a signal can interrupt the wait (EINTR)"
        )

    def cpu_limit(self) -> Verdict:
        if not self._landlocked.spec.limits.cpus:
            return None
        found = cpu_limit(self._landlocked.group)
        return missing("no cgroup") if found is None else enforced(f"{found:g} cores")

    def disk_quota(self) -> Verdict:
        return missing(_CANNOT[can.DISK_QUOTA])

    inode_quota = disk_quota


def _abi() -> int:
    from .backend import abi

    return abi()
