"""Backends of installed packages: the entry point group `ringfence.backends`.

An entry point names a backend class, a function that makes one, or a `Launcher`. A package that cannot be
imported, or whose backend lacks a method, stops nothing else: a backend stands in for it that says why.
"""

from __future__ import annotations

import inspect
from importlib import metadata

from ..errors import BackendUnavailable, RingfenceError, SnapshotNotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from ..model.capabilities import BackendReport
    from .protocol import Backend

GROUP = "ringfence.backends"
_METHODS = ("report", "provision", "prewarm", "restore", "snapshots", "delete_snapshot", "close")


class UnusableBackend:
    """Stands in for a backend that could not be made: every use of it says why."""

    def __init__(self, name: str, why: RingfenceError) -> None:
        self.name, self.why = name, why

    def report(self) -> BackendReport:
        """See `Backend`."""
        from .local.reports import unavailable

        return unavailable(self.name, self.why, ())

    def provision(self, *_args: object, **_options: object) -> NoReturn:
        """See `Backend`."""
        raise BackendUnavailable(self.why.message, hint=self.why.hint)

    prewarm = restore = provision

    def snapshots(self) -> list[Any]:
        """See `Backend`."""
        return []

    def delete_snapshot(self, snapshot_id: str) -> NoReturn:
        """See `Backend`."""
        raise SnapshotNotFound(f"backend {self.name} has no snapshot {snapshot_id!r}")

    def close(self) -> None:
        """See `Backend`."""


def found() -> dict[str, metadata.EntryPoint]:
    """Find the backends of installed packages by name; the first on sys.path wins."""
    points: dict[str, metadata.EntryPoint] = {}
    for each in metadata.entry_points(group=GROUP):
        points.setdefault(each.name, each)
    return points


def make(
    point: metadata.EntryPoint, options: Mapping[str, Any], adapt: Callable[[Any], Any]
) -> Backend:
    """The backend of an entry point, or one that says why there is none.

    Args:
        options: Given as far as the class or function takes them.
        adapt: What makes a backend of a launcher, and leaves anything else as it is.
    """
    try:
        there = point.load()
        if callable(there):
            taken = inspect.signature(there).parameters
            there = there(**{name: options[name] for name in options if name in taken})
        backend: Backend = adapt(there)
        _check(point, backend)
    except RingfenceError as exc:
        return UnusableBackend(point.name, exc)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  it is a stranger's code
        why = BackendUnavailable(f"{_named(point)} failed: {type(exc).__name__}: {exc}")
        return UnusableBackend(point.name, why)
    return backend


def takes_state_dir(point: metadata.EntryPoint) -> bool:
    """Return whether its class takes the server's directory for snapshots."""
    try:
        return "state_dir" in inspect.signature(point.load()).parameters
    except (Exception, SystemExit):  # noqa: BLE001  `make` says so
        return False


def _check(point: metadata.EntryPoint, backend: Backend) -> None:
    missing = [name for name in _METHODS if not callable(getattr(backend, name, None))]
    if missing:
        raise BackendUnavailable(
            f"{_named(point)} is no backend: {type(backend).__name__} has no {', '.join(missing)}",
            hint="see ringfence.backends.protocol.Backend",
        )
    if getattr(backend, "name", None) != point.name:
        raise BackendUnavailable(
            f"{_named(point)} calls itself {getattr(backend, 'name', None)!r}",
            hint="its attribute `name` must be the name of the entry point",
        )


def _named(point: metadata.EntryPoint) -> str:
    package = f" of package {point.dist.name}" if point.dist else ""
    return f"backend {point.name}: {point.value}{package}"
