"""Creation of a native sandbox: plan it, send it to the zygote or a prebuilt sandbox, wait."""

from __future__ import annotations

import errno

from ...errors import SandboxLost
from ...launcher import wire
from ..local import journal, sizes
from ..local.answers import Refused, answer
from ..local.host import cgroups, identity
from ..local.host.facts import host
from . import planner
from .prebuilt.burst import are_alike, kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.plan import Plan
    from ...model.spec import SandboxSpec
    from ..local.mounts.images import Held
    from .prebuilt.burst import Burst
    from .prebuilt.prebuilt import Prebuilt
    from .profiles import Profile
    from .runtime import Runtime
    from .sandbox import NativeSandbox
    from .zygote import Zygote

READY_S = 60.0
ENDED = "the sandbox's first process ended while it was made"
CRASHED = (
    "create a new sandbox; if that fails too, the helper process crashes on this Python or kernel: "
    "report what it printed on stderr with `ringfence doctor --json`"
)
_BEHIND_THE_CGROUP = 8  # processes


def make(
    backend: Runtime,
    burst: Burst,
    spec: SandboxSpec,
    profile: Profile,
    sandbox_id: str,
    zygote: Zygote,
    warm: Prebuilt | None = None,
    image: Held | None = None,
) -> NativeSandbox:
    """Make a sandbox ready for use; on failure, leave nothing behind.

    Args:
        warm: Prebuilt sandbox to turn into it; None: build it now.
        image: The held image of its root; the sandbox owns it from then on.

    Raises:
        SandboxLost: The zygote, or the prebuilt sandbox, is gone.
    """
    uid, here = identity.uid_of(spec.user), host()
    first = warm.first_host_id if warm else backend.take_host_ids(profile)
    draft = planner.Draft(spec, sandbox_id, uid, first)
    draft.image = image
    directories: list[str] = []
    try:
        if spec.network.needs_tls_termination:
            from ..local.mounts.trusted import trusted_for

            draft.trusted = trusted_for(spec.network, backend.egress())
        plan = planner.make_plan(draft, here, profile)
        plan["placeholders"] = [made for part in draft.protected for made in part.placeholders]
        draft.note = journal.note(sandbox_id, plan["placeholders"], backend.label())
        plan["note"] = draft.note or ""
        size = sizes.sizes(spec, here)
        group = plan_limits(backend, plan, spec, size)
        directories = group.directories
        sandbox = _launch(backend, burst, warm, zygote, draft, plan, profile, size, group)
        if warm is not None and sandbox.control is not warm.control:
            warm.control.close()  # the zygote gave it another one
    except BaseException:
        journal.give_up(draft.protected, draft.note, sandbox_id, zygote)
        zygote.clear_up(sandbox_id, directories, [])
        if first and not warm:
            backend.host_ids().give_back(first)
        raise
    finally:
        draft.close()
    backend.count(sandbox)
    return sandbox


def plan_limits(
    backend: Runtime, plan: Plan, spec: SandboxSpec, size: sizes.Sizes
) -> cgroups.Group:
    """Put limits of memory, processes and processors into `plan`; the cgroups that will hold them."""
    layout = backend.layout()
    name = cgroups.group_name(plan["id"], backend.label())
    group = cgroups.Group(layout, name, cpus=bool(spec.limits.cpus))
    plan["cgroup_dirs"], plan["cgroup_version"] = group.directories, group.version
    plan["programs_cgroup"] = group.of_programs
    plan["cgroup_values"] = group.values(spec.limits, size.memory_bytes, size.pids)
    if spec.limits.cpus and not group.holds_cpus:
        planner.require_allowed(
            spec,
            "cpu_limit",
            f"no cgroup to limit processors with: {layout.why}",
            "limits.cpus",
        )
    import resource

    if layout.version:
        # The cgroup says no first, because it counts how often.
        processes = size.pids + _BEHIND_THE_CGROUP
        plan["rlimits"].append((resource.RLIMIT_NPROC, processes, processes))
    else:
        # Counted per user namespace since Linux 5.14, so it bounds this sandbox alone.
        own = size.pids + cgroups.OWN_PROCESSES
        plan["rlimits"].append((resource.RLIMIT_NPROC, own, own))
        plan["memory_watchdog_bytes"] = size.memory_bytes
        plan["rlimits"].append((resource.RLIMIT_DATA, size.memory_bytes, size.memory_bytes))
    return group


def _first_answer(control: wire.Socket) -> tuple[bytes, list[int]]:
    try:
        return answer(control, READY_S)
    except SandboxLost as exc:
        raise SandboxLost(ENDED, hint=CRASHED) from exc


def _launch(
    backend: Runtime,
    burst: Burst,
    warm: Prebuilt | None,
    zygote: Zygote,
    draft: planner.Draft,
    plan: Plan,
    profile: Profile,
    size: sizes.Sizes,
    group: cgroups.Group,
) -> NativeSandbox:
    shape, verb = planner.shape_of(plan), "claim" if warm else "create"
    is_straight = warm is not None and warm.takes(plan)
    plan["template"] = b""  # the zygote knows it
    twin = warm.plan if warm else None
    if twin is not None:
        if not (is_straight and are_alike(plan, twin)):
            raise SandboxLost("the prebuilt sandbox does not fit the plan any more")
        plan["tag_key"], plan["seccomp"] = twin["tag_key"], twin["seccomp"]
    ours, theirs = (warm.control, None) if warm and is_straight else wire.socketpair()
    try:
        try:
            send_plan(ours, plan if twin is None else None)
            kind = None if warm and warm.is_pooled else kind_of(draft.spec, profile)
            burst.tell(zygote, theirs, verb, shape, kind, draft, plan)
        finally:
            if theirs:
                theirs.close()
        # While the kernel builds the sandbox: then nobody has to wait for this.
        from .sandbox import NativeSandbox

        sandbox = NativeSandbox(backend, draft, profile, size, group, ours, plan, zygote)
        backend.handover.expect(sandbox)
        if warm is not None and warm.meanwhile is not None:
            warm.meanwhile()
        body, fds = _first_answer(ours)
    except Refused as exc:
        ours.close()
        if exc.errno in (errno.ESRCH, errno.EPIPE, errno.ECONNRESET):
            raise SandboxLost(f"{ENDED}: {exc.strerror}", hint=CRASHED) from exc
        from ..local.refusals import error_of

        raise error_of(exc) from exc
    except BaseException:
        ours.close()
        raise
    ours.settimeout(None)
    sockets = fds[3:]
    sandbox.begun(int(body), fds[0], fds[1:3], sockets)
    backend.handover.begin(sandbox, sockets)
    sandbox.serve_network()
    return sandbox


def send_plan(control: wire.Socket, plan: Plan | None) -> None:
    """Put it where the sandbox at the other end will find it; None: the one it has already is to hold.

    Raises:
        SandboxLost: Nobody is there any more.
    """
    try:
        wire.send(control, plan)
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
        raise SandboxLost("the sandbox has ended", hint="create a new one") from exc
