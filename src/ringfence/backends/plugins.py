"""Backends of installed packages: the entry point group `ringfence.backends`.

An entry point names a backend class, a function that makes one, or a `Launcher`. A package that cannot be
imported, or whose backend lacks a method, stops nothing else: a backend stands in for it that says why.
"""

from __future__ import annotations

from importlib import metadata

from ..errors import BackendUnavailable, RingfenceError, SnapshotNotFound
from ..model.spec import TIERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from ..model.capabilities import BackendReport
    from .protocol import Backend

GROUP = "ringfence.backends"


class UnusableBackend:
    """Stands in for a backend that could not be made: every use of it says why."""

    tiers = TIERS

    def __init__(self, name: str, why: RingfenceError) -> None:
        self.name, self.why = name, why

    def report(self) -> BackendReport:
        from .local.reports import unavailable

        return unavailable(self.name, self.why, ())

    def provision(self, *_args: object, **_options: object) -> NoReturn:
        raise BackendUnavailable(self.why.message, hint=self.why.hint)

    prewarm = restore = provision

    def snapshots(self) -> list[Any]:
        return []

    def delete_snapshot(self, snapshot_id: str) -> NoReturn:
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
        adapt: What makes a backend of a launcher, and leaves anything else as it is.
    """
    try:
        there = point.load()
        backend: Backend = adapt(there(**options) if callable(there) else there)
        _check(point, backend)
    except RingfenceError as exc:
        return UnusableBackend(point.name, exc)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  it is a stranger's code
        why = BackendUnavailable(f"{_named(point)} failed: {type(exc).__name__}: {exc}")
        return UnusableBackend(point.name, why)
    return backend


def loaded(point: metadata.EntryPoint) -> Any:
    """Import the object of an entry point; None where that fails, for which `make` gives the reason."""
    try:
        return point.load()
    except (Exception, SystemExit):  # noqa: BLE001  it is a stranger's code
        return None


def lacks(made: object, contract: type) -> list[str]:
    """Return the members of a protocol that an object does not have."""
    members = {**contract.__annotations__, **vars(contract)}
    return [each for each in members if each[0] != "_" and not hasattr(made, each)]


def _check(point: metadata.EntryPoint, backend: Backend) -> None:
    from .protocol import Backend

    missing = lacks(backend, Backend)
    if missing:
        raise BackendUnavailable(
            f"{_named(point)} is not a backend: {type(backend).__name__} has no {', '.join(missing)}",
            hint="see ringfence.backends.protocol.Backend",
        )
    if getattr(backend, "name", None) != point.name:
        raise BackendUnavailable(
            f"{_named(point)} has the name {getattr(backend, 'name', None)!r}",
            hint="its attribute `name` must be the name of the entry point",
        )


def _named(point: metadata.EntryPoint) -> str:
    package = f" of package {point.dist.name}" if point.dist else ""
    return f"backend {point.name}: {point.value}{package}"
