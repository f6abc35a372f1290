"""The next sandbox of a backend, prebuilt after each create for a create that wants the same.

It is made as any other is, by a complete plan: the last sandbox's, with an id, host ids, cgroups and a
key of its own. It locks itself down and hibernates; its ready message lies unread in its control socket.
A create plans as always and takes it only if that plan is equal. See decision 176.
"""

from __future__ import annotations

import os
import time
from _thread import allocate_lock

from ....errors import RingfenceError, SandboxLost
from ....launcher import cgroups as launcher_cgroups
from ....launcher import wire
from ....linux import namespaces
from ....model.base.ids import new_id
from ....policy import filters
from ...local.host import cgroups, identity
from .. import planner
from .prebuilt import Prebuilt, send_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

    from ....launcher.plan import Plan, Shape
    from ...local.mounts.layered import Layered
    from ..planner import Draft
    from ..request import Base, Request
    from ..runtime import Runtime
    from ..zygote import Zygote

KEEP_S = 60.0  # after the last create
CALM_S = 0.008  # before it is built: a first command that ends soon has ended by then
_HASTE_S = 0.0005  # a caller who creates so soon after an end will create the next one as soon
_SWITCH = "RINGFENCE_PREBUILT"
_OFF = ("0", "no", "off", "false")


class Complete(Prebuilt):
    """A sandbox that is locked down by `plan` and can become no other one."""

    def __init__(
        self,
        owner: Prebuilder,
        draft: Draft,
        plan: Plan,
        first_host_id: int,
        zygote: Zygote,
        control: wire.Socket,
        base: Layered | None,
    ) -> None:
        super().__init__(plan["id"], draft.request.kind, first_host_id, zygote, control)
        self._owner, self.plan, self.limits, self.base = owner, plan, draft.spec.limits, base
        self.directories, self.values = plan["cgroup_dirs"], plan["cgroup_values"]
        self._has_ended = False

    def fits(self, request: Request) -> bool:
        """Return whether the plan of `request` is likely to be equal; `bind` compares the plans."""
        spec = request.spec
        if spec.mounts or not _is_own(request.base) or not self._owner.may_have(spec.id):
            return False
        if planner.hostname_of(spec, spec.id or self.id) != self.plan["hostname"]:
            return False  # it is another fork's
        base = request.base.ids if request.base else (), self.base.ids if self.base else ()
        return base[0] == base[1] and (request.kind, spec.limits) == (self.kind, self.limits)

    def wake(self) -> None:
        """Let it leave hibernation while the plan is made."""
        try:
            wire.send(self.control, ("wake",))
        except OSError:
            self._has_ended = True

    def bind(self, plan: Plan, _shape: Shape, _pinned: list[int]) -> wire.Socket:
        if self._has_ended:  # its ready message can be read nevertheless
            raise SandboxLost("the prebuilt sandbox has ended")
        if not are_equal(plan, self.plan):
            raise SandboxLost("the prebuilt sandbox does not match the plan")
        plan["tag_key"], plan["seccomp"] = self.plan["tag_key"], self.plan["seccomp"]
        self.zygote.note("claimed", self.id, [])
        return self.control

    def discard(self) -> None:
        self._owner.discard(self)

    def close(self) -> None:
        """See `Prebuilt`. The sandbox that it is now holds its files itself."""
        if self.base is not None:
            self.base.close()


