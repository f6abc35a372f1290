"""Common parts of backend reports: unavailable backends, and last readings."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model.capabilities import DEGRADED, MISSING, BackendReport, Capability, Protection
from ...model.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Protocol, TypeVar

    T = TypeVar("T")

    class Readable(Protocol):
        """A sandbox whose protections are read from the kernel."""

        last_protections: tuple[Protection, ...]

        @property
        def state(self) -> State:
            """Where it is in its life."""
            ...

    S = TypeVar("S", bound=Readable)

UNREADABLE = (OSError, RingfenceError, ValueError, KeyError)


def unavailable(backend: str, exc: Exception, capabilities: Iterable[str]) -> BackendReport:
    """A backend whose sandbox could not be made: exactly what refused, and the fix."""
    reason = exc.message if isinstance(exc, RingfenceError) else str(exc)
    fix = exc.hint if isinstance(exc, RingfenceError) else ""
    return BackendReport(
        backend=backend,
        available=False,
        reason=reason,
        capabilities=tuple(Capability(name, False, reason) for name in capabilities),
        protections=(Protection("sandbox", MISSING, reason, fix),),
    )


def read_or_last(sandbox: S, read: Callable[[S], tuple[Protection, ...]]) -> tuple[Protection, ...]:
    """Every protection of a live sandbox; of a suspended or ended one, what was last read."""
    state = sandbox.state
    if state not in (State.SUSPENDED, State.TERMINATED):
        sandbox.last_protections = read(sandbox)
    elif not sandbox.last_protections:
        return (Protection("all", DEGRADED, f"not read back before the sandbox was {state}"),)
    return sandbox.last_protections


def read_all(
    checks: Mapping[str, Callable[[T], Protection | None]], seen: T
) -> tuple[Protection, ...]:
    """Run each check on `seen`, leaving out those that do not apply; see `unreadable`."""
    found = [_checked(name, check, seen) for name, check in checks.items()]
    return tuple(each for each in found if each is not None)


def _checked(name: str, check: Callable[[T], Protection | None], seen: T) -> Protection | None:
    try:
        return check(seen)
    except UNREADABLE as exc:
        return unreadable(name, exc)


def unreadable(name: str, exc: Exception) -> Protection:
    """A protection of which nobody can say that it is there."""
    return Protection(name, DEGRADED, f"could not be read back: {exc}")
