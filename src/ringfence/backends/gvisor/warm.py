"""Prebuilt sandboxes: booted, agent included, for a create of the same kind.

gVisor is told at its start what a guest is shown and how much it may have, so a warm sandbox is a
whole one. Nothing of anybody's is in it, and nothing has run but the agent. What the host alone
keeps of a spec is bound by the claim: environment, labels, time and output limits.
"""

from __future__ import annotations

from _thread import allocate_lock
from dataclasses import replace

from ...errors import InvalidRequest, LifecycleError, Unsupported
from ...model.state import State
from ..local.mounts import images

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...model.spec import SandboxSpec
    from .sandbox import GvisorSandbox

NAME = "gvisor"


class GvisorWarm:
    def __init__(self, sandbox: GvisorSandbox) -> None:
        self.id, self._kind = sandbox.id, kind_of(sandbox.spec)
        self._sandbox, self._lock, self._is_kept = sandbox, allocate_lock(), True

    @property
    def alive(self) -> bool:
        """True until it is claimed, discarded or dead."""
        return self._is_kept and self._sandbox.state is not State.TERMINATED

    def fits(self, spec: SandboxSpec) -> bool:
        """Return whether `claim` can turn it into a sandbox for `spec`."""
        return self._fitting(spec) is not None

    def _fitting(self, spec: SandboxSpec) -> SandboxSpec | None:
        """The spec, with what the image decides if there is one; None when `claim` cannot make it so."""
        from . import asked

        if not is_bindable(spec) or (spec.image is None) != (self._kind.image is None):
            return None
        if spec.image is not None:
            resolved = images.resolved(spec)
            if resolved is None:
                return None  # a cold start says why
            spec = resolved
        asked.check(spec)
        return spec if kind_of(spec) == self._kind else None

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> GvisorSandbox:
        """The sandbox that waited, under this spec."""
        if not self._take() or self._sandbox.state is State.TERMINATED:
            raise LifecycleError(f"{self.id} was already claimed or has ended")
        try:
            wanted = self._fitting(spec)
            if spec.id not in (None, self.id) or wanted is None:
                raise InvalidRequest("this prebuilt sandbox does not match the spec")
            if meanwhile is not None:
                meanwhile()
            self._sandbox.begin(wanted)
        except BaseException:
            self._sandbox.terminate()
            raise
        return self._sandbox

    def discard(self) -> None:
        if self._take():
            self._sandbox.terminate()

    def _take(self) -> bool:
        with self._lock:
            taken, self._is_kept = self._is_kept, False
        return taken


def check(spec: SandboxSpec) -> None:
    """Raises Unsupported where none can wait for what `spec` asks for."""
    if not is_bindable(spec):
        raise Unsupported(
            "a warm gVisor sandbox has neither mounts nor secrets: they belong to one client, "
            "and decided when gVisor starts",
            backend=NAME,
            operation="prewarm",
        )


def is_bindable(spec: SandboxSpec) -> bool:
    """Return whether the spec has no user data that must exist before the boot."""
    return not (spec.mounts or spec.memory_dir or spec.secrets)


def kind_of(spec: SandboxSpec) -> SandboxSpec:
    """All of a spec but what a claim binds."""
    limits = replace(spec.limits, wall_time_s=None, output_bytes=None)
    return replace(spec, id=None, env={}, labels={}, ttl_s=None, limits=limits)
