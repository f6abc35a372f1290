"""Report of the microVM backend, and the protections of the host from one of its sandboxes."""

from __future__ import annotations

import os
from typing import Any

from ...model import capabilities as can
from ...model.capabilities import BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import STRONG, SandboxSpec
from ..local.agents.posture import AgentReader
from ..local.host.readback import memory_limit_bytes
from ..local.netns import NetworkTables, of_rules
from ..local.protections import BoundsReader, degraded, enforced, missing, no_cgroup
from ..local.reports import (
    BASIC,
    FILES,
    QUOTAS,
    RULES,
    STOPPING,
    each_of,
    never,
    of_limits,
    report_of,
)
from . import qemu
from .plan import EMULATOR_BYTES, NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..local.protections import Verdict
    from ..local.reports import Provisions
    from .sandbox import MicrovmSandbox

_CAN = (
    *(*BASIC, *STOPPING, *FILES, *QUOTAS, can.MEMORY_LIMIT, can.PIDS_LIMIT),
    *(can.OPEN_FILES_LIMIT, can.IMAGE, can.FORK),
)
_KNOWN = (*_CAN, *RULES, can.MEMORY_SNAPSHOT, can.SECRETS, can.CPU_LIMIT)


def backend_report(backend: Provisions[MicrovmSandbox]) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    spec = SandboxSpec(tier=STRONG, limits=Limits(cpus=1.0), allow_degraded=("*",))
    return report_of(backend, spec, STRONG, _KNOWN, _abilities)


def _abilities(
    sandbox: MicrovmSandbox, protections: tuple[Protection, ...]
) -> Iterable[Capability]:
    yield from each_of(_CAN)
    yield Capability(can.MEMORY_SNAPSHOT, True, sandbox.owner.machines().restores)
    yield from of_limits([can.CPU_LIMIT], protections)
    yield from never(NEVER)
    yield from of_rules(RULES, sandbox.apply_network_policy)


class MicrovmReader(AgentReader, BoundsReader):
    """Reads of both kernels: the host's about the emulator, the guest's about the guest."""

    sandbox: MicrovmSandbox

    def __init__(self, sandbox: MicrovmSandbox) -> None:
        anyone: Any = sandbox
        super().__init__(anyone)
        pids, files, disk, inodes = (int(word) for word in sandbox.ask("bounds")[0].split())
        self.bounds = pids, files, disk, inodes

    def guest_kernel(self) -> Verdict:
        with self.sandbox.files.open_read("/proc/version") as file:
            guest = file.read().decode("utf-8", "replace").split()[2]
        mine = os.uname().release
        if guest == mine:
            return missing(f"the guest sees {guest}, which is the host's")
        return enforced(f"Linux {guest}, and {mine} on the host")

    def virtual_machine(self) -> Verdict:
        """Check the barrier around the guest: the processor, or a software emulation of one."""
        machines = self.sandbox.owner.machines()
        if machines.accelerator == qemu.KVM:
            return enforced(f"KVM, by QEMU {machines.program.version}")
        why = (
            f"software emulation by QEMU {machines.program.version}: slow, and no security "
            "boundary according to its authors; the jail around the emulator is the second layer"
        )
        return degraded(why, "use a host on which KVM boots a guest")

    def network(self) -> Verdict:
        """The jail's is what holds; that the guest has no way beside it, its kernel says."""
        with self.sandbox.files.open_read("/proc/net/dev") as file:
            inside = NetworkTables(lambda _name: file.read().decode("utf-8", "replace")).interfaces
        if inside != ["lo"]:
            return missing(f"interfaces of the machine: {', '.join(inside)}")
        return self.of_policy(self.sandbox.network)

    def memory_limit(self) -> Verdict:
        wanted, found = self.sandbox.sizes.memory_bytes, memory_limit_bytes(self.sandbox.group)
        machine = qemu.memory_mib(wanted)
        guest = f"{wanted >> 20} MiB by the guest's kernel, in a machine of {machine} MiB"
        if found is None or found > (machine << 20) + EMULATOR_BYTES:
            return enforced(f"{guest}; no cgroup around the emulator")
        return enforced(f"{guest}; {found >> 20} MiB with the emulator, by cgroup")

    def cpu_limit(self) -> Verdict:
        return self.of_cpus(self.sandbox.group, no_cgroup(self.sandbox.owner.layout().why))
