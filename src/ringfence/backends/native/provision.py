"""Creation of a native sandbox, from a checked request to a sandbox that is ready for use."""

from __future__ import annotations

import errno

from ...errors import SandboxLost
from ..local import journal
from ..local.acquired import Acquired
from ..local.answers import Refused, answer
from ..local.host import cgroups
from ..local.host.facts import host
from ..local.mounts import template
from . import planner
from .prebuilt.prebuilt import start
from .request import require_allowed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher import wire
    from ...launcher.plan import Plan, Shape
    from ..local.mounts.disks import Disk
    from .planner import Draft
    from .prebuilt.prebuilder import Prebuilder
    from .prebuilt.prebuilt import Prebuilt
    from .request import Request
    from .runtime import Runtime
    from .sandbox import NativeSandbox
    from .zygote import Zygote

READY_S = 60.0
ENDED = "the first process of the sandbox ended during creation"
CRASHED = (
    "create a new sandbox; if that fails too, the helper process crashes on this Python or kernel: "
    "report what it printed on stderr with `ringfence doctor --json`"
)
_BEHIND_THE_CGROUP = 8  # processes


class Provision:
    """A single create: plan, acquire, launch, hand over.

    What it acquires (host ids, placeholders and their note, cgroups, a control socket) is given back, in
    reverse order, where it does not come to the hand over. From then on the sandbox owns it.

    Args:
        prebuilt: Sandbox to turn into it, discarded where that fails; None: build one now.
        prebuilder: Prebuilds the next one; None: the pool does.
    """

    _acquired: Acquired
    _zygote: Zygote
    _shape: Shape

    def __init__(
        self,
        runtime: Runtime,
        request: Request,
        prebuilt: Prebuilt | None,
        prebuilder: Prebuilder | None,
    ) -> None:
        self._runtime, self._request = runtime, request
        self._prebuilt, self._prebuilder = prebuilt, prebuilder

    def run(self) -> NativeSandbox:
        """Make the sandbox; on failure, leave nothing behind.

        Raises:
            SandboxLost: The zygote, or the prebuilt sandbox, is gone.
        """
        prebuilt, sandbox_id = self._prebuilt, ""
        with Acquired() as self._acquired:
            if prebuilt is not None:
                self._acquired.callback(prebuilt.discard)
            try:
                self._zygote = prebuilt.zygote if prebuilt else self._runtime.zygote()
                spec = self._request.spec
                plan_id = prebuilt.id if prebuilt else ""
                is_named = spec.id not in (None, plan_id)
                sandbox_id = plan_id if plan_id and not is_named else self._runtime.new_id(spec)
                draft = planner.Draft(self._request, plan_id or sandbox_id, self._take_ids())
                made = self._make(draft)
                self._acquired.pop_all()
                return made
            finally:
                self._runtime.made(sandbox_id)

    def _make(self, draft: Draft) -> NativeSandbox:
        try:
            plan = self._plan(draft)
            sandbox, fds = self._launch(draft, plan)
        finally:
            draft.close()
        if draft.disk is not None:
            draft.disk.close()
        self._hand_over(sandbox, fds)
        if self._prebuilder is not None:
            self._prebuilder.follow(draft, plan, self._shape, self._zygote)
        return sandbox

    # -- plan and acquire -------------------------------------------------------------------

    def _take_ids(self) -> int:
        if self._prebuilt is not None:
            return self._prebuilt.first_host_id
        first = self._runtime.take_host_ids(self._request.profile)
        if first:
            self._acquired.callback(self._runtime.host_ids().give_back, first)
        return first

    def _plan(self, draft: Draft) -> Plan:
        runtime, network = self._runtime, draft.spec.network
        if network.needs_tls_termination:
            from ..local.mounts.trusted import trusted_for

            draft.trusted = trusted_for(network, runtime.egress())
        self._acquired.callback(self._give_up, draft)
        if draft.request.sizes.on_disk:
            draft.disk = self._disk(draft)
        plan = planner.make_plan(draft, host())
        plan["placeholders"] = [made for part in draft.protected for made in part.placeholders]
        draft.note = journal.note(draft.id, plan["placeholders"], runtime.label())
        plan["note"] = draft.note or ""
        plan_limits(runtime, draft, plan)
        self._acquired.callback(self._zygote.clear_up, draft.id, draft.group.directories, [])
        return plan

    def _disk(self, draft: Draft) -> Disk:
        if self._prebuilt is not None and self._prebuilt.disk is not None:
            return self._prebuilt.disk
        disk = make_disk(self._runtime, draft)
        self._acquired.callback(disk.remove)
        return disk

    def _give_up(self, draft: Draft) -> None:
        journal.give_up(draft.protected, draft.note, draft.id, self._zygote)

    # -- launch and hand over ---------------------------------------------------------------

    def _launch(self, draft: Draft, plan: Plan) -> tuple[NativeSandbox, list[int]]:
        """The sandbox that is there now, and descriptors of its network."""
        prebuilt, self._shape = self._prebuilt, planner.shape_of(plan)
        plan["template"] = b""  # the zygote knows it
        if prebuilt is None:
            ours = start(self._zygote, "create", plan, self._shape, draft.fds)
        else:
            ours = prebuilt.bind(plan, self._shape, draft.fds)
        self._acquired.callback(ours.close)
        # While the kernel builds the sandbox: then no create waits for this.
        from .sandbox import NativeSandbox

        sandbox = NativeSandbox(self._runtime, draft, ours, plan, self._zygote)
        # Its names are in no snapshot, and so make no difference to one.
        has_more = plan["steps"] and plan["steps"] != template.with_hostname(plan["hostname"])
        sandbox.furniture = b"" if has_more or draft.base else self._shape["template"]
        self._runtime.handover.expect(sandbox)
        if prebuilt is not None and prebuilt.meanwhile is not None:
            prebuilt.meanwhile()
        body, fds = _first_answer(ours)
        ours.settimeout(None)
        sandbox.begun(int(body), fds[0], fds[1:3], fds[3:])
        # From here on its end gives back what was acquired for it.
        self._acquired.pop_all()
        self._acquired.callback(sandbox.terminate)
        return sandbox, fds[3:]

    def _hand_over(self, sandbox: NativeSandbox, sockets: list[int]) -> None:
        """Let it be found, counted and served."""
        if self._prebuilt is not None:
            if sandbox.control is not self._prebuilt.control:
                self._prebuilt.control.close()  # the zygote gave it another one
            self._prebuilt.close()
        self._runtime.handover.begin(sandbox, sockets)
        sandbox.serve_network()
        self._runtime.count(sandbox)


