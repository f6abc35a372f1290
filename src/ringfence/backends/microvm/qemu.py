"""The emulator: its location, and the command line of a machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

from ...errors import BackendUnavailable
from ...guest.machine import NETWORK_PORT, PORT, SHARES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = "qemu-system-x86_64"
_PATIENCE_S = 20.0
KVM, TCG = "kvm", "tcg"
_MIB = 1 << 20
_ENOUGH_MIB = 2560  # for every guest that may use up to 2 GiB
_OWN_MIB = 512  # of the guest's kernel and our PID 1
CODE_MIB = 256  # translated code, under software emulation
# Guest programs can attack the emulator only through emulated devices: none but these.
_COMMON = (
    "-nodefaults",
    "-no-user-config",
    "-display",
    "none",
    "-no-reboot",
    "-sandbox",
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
)
_KERNEL_SAYS = (
    "panic=-1 reboot=t quiet random.trust_cpu=on audit=0 tsc=reliable no_timer_check nowatchdog "
    "kfence.sample_interval=0 rcupdate.rcu_expedited=1"
)
# An emulated processor has nothing to mitigate, and clearing each page twice costs it most.
_UNDER_EMULATION = "mitigations=off init_on_alloc=0"
# Nothing in a guest needs a hypervisor of its own, or the counters that tell what the processor did.
_HIDDEN = "-svm,-vmx,pmu=off"
# `erms` and `fsrm`: such string instructions are emulated byte by byte.
# `min-xlevel`: CPUID goes up to the leaf that tells how wide addresses are. Without `svm` QEMU ends it
# earlier, and Linux takes them for 48 bits wide, but uses all 57: paths of /proc were "xxxx".
_EMULATED = f"max,-erms,-fsrm,min-xlevel=0x80000008,{_HIDDEN}"
_NATIVE = f"host,migratable=on,{_HIDDEN}"


class Qemu:
    def __init__(self, path: str) -> None:
        self.path = path
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
            env={},
        )
        found = re.search(r"version (\S+)", done.stdout)
        self.version = found[1] if found else "unknown"

    def stamp(self) -> str:
        info = os.stat(self.path)
        return f"{self.version} {info.st_size} {info.st_mtime_ns}"


def find(path: str | None = None) -> Qemu:
    """The emulator at `path`, or the first on PATH.

    Raises:
        BackendUnavailable: There is none, or it does not run, or this is no x86-64.
    """
    if platform.machine() != "x86_64":
        raise BackendUnavailable(f"machines are x86-64, and this host is {platform.machine()}")
    found = path or shutil.which(_NAME)
    if found is None:
        hint = "install QEMU: `apt install qemu-system-x86`"
        raise BackendUnavailable(f"{_NAME} is not installed", hint=hint)
    try:
        return Qemu(os.path.realpath(found))
    except (OSError, subprocess.SubprocessError) as exc:
        raise BackendUnavailable(f"{found} does not run: {exc}") from exc


def memory_mib(memory_bytes: int) -> int:
    """The size of a machine whose guest may use so much: few sizes, for each is booted once."""
    wanted = -(-memory_bytes // _MIB) + _OWN_MIB
    return _ENOUGH_MIB if wanted <= _ENOUGH_MIB else 1 << (wanted - 1).bit_length()


def argv(
    program: str,
    accelerator: str,
    mib: int,
    *,
    line: int,
    monitor: int,
    network: int,
    shares: Sequence[int],
    incoming: int = -1,
    console: bool = False,
) -> list[str]:
    """The command of one machine, as its jail sees it.

    Args:
        line, monitor, network, shares, incoming: Descriptors: of the line to the agent, of the emulator's
            own control socket, of the line for connections, of those to who serves files, and of what a
            machine was written down in; -1: it boots.
        console: The kernel's messages go to standard output. Not with `incoming`.
    """
    tcg = f"tcg,thread=multi,tb-size={CODE_MIB}"
    says = f"console=ttyS0 {_KERNEL_SAYS}" if console else _KERNEL_SAYS
    if accelerator == TCG:
        says += f" {_UNDER_EMULATION}"
    served = [
        each
        for name, fd in zip(SHARES, shares, strict=True)
        for each in (
            *("-chardev", f"socket,id=share{fd},fd={fd}"),
            *("-device", f"virtserialport,chardev=share{fd},name={name}"),
        )
    ]
    return [
        program,
        *("-M", "pc,usb=off,vmport=off,dump-guest-core=off"),
        *("-accel", tcg if accelerator == TCG else "kvm"),
        *("-cpu", _EMULATED if accelerator == TCG else _NATIVE),
        *("-m", f"{mib}M"),
        *_COMMON,
        *("-kernel", "/boot/kernel", "-initrd", "/boot/initrd", "-append", says),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
        *("-chardev", f"socket,id=line,fd={line}", "-device", "virtio-serial-pci,max_ports=5"),
        *("-device", f"virtserialport,chardev=line,name={PORT}"),
        *("-chardev", f"socket,id=network,fd={network}"),
        *("-device", f"virtserialport,chardev=network,name={NETWORK_PORT}"),
        *served,
        # Not `file:`, which truncates what it opens: the seals of our file in memory refuse that.
        *(
            ("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console")
            if console
            else ()
        ),
        *(("-incoming", f"fd:{incoming}") if incoming >= 0 else ()),
    ]
