"""Loops of creates: the next sandbox of the same kind is prebuilt while the last one is in use.

It is built while the last one runs, it is nobody's, and it is gone a moment later unless somebody
came for it. See decisions 0016 and 0043.
"""

from __future__ import annotations

import os
import time
from _thread import allocate_lock

from ....errors import SandboxLost
from ....launcher import cgroups as launcher_cgroups
from ....launcher import wire
from ....model.base.ids import new_id
from ....model.limits import Limits
from ....policy import filters
from ...local.host import cgroups, identity
from .. import planner
from .prebuilt import Prebuilt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....launcher.plan import Plan, Shape
    from ..planner import Draft
    from ..request import Kind, Request
    from ..runtime import Runtime
    from ..zygote import Zygote

KEEP_S = 0.25  # creates this close together are a burst; so long is one kept that nobody comes for
CALM_S = 0.008  # before the next one is built: a first command that ends soon has ended by then
_HASTE_S = 0.0005  # who makes one so soon after the end of another will make the next as soon
MOST_MOUNTS = 48  # their descriptors travel in one message: launcher.wire takes 64
# Of a plan: what is drawn for each sandbox; and the template, which the kind tells already.
_EACH_ONES_OWN = (
    *("id", "uid_map", "gid_map", "cgroup_dirs", "cgroup_values", "tag_key", "seccomp", "waits"),
    *("programs_cgroup", "template"),
)
_SWITCH = "RINGFENCE_AHEAD"
_OFF = ("0", "no", "off", "false")


class Ahead(Prebuilt):
    """A prebuilt sandbox for the next create of a loop.

    Attributes:
        until_s: How long it is kept.
    """

    def __init__(
        self,
        owner: Burst,
        sandbox_id: str,
        kind: Kind,
        first_host_id: int,
        zygote: Zygote,
        control: wire.Socket,
    ) -> None:
        super().__init__(sandbox_id, kind, first_host_id, zygote, control)
        self._owner, self.until_s = owner, time.monotonic() + KEEP_S

    def discard(self) -> None:
        self._owner.end(self)