def make_disk(runtime: Runtime, draft: Draft) -> Disk:
    from ..local.mounts import disks

    return disks.make(
        draft.id, runtime.label(), draft.request.sizes, draft.first_host_id, draft.spec
    )


def plan_limits(runtime: Runtime, draft: Draft, plan: Plan) -> None:
    """Put limits of memory, processes and processors into `plan`, and the cgroups into both."""
    spec, size, layout = draft.spec, draft.request.sizes, runtime.layout()
    name = cgroups.group_name(draft.id, runtime.label())
    draft.group = group = cgroups.Group(layout, name, cpus=bool(spec.limits.cpus))
    plan["cgroup_dirs"], plan["cgroup_version"] = group.directories, group.version
    plan["programs_cgroups"] = group.of_programs
    plan["cgroup_values"] = group.values(spec.limits, size.memory_bytes, size.pids)
    if spec.limits.cpus and not group.holds_cpus:
        require_allowed(
            spec, "cpu_limit", f"no cgroup to limit processors with: {layout.why}", "limits.cpus"
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


def _first_answer(control: wire.Socket) -> tuple[bytes, list[int]]:
    try:
        return answer(control, READY_S)
    except SandboxLost as exc:
        raise SandboxLost(ENDED, hint=CRASHED) from exc
    except Refused as exc:
        if exc.errno in (errno.ESRCH, errno.EPIPE, errno.ECONNRESET):
            raise SandboxLost(f"{ENDED}: {exc.strerror}", hint=CRASHED) from exc
        from ..local.refusals import error_of

        raise error_of(exc) from exc
