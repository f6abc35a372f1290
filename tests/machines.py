"""Machines of an emulator's for tests: what one has booted, the others of the same run are continued from."""

from __future__ import annotations

import functools
import tempfile

from ringfence.backends.microvm.backend import MicrovmBackend
from tests.features import guest_kernel, require


@functools.cache
def _place() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="machines-of-a-test-")


def require_machines() -> None:
    """Go on only where a machine can be made; see `require`."""
    for feature in ("user namespaces", "qemu-system-x86_64", "guest kernel"):
        require(feature)


def machine_backend(state_dir: str | None = None) -> MicrovmBackend:
    """A backend of the caller's own."""
    place = _place().name
    return MicrovmBackend(
        kernel_place=guest_kernel(),
        state_dir=state_dir or f"{place}/snapshots",
        cache_dir=f"{place}/machines",
    )


def cache_dir() -> str:
    """Where the booted ones of this run are."""
    return f"{_place().name}/machines"
