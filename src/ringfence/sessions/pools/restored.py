"""Warm sandboxes over the files of a snapshot: whole ones, in which nothing has run yet."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model.net.network import NetworkPolicy
from ...model.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...backends.protocol import BackendSandbox
    from ...model.spec import SandboxSpec


class Restored:
    """A `WarmSandbox` of a template: what a snapshot was restored with cannot be bound later.

    Args:
        spec: What it was made for; only the network may be another one when it is claimed.
    """

    def __init__(self, inner: BackendSandbox, spec: SandboxSpec) -> None:
        self._inner, self._spec = inner, _comparable(spec)

    @property
    def id(self) -> str:
        return self._inner.session.id

    @property
    def alive(self) -> bool:
        """False once it is known to be dead."""
        try:
            return self._inner.session.state != State.TERMINATED
        except RingfenceError:
            return False

    def fits(self, spec: SandboxSpec) -> bool:
        """Return whether the spec is the one that it was made for."""
        return _comparable(spec) == self._spec

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> BackendSandbox:
        if spec.network != self._inner.spec.network:
            self._inner.apply_network_policy(spec.network)
        if meanwhile is not None:
            meanwhile()
        return self._inner

    def discard(self) -> None:
        self._inner.terminate()


def _comparable(spec: SandboxSpec) -> SandboxSpec:
    """The spec without what the manager sees to, and what can be changed in a living sandbox."""
    none, limits = NetworkPolicy(), spec.limits
    if limits.idle_timeout_s is not None:
        limits = limits.altered(idle_timeout_s=None)
    return spec.altered(id=None, labels={}, ttl_s=None, network=none, limits=limits)
