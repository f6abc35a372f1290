"""The gVisor backend: provisions sandboxes through the keeper of this process."""

from __future__ import annotations

import os
import select
from _thread import allocate_lock, start_new_thread

from ...errors import InvalidRequest, IsolationError, RingfenceError, SandboxLost, Unsupported
from ...launcher import cgroups as launcher_cgroups
from ...launcher import wire
from ...launcher.spawn import KEEPER
from ...model.ids import new_id
from ..local import cgroups, identity, journal, template
from ..local.answers import Refused, answer
from ..local.host import host, out_of_files
from ..local.launched import Launched
from ..local.network import refused_by_kernel
from ..local.sizes import sizes
from . import plan as planning
from . import runsc
from .limits import KERNEL_BYTES, host_pids
from .network import GvisorNetwork
from .sandbox import GvisorSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...egress.client import Egress
    from ...launcher.hull import HullPlan
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.images import Held
    from ..local.sizes import Sizes
    from ..protocol import WarmSandbox
    from .runsc import Runsc

NAME = planning.NAME
_READY_S = 60.0
_DYING_MS = 30_000


class GvisorBackend:
    """See `Backend`.

    Args:
        path: The `runsc` to use; None looks on PATH and in the usual places.
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    name = NAME

    def __init__(
        self,
        *,
        path: str | None = None,
        state_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        self._egress = egress
        self._path, self._state_dir = path, state_dir
        self._lock, self._first_use = allocate_lock(), allocate_lock()
        self._keeper: Launched | None = None
        self._layout: cgroups.Layout | None = None
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, GvisorSandbox] = {}
        self._making: set[str] = set()

    def runsc(self) -> Runsc:
        """The program.

        Raises:
            BackendUnavailable: There is none.
        """
        return runsc.find(self._path)

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> GvisorSandbox:
        return self._provision(spec, content=-1)

    def _provision(self, spec: SandboxSpec, content: int, memory: str = "") -> GvisorSandbox:
        if spec.image is None:
            return self._provision_over(None, spec, content, memory)
        from ..local import images

        spec, image = images.hold(spec)
        try:
            return self._provision_over(image, spec, content, memory)
        except BaseException:
            image.close()
            raise

    def _provision_over(
        self, image: Held | None, spec: SandboxSpec, content: int, memory: str
    ) -> GvisorSandbox:
        planning.check(spec)
        program = self.runsc()
        sandbox_id = self._new_id(spec)
        try:
            return self._make(spec, sandbox_id, program, content, memory, image)
        except OSError as exc:
            if problem := out_of_files(exc):
                raise problem from exc
            raise
        finally:
            self._making.discard(sandbox_id)

    def _make(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        program: Runsc,
        content: int,
        memory: str,
        image: Held | None,
    ) -> GvisorSandbox:
        here, uid, keeper = host(), identity.uid_of(spec.user), self.keeper()
        first = self.host_ids().take() if here.trusted_root else 0
        draft = planning.Draft(spec, sandbox_id, uid, first, image)
        try:
            size = sizes(spec, here)
            if spec.network.needs_tls_termination:
                from ..local.trusted import trusted_for

                draft.trusted = trusted_for(spec.network, self.egress())
            plan = planning.make_plan(
                draft, here, program, size, has_content=content >= 0, memory=memory
            )
            draft.note = plan["note"] = journal.note(sandbox_id, plan["placeholders"]) or ""
            group = self._plan_limits(plan, spec, size)
            sandbox = self._launch(keeper, draft, plan, size, group, content, program, memory)
        except BaseException:
            journal.give_up(draft.protected, draft.note, sandbox_id, keeper)
            if first:
                self.host_ids().give_back(first)
            raise
        finally:
            draft.close()
        self._live[sandbox_id] = sandbox
        return sandbox

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(NAME)
        with self._lock:
            if spec.id in self._live or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
            self._making.add(spec.id)
        return spec.id

    def _plan_limits(self, plan: HullPlan, spec: SandboxSpec, size: Sizes) -> cgroups.Group:
        layout = self.layout()
        group = cgroups.Group(layout, cgroups.group_name(plan["id"]), cpus=bool(spec.limits.cpus))
        plan["cgroup_dirs"], plan["cgroup_version"] = group.directories, group.version
        plan["cgroup_values"] = group.values(
            spec.limits, size.memory_bytes + KERNEL_BYTES, host_pids(size.pids)
        )
        if spec.limits.cpus and not group.holds_cpus:
            allowed = {"cpu_limit", "*"}.intersection(spec.allow_degraded)
            if not allowed:
                raise Unsupported(
                    f"cpu_limit cannot be enforced here: {layout.why}",
                    backend=NAME,
                    operation="cpu_limit",
                    field="limits.cpus",
                    hint="run `ringfence doctor` for the fix, or allow it by name: "
                    "allow_degraded=['cpu_limit']",
                )
        return group

    def _launch(
        self,
        keeper: Launched,
        draft: planning.Draft,
        plan: HullPlan,
        size: Sizes,
        group: cgroups.Group,
        content: int,
        program: Runsc,
        memory: str,
    ) -> GvisorSandbox:
        errors = os.memfd_create("gvisor-says", os.MFD_CLOEXEC)
        ours, theirs = wire.socketpair()
        pidfd, sockets = -1, list[int]()
        try:
            reply, last = ours, 0
            # It waits there until the agent reads it, as its first message of all.
            if memory:
                reply = _wake(ours)
            else:
                wire.send(ours, planning.settings(draft, host(), size))
            passed = [theirs.fileno(), errors, *([content] if content >= 0 else []), *draft.fds]
            try:
                body, [pidfd] = keeper.ask("create", plan, passed)
            finally:
                theirs.close()
            if plan["network"] is not None:
                _, sockets = answer(ours, _READY_S)
            said = _ready(reply, errors)
            if memory:
                reply.close()
                last = int(said)
            ours.settimeout(None)
            sandbox = GvisorSandbox(
                self, draft, size, group, ours, int(body), pidfd, errors, keeper, program, last
            )
        except BaseException as exc:
            ours.close()
            for fd in (errors, *sockets):
                os.close(fd)
            if pidfd >= 0:
                _kill(pidfd)
            if isinstance(exc, Refused):
                raise _isolation_error(exc) from exc
            raise
        sandbox.join_network(GvisorNetwork(sandbox, sockets, draft.trusted))
        return sandbox

    def released(self, sandbox: GvisorSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        launcher_cgroups.remove(sandbox.group.directories)
        if sandbox.image is not None:
            sandbox.image.close()
        if sandbox.first_host_id:
            self.host_ids().give_back(sandbox.first_host_id)
        self._live.pop(sandbox.id, None)

    # -- shared parts -----------------------------------------------------------------------

    def keeper(self) -> Launched:
        """The keeper of this process; a new one when the last is gone or belongs to our parent."""
        with self._lock:
            if self._keeper is None or self._keeper.owner != os.getpid() or not self._keeper.alive:
                self._keeper = Launched("keeper", KEEPER)
                if self._host_ids is not None:
                    for lock in self._host_ids.locks():
                        self._keeper.tell("hold", None, [lock])
                start_new_thread(self._watch, (self._keeper,))
            return self._keeper

    def _watch(self, keeper: Launched) -> None:
        """Its death ends every sandbox; somebody must thaw the frozen and clear up."""
        keeper.wait()
        for sandbox in [each for each in self._live.values() if each.keeper is keeper]:
            sandbox.terminate()
        keeper.bury()

    def egress(self) -> Egress:
        """Who moves the data of forwarded connections."""
        if self._egress is not None:
            return self._egress()
        from ...egress.client import shared

        return shared()

    def layout(self) -> cgroups.Layout:
        """Where cgroups go; what dead processes left there is swept first."""
        with self._first_use:
            if self._layout is None:
                layout = cgroups.Layout()
                cgroups.sweep(layout)
                journal.sweep()
                self._layout = layout
            return self._layout

    def host_ids(self) -> identity.HostIds:
        with self._first_use:
            if self._host_ids is None:
                self._host_ids = identity.HostIds("/run/ringfence/ids", self._hold)
            return self._host_ids

    def _hold(self, lock_fd: int) -> None:
        """The keeper shares the lock: ids stay ours until its last sandbox is gone."""
        self.keeper().tell("hold", None, [lock_fd])

    # -- the rest of the contract -------------------------------------------------------------

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def prewarm(self, spec: SandboxSpec) -> WarmSandbox:
        planning.check(spec)
        raise Unsupported(
            "gVisor decides mounts and limits when it starts",
            backend=NAME,
            operation="prewarm",
        )

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> GvisorSandbox:
        from dataclasses import replace

        catalogue = self.catalogue()
        _saved, taken_under, content = catalogue.open(snapshot_id)
        try:
            memory = catalogue.memory_of(snapshot_id)
            # The id is not part of what it was.
            if memory and spec is not None and replace(spec, id=taken_under.id) != taken_under:
                raise InvalidRequest(
                    "what goes on with its memory goes on as it was",
                    field="spec",
                    hint="restore it without a spec",
                )
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            return self._provision(again, content, memory)
        finally:
            os.close(content)

    def snapshot(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save(sandbox, self.catalogue(), metadata)

    def checkpoint(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save_with_memory(sandbox, self.catalogue(), metadata)

    def snapshots(self) -> list[Snapshot]:
        return self.catalogue().list()

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.catalogue().delete(snapshot_id)

    def catalogue(self) -> Catalogue:
        """Where snapshots are kept; made with the first one."""
        from ...snapshots.catalogue import Catalogue, default_directory

        return Catalogue(self._state_dir or default_directory(), NAME)

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.terminate()
        with self._lock:
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None
        if self._host_ids is not None:
            self._host_ids.close()


def _wake(control: wire.Socket) -> wire.Socket:
    """Where the restored agent will answer: it gets a name that no other sandbox has."""
    ours, theirs = wire.socketpair()
    hostname = f"{template.HOSTNAME}-{os.urandom(4).hex()}"
    wire.send(control, ("wake", hostname), [theirs.fileno()])
    theirs.close()
    return ours


def _ready(control: wire.Socket, errors: int) -> bytes:
    """Wait for the agent's first word.

    Raises:
        IsolationError: gVisor did not start, with its own words for it.
    """
    try:
        return answer(control, _READY_S)[0]
    except SandboxLost as exc:
        said = last_words(errors)
        raise IsolationError(
            f"gVisor did not start: {said or 'it ended without a word'}",
            hint="run `ringfence doctor` to see what this host allows",
        ) from exc


def last_words(errors: int) -> str:
    """The last lines of what gVisor, or the agent in it, wrote to its standard error."""
    text = os.pread(errors, 1 << 16, max(0, os.fstat(errors).st_size - (1 << 16)))
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:1000]


def _kill(pidfd: int) -> None:
    import signal

    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(_DYING_MS)
    os.close(pidfd)


def _isolation_error(exc: Refused) -> RingfenceError:
    if (exc.strerror or "").startswith("network "):
        return refused_by_kernel(exc)
    hint = "run `ringfence doctor` to see what this host allows"
    if (exc.strerror or "").startswith("create") and exc.errno in (1, 13, 28, 38):
        hint = (
            "this host refuses user namespaces: check sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
        )
    return IsolationError(f"the sandbox was not started: {exc.strerror or exc}", hint=hint)
