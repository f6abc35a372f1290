"""Protections of the host: of one sandbox, or tested by making a sandbox."""

from __future__ import annotations

import os

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import STRONG, SandboxSpec
from ..local.agents import posture
from ..local.host.mountinfo import read_text
from ..local.host.readback import cores, cpu_limit, memory_limit_bytes
from ..local.netns import NetworkTables, of_network, of_rules
from ..local.reports import read_or_last, unavailable
from . import qemu
from .plan import EMULATOR_BYTES, NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .sandbox import MicrovmSandbox

_CAN = (
    can.LOCAL_PROCESS_SANDBOX,
    can.NETWORK_NONE,
    can.SNAPSHOT,
    can.RESTORE,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.PTY,
    can.CONNECT,
    can.MEMORY_LIMIT,
    can.PIDS_LIMIT,
    can.DISK_QUOTA,
    can.INODE_QUOTA,
    can.OPEN_FILES_LIMIT,
    can.IMAGE,
    can.MOUNT,
    can.ATTACH,
    can.PROTECTED_PATHS,
    can.DENIED_PATHS,
    can.MEMORY_SNAPSHOT,
    can.FORK,
)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)
_DELEGATE = "start it as root, or run it under `systemd-run --user --scope -p Delegate=yes --`"


def backend_report(
    name: str, profiles: tuple[str, ...], provision: Callable[[SandboxSpec], MicrovmSandbox]
) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    wanted = SandboxSpec(tier=STRONG, limits=Limits(cpus=1.0), allow_degraded=("*",))
    try:
        sandbox = provision(wanted)
    except (RingfenceError, OSError) as exc:
        return unavailable(name, exc, (*_CAN, *_OF_RULES, can.SECRETS, can.CPU_LIMIT))
    try:
        protections = sandbox_protections(sandbox)
        of_network = of_rules(_OF_RULES, sandbox.apply_network_policy)
    finally:
        sandbox.terminate()
    cpus = next(each for each in protections if each.name == can.CPU_LIMIT)
    return BackendReport(
        backend=name,
        available=True,
        tiers=(STRONG,),
        capabilities=(
            *(Capability(name, True) for name in _CAN),
            Capability(
                can.CPU_LIMIT, cpus.status == ENFORCED, cpus.why if cpus.status != ENFORCED else ""
            ),
            *(Capability(name, False, why) for name, why in NEVER.items()),
            *of_network,
        ),
        protections=protections,
        profiles=profiles,
    )


def sandbox_protections(sandbox: MicrovmSandbox) -> tuple[Protection, ...]:
    """Of a live sandbox; of one that stands still or has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: MicrovmSandbox) -> tuple[Protection, ...]:
    try:
        pids, files, disk, inodes = (int(word) for word in sandbox.ask("bounds")[0].split())
        found = [
            _kernel(sandbox),
            _hardware(sandbox),
            *(each for each in posture.of_process(sandbox.pid) if each.name != "network"),
            _network(sandbox),
            _memory(sandbox),
            Protection(can.PIDS_LIMIT, ENFORCED, f"{pids} by the guest's kernel"),
            Protection(can.DISK_QUOTA, ENFORCED, f"{disk >> 20} MiB, the size of its tmpfs"),
            Protection(can.INODE_QUOTA, ENFORCED, f"{inodes} files and directories in its tmpfs"),
            Protection(can.OPEN_FILES_LIMIT, ENFORCED, f"{files} a process"),
        ]
    except (OSError, RingfenceError, ValueError, KeyError) as exc:
        return (Protection("all", DEGRADED, f"could not be read back: {exc}"),)
    if sandbox.spec.limits.cpus:
        found.append(_cpus(sandbox))
    return tuple(found)


def _kernel(sandbox: MicrovmSandbox) -> Protection:
    """Both kernels are asked which they are."""
    with sandbox.files.open_read("/proc/version") as file:
        guest = file.read().decode("utf-8", "replace").split()[2]
    mine = os.uname().release
    if guest == mine:
        return Protection("guest_kernel", MISSING, f"the guest sees {guest}, which is the host's")
    return Protection("guest_kernel", ENFORCED, f"Linux {guest}, and {mine} on the host")


def _hardware(sandbox: MicrovmSandbox) -> Protection:
    """Check the barrier around the guest: the processor, or a software emulation of one."""
    machines = sandbox.owner.machines()
    if machines.accelerator == qemu.KVM:
        return Protection("virtual_machine", ENFORCED, f"KVM, by QEMU {machines.program.version}")
    why = (
        f"software emulation by QEMU {machines.program.version}: slow, and no security "
        "boundary according to its authors; the jail around the emulator is the second layer"
    )
    return Protection("virtual_machine", DEGRADED, why, "use a host on which KVM boots a guest")


def _network(sandbox: MicrovmSandbox) -> Protection:
    """The jail's is what holds; that the guest has no way beside it, its kernel says."""
    with sandbox.files.open_read("/proc/net/dev") as file:
        inside = NetworkTables(lambda _name: file.read().decode("utf-8", "replace")).interfaces
    if inside != ["lo"]:
        return Protection("network", MISSING, f"interfaces of the machine: {', '.join(inside)}")
    seen = NetworkTables(lambda name: read_text(f"/proc/{sandbox.pid}/net/{name}"))
    return of_network(seen, sandbox.network, sandbox.spec.network)


def _memory(sandbox: MicrovmSandbox) -> Protection:
    wanted, found = sandbox.sizes.memory_bytes, memory_limit_bytes(sandbox.group)
    machine = qemu.memory_mib(wanted)
    guest = f"{wanted >> 20} MiB by the guest's kernel, in a machine of {machine} MiB"
    if found is None or found > (machine << 20) + EMULATOR_BYTES:
        return Protection(can.MEMORY_LIMIT, ENFORCED, f"{guest}; no cgroup around the emulator")
    return Protection(
        can.MEMORY_LIMIT, ENFORCED, f"{guest}; {found >> 20} MiB with the emulator, by cgroup"
    )


def _cpus(sandbox: MicrovmSandbox) -> Protection:
    found = cpu_limit(sandbox.group)
    if found is None:
        why = sandbox.owner.layout().why or "its controller is not there"
        return Protection(can.CPU_LIMIT, MISSING, f"no cgroup may be used: {why}", _DELEGATE)
    version = sandbox.group.version
    return Protection(can.CPU_LIMIT, ENFORCED, f"{cores(found)} by cgroup v{version}")
