"""Test of this host's KVM by booting a guest, once for each start of the host."""

from __future__ import annotations

import json
import os

from ...errors import RingfenceError
from . import qemu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .booted import Machines

_DEVICE = "/dev/kvm"
_PATIENCE_S = 20.0  # real KVM takes less than one; some that only look like it never come back
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NOTE = "accelerator.json"


def accelerator(machines: Machines, tries: Callable[[Machines, str, float], None]) -> str:
    """KVM where a guest has booted with it since this host started, else software emulation.

    Args:
        tries: Boots a machine with an accelerator, within so many seconds, or raises.
    """
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return qemu.TCG
    with open(_BOOT_ID, encoding="ascii") as file:
        now = file.read().strip()
    stamps = [now, machines.program.stamp(), machines.kernel.stamp()]
    note = os.path.join(machines.directory, _NOTE)
    try:
        with open(note, encoding="utf-8") as file:
            known = json.load(file)
        if known["stamps"] == stamps:
            return str(known["accelerator"])
    except (OSError, ValueError, KeyError):
        pass  # nobody has tried, or it was half written: try
    machines.prepare()
    try:
        tries(machines, qemu.KVM, _PATIENCE_S)
        found = qemu.KVM
    except RingfenceError:
        found = qemu.TCG
    fresh = f"{note}.{os.getpid()}"
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump({"stamps": stamps, "accelerator": found}, file)
    os.replace(fresh, note)
    return found
