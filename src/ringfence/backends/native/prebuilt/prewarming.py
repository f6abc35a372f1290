"""Prebuilt sandboxes that wait to be claimed, and their binding to a spec.

Namespaces and root are there; nothing is locked down, nothing of anybody's is in it and nothing has
run. The claim brings all the rest, as a plan that is decided like any other: limits, mounts,
network, the system-call filter, Landlock. So what comes out is what a cold start would have made.
"""

from __future__ import annotations

import _signal as signal
import os
import select
from _thread import RLock, allocate_lock
from contextlib import ExitStack

from ....errors import ExecError, InvalidRequest, LifecycleError
from ....launcher import wire
from ....model.capabilities import NAMESPACES
from ....model.limits import Limits
from ....model.net.network import NetworkPolicy
from ....model.spec import SandboxSpec
from ...local import sizes
from ...local.answers import Refused, answer
from ...local.host.facts import ExplainedFileLimit, host
from ...local.mounts import images
from .. import planner
from ..profiles import profile_named
from ..provision import READY_S, Provision, make_disk, plan_limits
from ..request import checked, kind_of, request
from .prebuilt import Prebuilt, send_plan, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ....launcher.plan import Plan, Shape
    from ..request import Kind, Request
    from ..runtime import Runtime
    from ..sandbox import NativeSandbox
    from ..zygote import Zygote


class Prewarming:
    """The prebuilt sandboxes of a backend. Thread-safe."""

    def __init__(self, backend: Runtime) -> None:
        self._backend = backend
        self._lock = allocate_lock()
        self._warm: dict[str, NativeWarm] = {}

    def ids(self) -> tuple[str, ...]:
        return tuple(self._warm)

    def kind_of(self, spec: SandboxSpec) -> Kind:
        """Select the parts of a spec that are fixed before a claim.

        Raises:
            InvalidRequest: No such profile or user.
        """
        return kind_of(spec, profile_named(spec.profile, self._backend.profiles))

    def prewarm(self, spec: SandboxSpec) -> NativeWarm:
        with ExplainedFileLimit(), request(plain(spec), self._backend.profiles) as bare:
            return self._prewarm(bare, spec)

    def _prewarm(self, bare: Request, like: SandboxSpec) -> NativeWarm:
        """Build one for nobody, in cgroups with the limits that are asked for most likely."""
        backend, sandbox_id = self._backend, ""
        with ExitStack() as acquired:
            try:
                zygote, sandbox_id = backend.zygote(), backend.new_id(like)
                first = backend.take_host_ids(bare.profile)
                if first:
                    acquired.callback(backend.host_ids().give_back, first)
                draft = planner.Draft(bare, sandbox_id, first)
                if bare.sizes.on_disk:
                    draft.disk = make_disk(backend, draft)
                    acquired.callback(draft.disk.remove)
                plan = planner.make_plan(draft, host())
                plan_limits(backend, draft, plan)
                size = sizes.sizes(like, host())
                plan["cgroup_values"] = draft.group.values(Limits(), size.memory_bytes, size.pids)
                control, pid, pidfd = self._build_ahead(plan, zygote, draft)
                made = NativeWarm(self, draft, plan["cgroup_values"], pid, pidfd, zygote, control)
                self._warm[sandbox_id] = made
                acquired.pop_all()
                return made
            finally:
                backend.made(sandbox_id)

    def _build_ahead(
        self, plan: Plan, zygote: Zygote, draft: planner.Draft
    ) -> tuple[wire.Socket, int, int]:
        """Its control, and its PID 1 as pid and pidfd."""
        ours, theirs = wire.socketpair()
        try:
            try:
                zygote.tell_from(theirs, "prewarm", planner.shape_of(plan), draft.fds)
            finally:
                theirs.close()
                draft.close()
                if draft.disk is not None:
                    draft.disk.close()
            body, fds = answer(ours, READY_S)
        except BaseException as exc:
            ours.close()
            zygote.clear_up(plan["id"], plan["cgroup_dirs"], [])
            if isinstance(exc, Refused):
                from ...local.refusals import error_of

                raise error_of(exc) from exc
            raise
        return ours, int(body), fds[0]

    def claim(self, claimed: NativeWarm, spec: SandboxSpec) -> NativeSandbox:
        """Bind everything in `spec` to a warm sandbox; when that fails, the sandbox has ended."""
        with self._lock:
            if self._warm.get(claimed.id) is not claimed:
                raise LifecycleError(f"{claimed.id} was already claimed or discarded")
            self._backend.making(claimed.id)
            del self._warm[claimed.id]
        try:
            wanted = claimed.fitting(spec)
            if wanted is None or spec.id not in (None, claimed.id):
                raise InvalidRequest("this prebuilt sandbox does not match the spec")
            asked = checked(wanted, self._backend.profiles, claimed.base)
        except BaseException:
            claimed.discard()
            self._backend.made(claimed.id)
            raise
        with ExplainedFileLimit():
            return Provision(self._backend, asked, claimed, None).run()

    def discard_all(self, zygote: Zygote | None = None) -> None:
        """End those of one zygote, or all, unused."""
        with self._lock:  # as in `claim`: each is somebody's claim or ours, never both
            mine = [each for each in self._warm.values() if zygote in (None, each.zygote)]
            for each in mine:
                del self._warm[each.id]
        for each in mine:
            each.discard()

    def discarded(self, ended: NativeWarm) -> None:
        ended.zygote.clear_up(ended.id, ended.directories, [])
        if ended.first_host_id:
            self._backend.host_ids().give_back(ended.first_host_id)
        self._warm.pop(ended.id, None)