def are_alike(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ only in random values, and neither depends on user data."""
    if _common(plan) != _common(other) or not plan["releases_idle_pages"] or plan["network"]:
        return False  # a user's policy or a network makes it unique
    if not plan["seccomp"] or not other["seccomp"]:
        return plan["seccomp"] == other["seccomp"]
    try:
        expected = filters.with_key(plan["seccomp"], other["tag_key"], plan["tag_key"])
    except ValueError:
        return False  # its key occurs elsewhere in the filter and cannot be replaced
    return expected == other["seccomp"]


def _common(plan: Plan) -> dict[str, object]:
    return {name: value for name, value in plan.items() if name not in _EACH_ONES_OWN}


class Burst:
    """The last create's kind, and the prebuilt sandbox. Thread-safe.

    Args:
        on: None leaves it to the environment, RINGFENCE_AHEAD=off.
    """

    def __init__(self, backend: Runtime, on: bool | None) -> None:
        self._backend = backend
        self._on = os.environ.get(_SWITCH, "").lower() not in _OFF if on is None else on
        self._lock = allocate_lock()
        self._ahead: Ahead | None = None
        self._last: tuple[Kind, Zygote] | None = None
        self._last_plan: Plan | None = None
        self._last_s = 0.0
        self._over_s = 0.0  # when one ended last
        self._calm_s = CALM_S

    def take(self, request: Request, zygote: Zygote) -> Ahead | None:
        """Return the prebuilt sandbox if it can become what is asked for; else end it."""
        if request.image is not None:
            return None
        with self._lock:
            ahead = self._let_go()
            in_haste = time.monotonic() - self._over_s < _HASTE_S or self._backend.others_wait
            self._calm_s = 0.0 if in_haste else CALM_S
        if ahead is None:
            return None
        if ahead.zygote is not zygote:
            self._lost(ahead)
            return None
        # It has an id of its own.
        spec = request.spec
        fits = request.kind == ahead.kind and spec.id is None and len(spec.mounts) <= MOST_MOUNTS
        if fits and time.monotonic() < ahead.until_s:
            return ahead
        self.end(ahead)
        return None

    def over(self) -> None:
        """A sandbox has ended."""
        self._over_s = time.monotonic()

    def _let_go(self) -> Ahead | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.zygote.owner == os.getpid():  # else it is our parent's
            ahead.zygote.unwatch(ahead.control.fileno())
        return ahead

    def end(self, ahead: Ahead) -> None:
        """Discard the prebuilt sandbox. The zygote ends it before any later request of ours."""
        ahead.control.close()
        try:
            ahead.zygote.drop(ahead.id, ahead.directories)
        except SandboxLost:
            self._lost(ahead)
            return
        if ahead.first_host_id:
            self._backend.host_ids().give_back(ahead.first_host_id)

    def lapsed(self, zygote: Zygote, fd: int) -> None:
        """The other end of this socket has closed: it is too late for the one ahead, or it has failed."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or ahead.zygote is not zygote or ahead.control.fileno() != fd:
                return  # somebody was quicker
            self._let_go()
        self.end(ahead)

    def lost(self, zygote: Zygote) -> None:
        """This zygote has died, and with it the one ahead."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or ahead.zygote is not zygote:
                return
            self._let_go()
        self._lost(ahead)

    def _lost(self, ahead: Ahead) -> None:
        """Its ids stay ours for good: nobody can tell us when it has ended."""
        ahead.control.close()
        if ahead.zygote.owner == os.getpid():  # else it is our parent's, and lives
            launcher_cgroups.remove(ahead.directories)

    def tell(
        self,
        zygote: Zygote,
        reply: wire.Socket | None,
        verb: str,
        shape: Shape,
        kind: Kind | None,
        draft: Draft,
        plan: Plan,
    ) -> None:
        """Tell the zygote of one sandbox, and in a burst of the next one too.

        Args:
            reply: What the sandbox has at its end; None when it has that, and its plan, already.
            kind: None for one from a pool: the next one comes from there, too.

        Raises:
            SandboxLost: The zygote is gone.
        """
        if kind is None:
            self._tell(zygote, reply, verb, shape, None, draft.fds, [])
            return
        with self._lock:  # so that nobody asks for the next one before the zygote has heard of it
            now = time.monotonic()
            is_burst = self._last == (kind, zygote) and now - self._last_s < KEEP_S
            is_burst = is_burst and draft.image is None  # its files are known to its own plan only
            is_burst = (
                is_burst and not shape["id_helpers"]
            )  # of those there are few: none for nobody
            self._last, self._last_s = (kind, zygote), now
            before, self._last_plan = self._last_plan, plan
            if not (self._on and is_burst and self._ahead is None):
                self._tell(zygote, reply, verb, shape, None, draft.fds, [])
                return
            ours, theirs = wire.socketpair()
            name = new_id(self._backend.name)
            ahead = Ahead(self, name, kind, self._take_ids(shape), zygote, ours)
            try:
                next_shape = self._next(shape, ahead, draft)
                if before is not None and are_alike(plan, before):
                    _make_twin(ahead, next_shape, plan, draft)
                self._tell(zygote, reply, verb, shape, next_shape, draft.fds, [theirs.fileno()])
            except BaseException:
                ours.close()
                if ahead.first_host_id:
                    self._backend.host_ids().give_back(ahead.first_host_id)
                raise
            finally:
                theirs.close()
            self._ahead = ahead
            zygote.watch(ours.fileno())

    def _tell(
        self,
        zygote: Zygote,
        reply: wire.Socket | None,
        verb: str,
        shape: Shape,
        next_shape: Shape | None,
        pinned: list[int],
        offer: list[int],
    ) -> None:
        times = self._calm_s, KEEP_S
        if reply is None:
            zygote.note("claimed", (shape["id"], next_shape, times), offer)
        else:
            zygote.tell_from(reply, verb, (shape, next_shape, times), [*offer, *pinned])

    def _take_ids(self, shape: Shape) -> int:
        return self._backend.host_ids().take() if shape["trusted_root"] else 0

    def _next(self, last: Shape, ahead: Ahead, draft: Draft) -> Shape:
        """The same again, with nothing that is the last one's own."""
        shape = last.copy()
        shape["id"] = ahead.id
        if ahead.first_host_id:
            shape["uid_map"] = shape["gid_map"] = identity.slot_map(ahead.first_host_id, draft.uid)
        # Only settings that every plan overwrites where it differs: so not the processors.
        name = cgroups.group_name(ahead.id, self._backend.label())
        group = cgroups.Group(self._backend.layout(), name, cpus=False)
        size = draft.request.sizes
        shape["cgroup_dirs"] = ahead.directories = group.directories
        shape["programs_cgroup"] = group.of_programs
        shape["cgroup_values"] = group.values(Limits(), size.memory_bytes, size.pids)
        ahead.values = shape["cgroup_values"]
        shape["trees"], shape["placeholders"], shape["note"] = [], [], ""
        return shape


def _make_twin(ahead: Ahead, shape: Shape, plan: Plan, draft: Draft) -> None:
    """Have it become what the last two were: its plan lies there before it is built."""
    if draft.spec.limits.cpus or draft.protected or plan["trees"] or plan["placeholders"]:
        return  # that takes the zygote, or what is somebody's own
    twin: Plan = {**plan, **shape, "waits": True}
    twin["template"], twin["tag_key"] = b"", planner.new_key()
    if plan["seccomp"]:
        try:
            twin["seccomp"] = filters.with_key(plan["seccomp"], twin["tag_key"], plan["tag_key"])
        except ValueError:
            return  # see `are_alike`
    wire.send(ahead.control, twin)
    ahead.plan = twin
