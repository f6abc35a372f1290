"""Prebuilt sandboxes that wait to be claimed, and their binding to a spec."""

from __future__ import annotations

from _thread import allocate_lock

from ....errors import InvalidRequest, LifecycleError
from ....launcher import wire
from ...local import sizes
from ...local.answers import Refused, answer
from ...local.host import identity
from ...local.host.facts import host, with_files
from ...local.mounts import images
from .. import planner
from ..making import READY_S, make, plan_limits
from . import warm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....launcher.plan import Plan
    from ....model.spec import SandboxSpec
    from ...local.host import cgroups
    from ...local.mounts.images import Held
    from ..backend import NativeBackend
    from ..profiles import Profile
    from ..sandbox import NativeSandbox
    from ..zygote import Zygote
    from .warm import NativeWarm


class Prewarming:
    """The prebuilt sandboxes of a backend. Thread-safe."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._lock = allocate_lock()
        self._warm: dict[str, NativeWarm] = {}

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the unclaimed ones."""
        return tuple(self._warm)

    def prewarm(self, spec: SandboxSpec) -> NativeWarm:
        """Prebuild a sandbox that can be claimed for `spec`."""
        if spec.image is None:
            return with_files(lambda: self._prewarm(spec))
        planner.check(spec)
        return with_files(lambda: images.made_from(spec, self._prewarm))

    def _prewarm(self, spec: SandboxSpec, image: Held | None = None) -> NativeWarm:
        shape, bare = warm.shape_of(spec, self._backend.profiles), warm.plain(spec)
        profile, zygote = self._backend.checked_profile(bare), self._backend.zygote()
        sandbox_id = self._backend.new_id(spec)
        try:
            first = self._backend.take_host_ids(profile)
            try:
                draft = planner.Draft(bare, sandbox_id, identity.uid_of(spec.user), first)
                draft.image = image
                plan, group = self._plan_ahead(draft, profile, spec)
                control, pid, pidfd = self._build_ahead(plan, zygote)
            except BaseException:
                if first:
                    self._backend.host_ids().give_back(first)
                raise
            values = plan["cgroup_values"]
            made = warm.NativeWarm(
                self._backend,
                sandbox_id,
                shape,
                first,
                group,
                pid,
                pidfd,
                zygote,
                control,
                values,
                image,
            )
            self._warm[sandbox_id] = made
            return made
        finally:
            self._backend.made(sandbox_id)

    def _plan_ahead(
        self, draft: planner.Draft, profile: Profile, like: SandboxSpec
    ) -> tuple[Plan, cgroups.Group]:
        """The plan of nobody's sandbox, in cgroups with the limits that are asked for most likely."""
        plan = planner.make_plan(draft, host(), profile)
        group = plan_limits(self._backend, plan, draft.spec, sizes.sizes(draft.spec, host()))
        size = sizes.sizes(like, host())
        plan["cgroup_values"] = group.values(draft.spec.limits, size.memory_bytes, size.pids)
        return plan, group

    def _build_ahead(self, plan: Plan, zygote: Zygote) -> tuple[wire.Socket, int, int]:
        """Its control, and its PID 1 as pid and pidfd."""
        ours, theirs = wire.socketpair()
        try:
            try:
                zygote.tell_from(theirs, "prewarm", planner.shape_of(plan), [])
            finally:
                theirs.close()
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
                raise LifecycleError(f"{claimed.id} was claimed or discarded before")
            self._backend.making(claimed.id)
            del self._warm[claimed.id]
        try:
            wanted = claimed.fitting(spec)
            if wanted is None or spec.id not in (None, claimed.id):
                raise InvalidRequest("this warm sandbox does not fit the spec")
            profile = self._backend.checked_profile(wanted)
            sandbox = with_files(
                lambda: make(
                    self._backend,
                    wanted,
                    profile,
                    claimed.id,
                    claimed.zygote,
                    claimed,
                    claimed.image,
                )
            )
        except BaseException:
            claimed.discard()
            raise
        finally:
            self._backend.made(claimed.id)
        claimed.close()
        return sandbox

    def discard_all(self, zygote: Zygote | None = None) -> None:
        """End those of one zygote, or all, unused."""
        with self._lock:  # as in `claim`: each is somebody's claim or ours, never both
            mine = [each for each in self._warm.values() if zygote in (None, each.zygote)]
            for each in mine:
                del self._warm[each.id]
        for each in mine:
            each.discard()

    def discarded(self, ended: NativeWarm) -> None:
        """Called by a warm sandbox that has ended."""
        ended.zygote.clear_up(ended.id, ended.group.directories, [])
        if ended.first_host_id:
            self._backend.host_ids().give_back(ended.first_host_id)
        self._warm.pop(ended.id, None)
