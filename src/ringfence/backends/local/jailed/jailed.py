"""A sandbox in a jailed program with its own kernel; the host and the guest's kernel both count its usage."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock, get_ident

from ....errors import LifecycleError, Unsupported
from ....launcher import wire
from ....model.state import State
from ....model.stats import SandboxStats
from ...optional import AttendedExec, Continuable
from .. import journal
from ..agents.guest import GuestExec, GuestSandbox
from ..host.facts import host
from ..mounts.mounting import OrNothing
from ..sandbox import InCgroup
from . import saving, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ....model.execs.exec import ExecRequest
    from ....model.mount import Mount
    from ....model.session import ResolvedMount, Snapshot
    from ....model.spec import SandboxSpec
    from ....snapshots.catalogue import Catalogue
    from ...optional import ProcessTemplate
    from ...protocol import BackendExec, BackendSandbox
    from ..launched import Launched
    from ..mounts.protect import Protected
    from .jail_mounts import JailMounts


class JailedSandbox(InCgroup, GuestSandbox, Continuable, AttendedExec):
    """The part of `BackendSandbox` that is the same for all of them.

    Attributes:
        jailer: Who has started the program, and can let somebody in to it.
        protected: What keeps paths in its mounts as they are; `note` is the journal's of that.
        can_change_network: What is restored from it may have another network policy.
        held_by: Thread that keeps it from being asked for anything else, until it is saved; 0: none.
    """

    jailer: Launched
    protected: list[Protected]
    note: str | None
    can_change_network = False
    held_by = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gate = allocate_lock()

    # -- execs, and what of them can be saved ------------------------------------------------------

    def start(self, request: ExecRequest) -> GuestExec:
        """Start what may go on in forks. A terminal cannot be saved."""
        return self._start(request, whole.RelayedExec if request.pty is None else GuestExec)

    def start_attended(self, request: ExecRequest, label: str = "") -> GuestExec:
        """Start what a caller waits for: nothing is between it and its streams."""
        del label
        return self._start(request, GuestExec)

    def attend(self, run: GuestExec) -> None:
        """Count an exec that began in the sandbox that was saved."""
        self._live[run.number] = run

    def running(self) -> Mapping[str, str]:
        return {run.id: run.facts[0] for run in list(self._live.values())}

    def template(self, run: BackendExec) -> ProcessTemplate:
        if self.state is State.SUSPENDED:
            raise whole.refused(self, f"{run.id} cannot be copied: the sandbox is suspended")
        if not isinstance(run, whole.RelayedExec):
            has_terminal = isinstance(run, GuestExec) and run.stderr is None
            why = "it has a terminal" if has_terminal else "its caller waits for its end"
            raise whole.refused(self, f"{run.id} cannot be copied: {why}")
        return whole.WholeTemplate(self, run)

    def check_copy(self, spec: SandboxSpec) -> None:
        field = saving.kept_inside(spec, self.spec, network=self.can_change_network)
        if field:
            raise whole.refused(self, f"{field} of what runs cannot be changed")

    def hold(self, templates: Sequence[ProcessTemplate]) -> None:
        why, _ = self.not_saved()
        if self.spec.secrets:
            why = why or "its programs hold secret placeholders of this sandbox"
        if self.state not in (State.PROVISIONED, State.RUNNING):
            why = f"the sandbox is {self.state.value}"
        if why:
            raise whole.refused(self, why)
        with self._gate:
            if self.held_by:
                raise whole.refused(self, "another thread is saving it")
            self.held_by = get_ident()
        try:
            whole.hold(self, templates)
        except BaseException:
            self.held_by = 0
            raise

    @property
    def is_held(self) -> bool:
        """True if nothing inside holds what is the host's: the next snapshot has its memory."""
        return self.held_by == get_ident()

    def send(self, message: object, fds: list[int], control: wire.Socket | None = None) -> None:
        """See `LocalSandbox`. What came after the agent let go of the host would be lost with it.

        Raises:
            LifecycleError: It is being saved with its memory.
        """
        with self._gate:
            if self.held_by not in (0, get_ident()):
                raise LifecycleError(
                    "the sandbox is being saved with its memory", hint="try again in a second"
                )
            super().send(message, fds, control)

    def snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None = None) -> Snapshot:
        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("snapshot")
            if self.is_held:
                try:
                    return self.checkpoint(metadata)
                finally:
                    self.held_by = 0
            return self._snapshot(metadata, catalogue)

    def _snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None) -> Snapshot:
        """Save the files, with the lock held."""
        raise NotImplementedError

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        with self._lock:
            self._require(self._state, "checkpoint")
            if self._state is State.SUSPENDED:
                raise LifecycleError("checkpoint: the sandbox is suspended", hint="resume it first")
            why, hint = self.not_saved()
            if why:
                raise Unsupported(why, backend=self.backend.name, operation="checkpoint", hint=hint)
            return self._checkpoint(metadata)

    def _checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        """Save the files and the memory, with the lock held, and end the sandbox."""
        raise NotImplementedError

    def not_saved(self) -> tuple[str, str]:
        """Return why its memory cannot be saved, and what to do; empty if it can."""
        raise NotImplementedError

    def move(self, templates: Sequence[ProcessTemplate], sandbox: BackendSandbox) -> None:
        assert isinstance(sandbox, JailedSandbox)
        for each in templates:
            assert isinstance(each, whole.WholeTemplate)
            each.home = sandbox
            each.release()

    def number_of(self, template: ProcessTemplate) -> int:
        assert isinstance(template, whole.WholeTemplate)
        return template.run.number

    def rejoin(self, number: int, request: ExecRequest) -> BackendExec:
        cwd = self.working_directory(request.cwd)
        return whole.rejoin(self, number, request, request.argv[0], cwd)

    def _read_stats(self, state: State) -> SandboxStats:
        """The host's counters for all of the program; the guest's for what is inside."""
        pids = memory = disk = inodes = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids, memory, disk, inodes = (int(word) for word in self.ask("usage")[0].split())
        return SandboxStats(
            state=state,
            cpu_ns=self.group.cpu_ns(),
            memory_bytes=memory if memory is not None else self.group.memory_bytes(),
            peak_memory_bytes=self.group.peak_memory_bytes(),
            pids=pids,
            forks_refused=self.crowded
            or None,  # what the guest's kernel refuses by itself is not told
            disk_bytes=disk,
            inodes=inodes,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self._degraded(),
        )

    def enter(self, op: str, request: Mapping[str, Any], fds: list[int]) -> tuple[bytes, list[int]]:
        """Let a helper of the jailer's go into the jail; see `launcher.jail.aboard`.

        Raises:
            Refused: As the kernel told the helper.
            SandboxLost: The sandbox ended meanwhile.
        """
        pidfd = self.borrow_pidfd()
        try:
            return self.jailer.ask("enter", {"op": op, **request}, [pidfd, *fds], timeout_s=None)
        finally:
            os.close(pidfd)

    # -- mounts ---------------------------------------------------------------------------------

    def attach(self, mount: Mount) -> ResolvedMount:
        with self._lock:
            self._require(self._state, "mount")
            more = self._more_mounts()
            with OrNothing(mount.target, more):
                self._attach(mount, more)
            self._keep(more)
            self.mounts.append(more.mounts[-1])
            return more.mounts[-1]

    def _more_mounts(self) -> JailMounts:
        raise NotImplementedError

    def _attach(self, mount: Mount, more: JailMounts) -> None:
        """Do it, or leave nothing of it.

        Raises:
            InvalidRequest: The source does not exist, or it cannot be mounted there.
            Refused: As the kernel told it.
        """
        raise NotImplementedError

    def mount_in_jail(self, more: JailMounts) -> None:
        made = [made for each in self.protected for made in each.placeholders]
        request = {
            "trusted_root": host().trusted_root,
            "uid": 0,
            "gid": 0,
            "trees": more.mounted,
            "steps": more.after,
            "id": self.id,
            "placeholders": [*made, *more.placeholders],
            "note": (journal.path_of(self.id) or "") if more.placeholders else self.note or "",
        }
        self.enter("mount", request, more.fds)

    def _keep(self, more: JailMounts) -> None:
        """Keep a mount's protection until the end of the sandbox."""
        self.protected += more.protected
        if more.protected:
            made = [made for each in self.protected for made in each.placeholders]
            journal.erase(self.note)
            self.note = journal.note(self.id, made)

    def _degraded(self) -> tuple[str, ...]:
        """Limits that were asked for, and do not hold."""
        asked = self.spec.limits.cpus and not self.group.holds_cpus
        return ("cpu_limit",) if asked else ()