_DYING_MS = 5000
MOST_MOUNTS = 48  # their descriptors travel in one message: launcher.wire takes 64


class NativeWarm(Prebuilt):
    """See `WarmSandbox`.

    Attributes:
        base: What its root is of, held; of whoever claims it from then on.
    """

    def __init__(
        self,
        owner: Prewarming,
        draft: planner.Draft,
        values: list[tuple[str, str]],
        pid: int,
        pidfd: int,
        zygote: Zygote,
        control: wire.Socket,
    ) -> None:
        super().__init__(draft.id, draft.request.kind, draft.first_host_id, zygote, control)
        self.directories, self.values, self.base = draft.group.directories, values, draft.base
        self._owner, self.pid, self.pidfd = owner, pid, pidfd
        self.disk = draft.disk
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
        if len(spec.mounts) > MOST_MOUNTS or (spec.image is None) != (self.base is None):
            return None
        if spec.image is not None:
            # A name may mean another image by now; what ours means is held.
            resolved = images.resolved(spec)
            if resolved is None:
                return None  # a cold start says why
            spec = resolved
        return spec if self._owner.kind_of(spec) == self.kind else None

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> NativeSandbox:
        """Make the sandbox that `NativeBackend.provision` would make, with this one's id."""
        self.meanwhile = meanwhile
        return self._owner.claim(self, spec)

    def bind(self, plan: Plan, shape: Shape, pinned: list[int]) -> wire.Socket:
        """Give it the plan itself, or by the zygote where mounts are to be opened or limits to be set."""
        same = (plan["cgroup_dirs"], plan["cgroup_values"]) == (self.directories, self.values)
        if not same or plan["trees"] or plan["placeholders"]:
            return start(self.zygote, "claim", plan, shape, pinned)
        send_plan(self.control, plan)
        self.zygote.note("claimed", self.id, [])
        return self.control

    def discard(self) -> None:
        with self._lock:
            if self.pidfd < 0:
                return
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self._has_ended(_DYING_MS):
                raise ExecError(
                    "a prebuilt sandbox does not end", hint="its user ids stay reserved"
                )
            self.close()
            self.control.close()
            if self.base is not None:
                self.base.close()
            if self.disk is not None:
                self.disk.remove()
            self._owner.discarded(self)

    def close(self) -> None:
        """It is somebody's now, and so is its control: forget it, without ending it."""
        with self._lock:
            pidfd, self.pidfd = self.pidfd, -1
            os.close(pidfd)


def plain(spec: SandboxSpec) -> SandboxSpec:
    """A spec of the same shape that asks for nothing else."""
    unrestricted = spec.network.is_unrestricted
    size = sizes.sizes(spec, host())
    return SandboxSpec(
        limits=Limits(disk_bytes=size.disk_bytes, inodes=size.inodes) if size.on_disk else Limits(),
        disk_root=size.on_disk,
        network=NetworkPolicy.unrestricted() if unrestricted else NetworkPolicy.none(),
        template=spec.template,
        tier=spec.tier,
        profile=spec.profile,
        user=spec.user,
        python_env=spec.python_env,
        image=spec.image,
        # Judged at the claim, against what is asked for then; but this one has to be there before.
        allow_degraded=("*", *({NAMESPACES} & {*spec.allow_degraded})),
    )