def are_equal(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ only in the key, and their filters in nothing but that key."""
    if {**plan, "tag_key": 0, "seccomp": b""} != {**other, "tag_key": 0, "seccomp": b""}:
        return False
    return _filter_with(plan["tag_key"], other) == plan["seccomp"]


def _filter_with(key: int, plan: Plan) -> bytes | None:
    """The filter of `plan` with another key; None where the key's bytes occur twice in it."""
    if not plan["seccomp"]:
        return b""
    try:
        return filters.with_key(plan["seccomp"], key, plan["tag_key"])
    except ValueError:
        return None


def _is_own(base: Base | None) -> TypeGuard[Layered | None]:
    """Return whether snapshots, or nothing, are all that the root lies over."""
    return base is None or (bool(base.ids) and base.image is None)


def is_repeatable(draft: Draft, plan: Plan) -> bool:
    """Return whether nothing in it is the caller's own: no host path, image, network or policy."""
    if not _is_own(draft.base) or draft.protected or plan["trees"] or plan["placeholders"]:
        return False
    if plan["id_helpers"] or plan["network"] is not None:
        return False  # of id helpers' ranges there are few
    if plan["disk"] is not None:
        return False  # an image takes its whole size from the disk of the host
    is_isolated = bool(plan["namespaces"] & namespaces.CLONE_NEWNET)
    return is_isolated and plan["releases_idle_pages"]


class Prebuilder:
    """The prebuilt sandbox of a backend, of the kind of the last create. Thread-safe.

    Args:
        keep_s: How long it is kept after the last create; 0: none is built; None: a minute, or none where
            the environment says RINGFENCE_PREBUILT=off.
    """

    def __init__(self, backend: Runtime, keep_s: float | None) -> None:
        if keep_s is None:
            keep_s = 0.0 if os.environ.get(_SWITCH, "").lower() in _OFF else KEEP_S
        self._backend, self._keep_s = backend, keep_s
        self._lock = allocate_lock()
        self._prebuilt: Complete | None = None
        self._until_s = 0.0
        self._alarmed: Zygote | None = None  # calls `hear` when it may be time to discard it
        self._last_end_s, self._last_end_id = 0.0, ""
        self._delay_s = CALM_S

    def take(self, request: Request, zygote: Zygote) -> Complete | None:
        """Return the prebuilt sandbox if it probably fits the request."""
        with self._lock:
            in_haste = time.monotonic() - self._last_end_s < _HASTE_S or self._backend.others_wait
            self._delay_s = 0.0 if in_haste else CALM_S
            if self._prebuilt is None:
                return None
            if self._prebuilt.zygote is not zygote:
                self._lost(self._let_go(self._prebuilt))
                return None
            if not self._prebuilt.fits(request):
                return None
            prebuilt = self._let_go(self._prebuilt)
        prebuilt.wake()
        return prebuilt

    def ended(self, sandbox_id: str) -> None:
        self._last_end_s, self._last_end_id = time.monotonic(), sandbox_id

    def may_have(self, sandbox_id: str | None) -> bool:
        """Return whether a sandbox with this id may be a prebuilt one: without a wish, or in a rewind.

        A rewind makes it in place of the one that has just ended, and more may follow. The zygote goes on
        knowing it by the id that it was built with, so it is none that a later process takes back.
        """
        return sandbox_id is None or (
            sandbox_id == self._last_end_id and not self._backend.outlives
        )

    def follow(self, draft: Draft, plan: Plan, shape: Shape, zygote: Zygote) -> None:
        """After a create: prebuild one that is equal. If that fails, the create stands."""
        if self._keep_s <= 0 or not is_repeatable(draft, plan) or not self.may_have(draft.spec.id):
            return
        with self._lock:
            self._until_s = time.monotonic() + self._keep_s
            if self._prebuilt is not None:
                if self._prebuilt.fits(draft.request) and self._prebuilt.zygote is zygote:
                    return  # of a create at the same time
                self._discard(self._let_go(self._prebuilt))
            try:
                if self._alarmed is not zygote:
                    zygote.set_alarm(self._keep_s)
                    self._alarmed = zygote
                self._prebuilt = self._start(draft, plan, shape, zygote)
                zygote.watch(self._prebuilt.control.fileno())
            except (RingfenceError, OSError):
                pass  # no ids, no descriptors, or the zygote is gone

    def _start(self, draft: Draft, plan: Plan, shape: Shape, zygote: Zygote) -> Complete:
        assert _is_own(draft.base)
        base = draft.base.held_again() if draft.base else None
        first = 0
        ours, theirs = wire.socketpair()
        try:
            first = self._backend.host_ids().take() if plan["trusted_root"] else 0
            own = self._own_plan(draft, plan, first)
            if base is not None:
                base.appear_to(first, draft.uid, is_trusted_root=plan["trusted_root"])
                own["layers"] = base.trees
            prebuilt = Complete(self, draft, own, first, zygote, ours, base)
            send_plan(ours, own)
            own_shape = {**planner.shape_of(own), "template": shape["template"]}
            zygote.note("prebuild", (own_shape, self._delay_s), [theirs.fileno()])
            return prebuilt
        except BaseException:
            ours.close()
            if base is not None:
                base.close()
            if first:
                self._backend.host_ids().give_back(first)
            raise
        finally:
            theirs.close()

    def _own_plan(self, draft: Draft, plan: Plan, first_host_id: int) -> Plan:
        """The same plan, with what is drawn for each sandbox."""
        own, size, limits = plan.copy(), draft.request.sizes, draft.spec.limits
        own["id"], own["tag_key"] = new_id(self._backend.name), planner.new_key()
        planner.rename(own, planner.hostname_of(draft.spec, draft.spec.id or own["id"]))
        if first_host_id:
            own["uid_map"] = own["gid_map"] = identity.slot_map(first_host_id, draft.uid)
        name = cgroups.group_name(own["id"], self._backend.label())
        group = cgroups.Group(self._backend.layout(), name, cpus=bool(limits.cpus))
        own["cgroup_dirs"], own["programs_cgroups"] = group.directories, group.of_programs
        own["cgroup_values"] = group.values(limits, size.memory_bytes, size.pids)
        own_filter = _filter_with(own["tag_key"], plan)
        if own_filter is None:
            raise SandboxLost("its filter cannot be given another key")
        own["seccomp"] = own_filter
        return own

    # -- the end of an unused one -------------------------------------------------------------

    def hear(self, zygote: Zygote, fd: int) -> None:
        """The other end of this socket has closed, or it may be time to discard it."""
        with self._lock:
            if fd == zygote.alarm_fd:
                self._alarmed = None
            prebuilt = self._prebuilt
            if prebuilt is None or prebuilt.zygote is not zygote:
                return
            left_s = self._until_s - time.monotonic()
            if fd != prebuilt.control.fileno() and left_s > 0:
                zygote.set_alarm(left_s)
                self._alarmed = zygote
                return
            self._discard(self._let_go(prebuilt))

    def drop(self) -> None:
        with self._lock:
            if self._prebuilt is not None:
                self._discard(self._let_go(self._prebuilt))

    def drop_over(self, snapshot_id: str) -> None:
        """Discard the prebuilt sandbox if it holds the files of this snapshot."""
        with self._lock:
            base = self._prebuilt.base if self._prebuilt else None
            if self._prebuilt is not None and base is not None and snapshot_id in base.ids:
                self._discard(self._let_go(self._prebuilt))

    def discard(self, prebuilt: Complete) -> None:
        with self._lock:
            self._discard(prebuilt)

    def lost(self, zygote: Zygote) -> None:
        """This zygote has died, and with it what it had prebuilt."""
        with self._lock:
            if self._alarmed is zygote:
                self._alarmed = None
            if self._prebuilt is not None and self._prebuilt.zygote is zygote:
                self._lost(self._let_go(self._prebuilt))

    def _let_go(self, prebuilt: Complete) -> Complete:
        self._prebuilt = None
        if prebuilt.zygote.owner == os.getpid():  # else it is our parent's
            prebuilt.zygote.unwatch(prebuilt.control.fileno())
        return prebuilt

    def _discard(self, prebuilt: Complete) -> None:
        """The zygote ends it before any later request of ours: its host ids can be given again."""
        if prebuilt.zygote.owner != os.getpid():
            self._lost(prebuilt)
            return
        prebuilt.control.close()
        prebuilt.close()
        try:
            prebuilt.zygote.drop(prebuilt.id, prebuilt.directories)
        except SandboxLost:
            self._lost(prebuilt)
            return
        if prebuilt.first_host_id:
            self._backend.host_ids().give_back(prebuilt.first_host_id)

    def _lost(self, prebuilt: Complete) -> None:
        """Its ids stay ours for good: its end cannot be seen."""
        prebuilt.control.close()
        prebuilt.close()
        if prebuilt.zygote.owner == os.getpid():  # else it is our parent's, and lives
            launcher_cgroups.remove(prebuilt.directories)
