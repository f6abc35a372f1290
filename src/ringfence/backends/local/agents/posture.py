"""Read the protections of a sandbox with an agent; see `local.protections`.

A process inside has no more rights than PID 1, so what the kernel says of PID 1 holds for all.
"""

from __future__ import annotations

import os

from ....model.capabilities import DEGRADED, MISSING
from ..host.mountinfo import MountLine, read_text
from ..mounts import template
from ..netns import NetworkTables, of_network
from ..protections import (
    SOCKETS_FIX,
    SOCKETS_MADE_LATER,
    MountReader,
    ProcessReader,
    degraded,
    enforced,
    missing,
    paths_of,
)
from .agents import wants_filter
from .inside import NAMESPACES, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..network import SandboxNetwork
    from ..protections import Verdict
    from .contained import ContainedSandbox

_OF_NO_DISK = ("tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")
_DEVICES = ("/dev/", "/proc/")  # the null device covers files of /proc
TREES = degraded("a process can leave its exec's tree, and then lives until the sandbox ends")
_MOST_NAMESPACES = "/proc/sys/user/max_user_namespaces"


class AgentReader(ProcessReader):
    """Reads namespaces, identity, rights, filter and network of PID 1 on this host.

    Args:
        inodes: Of its namespaces by name, where they are known; an ordinary user may not look.
    """

    lacking = DEGRADED

    def __init__(self, sandbox: ContainedSandbox, inodes: Mapping[str, int] | None = None) -> None:
        super().__init__(sandbox)
        self.contained, self._inodes = sandbox, inodes

    def status(self) -> dict[str, str]:
        return status_of(self.contained.pid)

    def shared(self) -> list[str]:
        pid = self.contained.pid
        theirs = self._inodes or {n: os.stat(f"/proc/{pid}/ns/{n}").st_ino for n in NAMESPACES}
        return [n for n in NAMESPACES if theirs[n] == os.stat(f"/proc/self/ns/{n}").st_ino]

    def tables(self) -> NetworkTables:
        return NetworkTables(lambda name: read_text(f"/proc/{self.contained.pid}/net/{name}"))

    def namespaces(self) -> Verdict:
        return self.of_namespaces(self.shared(), NAMESPACES)

    def host_identity(self) -> Verdict:
        uid = int(self.status()["Uid"].split()[1])
        if uid == 0:
            return missing("it is root on the host", "report this")
        if "user" in self.shared():
            why = f"uid {uid} of the host, possibly another account's"
            return degraded(why, "turn on the engine's userns-remap")
        return enforced(f"uid {uid} on the host")

    def seccomp(self) -> Verdict:
        if self.status().get("Seccomp") != "2":
            return degraded("no system call is filtered")
        return enforced("mode 2 on PID 1, and so on all that it starts")

    def network(self) -> Verdict:
        names, shared = set(self.tables().interfaces) - {"lo"}, self.shared()
        if names or "net" in shared:
            return missing(f"interfaces: {', '.join(sorted(names)) or 'the host'}")
        return enforced("a namespace with nothing but lo")

    def of_policy(self, network: SandboxNetwork) -> Verdict:
        """Check that only destinations of the policy can be reached."""
        return of_network(self.tables(), network, self.sandbox.spec.network)


class ContainedReader(AgentReader, MountReader):
    """Also reads, through the agent, the isolation that it makes; where it made none, the
    substitute is reported as degraded.
    """

    def inside(self, path: str) -> str:
        """The text of a file as the agent sees it."""
        with self.contained.files.open_read(path) as file:
            return file.read().decode("utf-8", "replace")

    def _made(self, verdict: Verdict) -> Verdict:
        """Say missing where the agent makes the isolation itself."""
        is_ours = verdict and verdict[0] == DEGRADED and self.contained.namespace_fds
        return (MISSING, *verdict[1:]) if verdict and is_ours else verdict

    def _on_top(self) -> dict[str, MountLine]:
        lines = map(MountLine, self.inside("/proc/self/mountinfo").splitlines())
        return {line.target: line for line in lines}  # the last one at a place is the one in sight

    def lines(self) -> list[MountLine]:
        return list(self._on_top().values())

    def host_trees(self) -> list[MountLine]:
        return [
            line
            for line in self.lines()
            if line.kind not in _OF_NO_DISK
            and not line.target.startswith(_DEVICES)
            and line.target != "/"
        ]

    def root_file_system(self) -> Verdict:
        return self._made(super().root_file_system())

    def kernel_interfaces(self) -> Verdict:
        on_top = self._on_top()
        if "ro" not in on_top["/proc"].options:
            return self._made(degraded("/proc can be written to"))
        bare = [path for path in template.masked() if path not in on_top]
        bare += ["/sys"] if "/sys" in on_top and on_top["/sys"].kind != "tmpfs" else []
        if bare:
            return self._made(degraded(f"shown: {', '.join(bare)}"))
        return enforced("/proc read-only and masked; no /sys")

    def nested_user_namespaces(self) -> Verdict:
        if self.inside(_MOST_NAMESPACES).strip() != "0":
            return self._made(degraded("no count forbids them: a filter alone does"))
        return enforced("none may be made")

    def unix_sockets(self) -> Verdict:
        if not self.contained.may_reach_sockets:
            return None
        return degraded(SOCKETS_MADE_LATER, SOCKETS_FIX)

    def protected_paths(self) -> Verdict:
        if self.contained.mounting is None or not self.contained.mounting.protected:
            return None
        on_top, paths = self._on_top(), paths_of(self.contained.mounting.protected)
        bare = [path for path in paths if path not in on_top or "ro" not in on_top[path].options]
        return self.of_protected(paths, bare)

    def process_trees(self) -> Verdict:
        return None if wants_filter(self.sandbox.spec) else TREES
