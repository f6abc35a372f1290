"""Machines of an emulator's for tests: what one has booted, the others of the same run are continued from."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from ringfence.backends.microvm.backend import MicrovmBackend
from tests.features import guest_kernel, require

_PLACE = "RINGFENCE_TEST_MACHINES"


def _place() -> str:
    """The directory of this run, which processes that it starts to run tests in find, too."""
    if _PLACE not in os.environ:
        os.environ[_PLACE] = tempfile.mkdtemp(prefix="machines-of-a-test-")
        atexit.register(_remove, os.environ[_PLACE], os.getpid())
    return os.environ[_PLACE]


def _remove(place: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)


def require_machines() -> None:
    """Go on only where a machine can be made; see `require`."""
    for feature in ("user namespaces", "qemu-system-x86_64", "guest kernel"):
        require(feature)


def machine_backend(state_dir: str | None = None) -> MicrovmBackend:
    """A backend of the caller's own."""
    place = _place()
    return MicrovmBackend(
        kernel_place=guest_kernel(),
        state_dir=state_dir or f"{place}/snapshots",
        cache_dir=f"{place}/machines",
    )


def cache_dir() -> str:
    """Where the booted ones of this run are."""
    return f"{_place()}/machines"


_place()  # before there is any other process
