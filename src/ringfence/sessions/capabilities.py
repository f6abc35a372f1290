"""Effective capabilities of a leased sandbox, and their check against the required ones."""

from __future__ import annotations

import os.path
from dataclasses import replace

from ..errors import Unsupported
from ..model.client_session import SessionState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.acquire import RequiredCapabilities
    from ..model.granted import SandboxCapabilities
    from .clock import Clock
    from .live import Live


def granted(live: Live, clock: Clock) -> SandboxCapabilities:
    """Read the sandbox's capabilities back from its backend, and add those of the session.

    A suspended sandbox gets the last reading.

    Raises:
        LifecycleError: It is suspended, and was never read before.
    """
    if live.state != SessionState.SUSPENDED or live.granted is None:
        live.granted = live.inner.granted()
    remaining = live.remaining_s(clock.now())
    return replace(
        live.granted,
        created_at=live.created_at,
        time_remaining_ms=None if remaining is None else int(remaining * 1000),
    )


def check(found: SandboxCapabilities, required: RequiredCapabilities) -> None:
    """Compare what a sandbox has with what was asked for.

    Raises:
        Unsupported: It lacks something; `field` names the first thing.
    """
    memory = found.limits.memory_bytes
    least = required.minimum_memory_bytes
    for name, wanted, has, lacks, too_much in (
        ("network", required.network, found.has_network, "no network", "a network"),
        (
            "write_access",
            required.write_access,
            found.can_write_filesystem,
            "no writable path",
            "files that can be written",
        ),
    ):
        if wanted is not None and wanted != has:
            _refuse(found, name, f"it has {lacks if wanted else too_much}")
    if least is not None and memory is not None and memory < least:
        _refuse(found, "minimum_memory_bytes", f"its memory limit is {memory} bytes")
    for name, paths, there in (
        ("readable_paths", required.readable_paths, found.readable_paths),
        ("writable_paths", required.writable_paths, found.writable_paths),
    ):
        for path in paths:
            if not _is_within(path, there):
                _refuse(found, name, f"{path} is not one of them, which are {', '.join(there)}")


def _refuse(found: SandboxCapabilities, name: str, why: str) -> None:
    raise Unsupported(
        f"the sandbox lacks a required capability: {why}",
        backend=found.backend,
        operation=name,
        field=f"required.{name}",
    )


def _is_within(path: str, directories: Iterable[str]) -> bool:
    return any(os.path.commonpath([path, each]) == each for each in directories)
