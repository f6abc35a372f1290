"""Prebuilt sandboxes: built up to the point where the spec matters.

Namespaces and root are there; nothing is locked down, nothing of anybody's is in it and nothing has
run. The claim brings all the rest, as a plan that is decided like any other: limits, mounts,
network, the system-call filter, Landlock. So what comes out is what a cold start would have made.
"""

from __future__ import annotations

import _signal as signal
import os
import select
from _thread import RLock

from ....errors import ExecError
from ....model.limits import Limits
from ....model.net.network import NetworkPolicy
from ....model.spec import SandboxSpec
from ...local.mounts import images
from ..profiles import profile_named
from .burst import MOST_MOUNTS, kind_of, takes_straight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ....launcher import wire
    from ....launcher.plan import Plan
    from ...local.host.cgroups import Group
    from ...local.mounts.images import Held
    from ..backend import NativeBackend
    from ..profiles import Profile
    from ..sandbox import NativeSandbox
    from ..zygote import Zygote
    from .burst import Kind


_DYING_MS = 5000


class NativeWarm:
    """See `WarmSandbox`.

    Attributes:
        control: Our end of the socket that it has at its other end.
        values: What is set in its cgroups.
        image: What its root is of, held; of whoever claims it from then on.
        meanwhile: What whoever claims it wants done while it locks itself down.
    """

    meanwhile: Callable[[], None] | None = None

    def __init__(
        self,
        backend: NativeBackend,
        sandbox_id: str,
        shape: Kind,
        first_host_id: int,
        group: Group,
        pid: int,
        pidfd: int,
        zygote: Zygote,
        control: wire.Socket,
        values: list[tuple[str, str]],
        image: Held | None = None,
    ) -> None:
        self.control, self.values, self.image = control, values, image
        self.backend, self.id, self.shape = backend, sandbox_id, shape
        self.first_host_id, self.group = first_host_id, group
        self.pid, self.pidfd, self.zygote = pid, pidfd, zygote
        # The zygote's watcher may discard it while another thread discards or inspects it.
        self._lock = RLock()

    @property
    def alive(self) -> bool:
        """True until it is claimed, discarded or dead."""
        with self._lock:
            return self.pidfd >= 0 and not self._has_ended(0)

    def _has_ended(self, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def fits(self, spec: SandboxSpec) -> bool:
        """Return whether `claim` can turn it into a sandbox for `spec`."""
        return self.fitting(spec) is not None

    def fitting(self, spec: SandboxSpec) -> SandboxSpec | None:
        """The spec, with what the image decides if there is one; None when `claim` cannot make it so."""
        if len(spec.mounts) > MOST_MOUNTS or (spec.image is None) != (self.image is None):
            return None
        if spec.image is not None:
            # A name may mean another image by now; what ours means is held.
            resolved = images.resolved(spec)
            if resolved is None:
                return None  # a cold start says why
            spec = resolved
        return spec if shape_of(spec, self.backend.profiles) == self.shape else None

    def takes(self, plan: Plan) -> bool:
        """See `takes_straight`."""
        return takes_straight(plan, self.group.directories, self.values)

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> NativeSandbox:
        """Make the sandbox that `NativeBackend.provision` would make, with this one's id."""
        self.meanwhile = meanwhile
        return self.backend.prewarming.claim(self, spec)

    def discard(self) -> None:
        """End it unused."""
        with self._lock:
            if self.pidfd < 0:
                return
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self._has_ended(_DYING_MS):
                raise ExecError("a warm sandbox does not die", hint="its user ids stay reserved")
            self.close()
            self.control.close()
            if self.image is not None:
                self.image.close()
            self.backend.prewarming.discarded(self)

    def close(self) -> None:
        """It is somebody's now, and so is its control: forget it, without ending it."""
        with self._lock:
            pidfd, self.pidfd = self.pidfd, -1
            os.close(pidfd)


def shape_of(spec: SandboxSpec, profiles: Mapping[str, Profile]) -> Kind:
    """Select the parts of a spec that are fixed before a claim.

    Raises:
        InvalidRequest: No such profile or user.
    """
    return kind_of(spec, profile_named(spec.profile, dict(profiles)))


def plain(spec: SandboxSpec) -> SandboxSpec:
    """A spec of the same shape that asks for nothing else."""
    unrestricted = spec.network.is_unrestricted
    return SandboxSpec(
        limits=Limits(),
        network=NetworkPolicy.unrestricted() if unrestricted else NetworkPolicy.none(),
        template=spec.template,
        tier=spec.tier,
        profile=spec.profile,
        user=spec.user,
        python_env=spec.python_env,
        image=spec.image,
        allow_degraded=("*",),  # judged at the claim, against what is asked for then
    )
