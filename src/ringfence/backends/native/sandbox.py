"""A native sandbox, seen from the host."""

from __future__ import annotations

import os
import select
import time

from ...errors import SandboxLost, Unsupported
from ...launcher import cgroups as launcher_cgroups
from ...launcher import wire
from ...model.execs.exec import ExecRequest
from ...model.session import ResolvedMount
from ...model.state import State
from ...model.stats import SandboxStats
from ..local import journal
from ..local.acquired import Acquired
from ..local.agents.execs import LocalExec
from ..local.agents.streams import lend, open_channels
from ..local.host import identity
from ..local.host.facts import host
from ..local.session import environment
from ..optional import BootIdentity, CpuClock, DurableSandbox, Forkable, Layered
from .live import LiveSandbox
from .network import NativeNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from ...launcher.plan import Plan
    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.net.netlog import NetworkEvent
    from ...model.net.network import NetworkPolicy
    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue
    from ...snapshots.differences import Part
    from ..optional import ProcessTemplate
    from ..protocol import BackendExec
    from .files import NativeFiles
    from .live import Home
    from .planner import Draft
    from .zygote import Zygote

_ASK_S = 30.0
_GIVEN_BACK_S = 0.5  # within it, all memory of processes that the kernel has killed
_QUICKLY_FREED_BYTES = 64 << 20  # in milliseconds


class NativeSandbox(LiveSandbox, DurableSandbox, Forkable, Layered, BootIdentity, CpuClock):
    """See `BackendSandbox`. All methods may be called from any thread."""

    network: NativeNetwork

    def __init__(
        self, backend: Home, draft: Draft, control: wire.Socket, plan: Plan, zygote: Zygote
    ) -> None:
        super().__init__(backend, draft, control, plan, zygote)
        self._files: NativeFiles | None = None
        self.network = NativeNetwork(self, [], draft.trusted)
        self._environment = environment(self.spec, self.network.environment())
        self._ending: list[int] = []

    @property
    def files(self) -> NativeFiles:
        """See `BackendSandbox`; read when first used, which a lone command never does."""
        if self._files is None:
            from .files import NativeFiles

            self._files = NativeFiles(self)
        return self._files

    # -- describing -------------------------------------------------------------------------

    def stats(self) -> SandboxStats:
        from .usage import read_stats

        with self._lock:
            if self._state is State.TERMINATED:
                return self._final_stats()
            return read_stats(self, self._state, time.monotonic() - self.created, self.count)

    def _final_stats(self) -> SandboxStats:
        return self._last_stats or SandboxStats(State.TERMINATED, execs=self.count)

    def protections(self) -> tuple[Protection, ...]:
        from ..local.protections import protections_of
        from .posture import NativeReader

        return protections_of(self, lambda: NativeReader(self))

    def granted(self) -> SandboxCapabilities:
        from .granted import granted

        return granted(self)

    def cpu_ns(self) -> int | None:
        """As `stats` says, but it asks for nothing else."""
        from .usage import cpu_ns

        return cpu_ns(self)

    # -- exec -------------------------------------------------------------------------------

    def start(self, request: ExecRequest, label: str = "", *, attended: bool = False) -> LocalExec:
        """See `BackendSandbox`; `label` is what a later process will know the exec by."""
        with self._lock:
            self._require(State.RUNNING, "exec", looks=False)
        control, uid, own = self.control, self.uid, {}
        if request.user is not None:
            from ..local.host import accounts

            account = accounts.find(self.files, request.user)
            uid, own = account.uid, account.env
        if uid != self.uid:
            from .inner import control_of

            with self._lock:
                control = control_of(self, uid)
        try:
            return self._start(request, control, uid, own, label, attended)
        except SandboxLost:
            with self._lock:
                self._require(State.RUNNING, "exec")  # refused, as ever after, where it has ended
            raise

    def start_attended(self, request: ExecRequest, label: str = "") -> LocalExec:
        return self.start(request, label, attended=True)

    def _start(
        self,
        request: ExecRequest,
        control: wire.Socket,
        uid: int,
        own: Mapping[str, str],
        label: str,
        attended: bool,
    ) -> LocalExec:
        rest = self.as_asked(request, own)

        def begin(number: int, reply: wire.Socket, streams: list[int]) -> None:
            self.send(("exec", number, *rest), [reply.fileno(), *streams], control)

        return self.begin(begin, request, control, uid, label, attended)

    def begin(
        self,
        tell: Callable[[int, wire.Socket, list[int]], None],
        request: ExecRequest,
        control: wire.Socket,
        uid: int,
        label: str,
        attended: bool,
    ) -> LocalExec:
        """Begin an exec.

        Args:
            tell: Has it started: its number, where PID 1 reports, the streams' ends for inside.
        """
        ours, theirs, inner, outer = open_channels(request)
        self._lend(inner, uid)
        cwd = self.working_directory(request.cwd)
        # Numbers reach PID 1 in order: the limit that carries a process's tag can only be lowered.
        with self._order:
            self.count += 1
            number = self.count
            kills = self.oom_kills()
            run = LocalExec(self, number, control, ours, outer, kills, request.argv[0], cwd)
            run.uid = uid if uid != self.uid else None
            run.label, run.is_terminal = label, request.pty is not None
            self.runs[number] = run
            try:
                self.backend.handover.begin_exec(self, run)
                if kills:
                    self._await_memory(control)
                tell(number, theirs, inner)
            except BaseException:
                run.close()
                attended = False
                raise
            finally:
                theirs.close()
                if attended:
                    run.kept_open, inner = inner[-2:], inner[:-2]
                for fd in inner:
                    os.close(fd)
        if request.pty is not None:
            run.take_terminal()
        return run

    def _await_memory(self, control: wire.Socket) -> None:
        """Have PID 1, or an agent, start the next program when there is memory for it again."""
        until = self._killed_at + _GIVEN_BACK_S
        if time.monotonic() < until and (full := self.group.open_if_full()):
            try:
                self.send(("await_memory", full[1], until), [full[0]], control)
            finally:
                os.close(full[0])

    def _lend(self, pipes: list[int], uid: int) -> None:
        """A pipe belongs to who made it, and only its owner may open it anew, as /dev/stdout."""
        if host().trusted_root:
            owner = identity.host_id(self.first_host_id, uid)
            for fd in pipes:
                os.fchown(fd, owner, owner)
        elif uid != self.uid:
            lend(pipes)

    def adopted_execs(self) -> dict[str, LocalExec]:
        return {run.label: run for run in list(self.runs.values())}

    # -- life -------------------------------------------------------------------------------

    def _end_programs(self) -> int:
        controls = *self.agents.values(), self.control
        return max([int(self.ask("end_all", control=control)[0]) for control in controls])

    @property
    def answers_frozen(self) -> bool:
        """Without a freezer PID 1 stops all the others, and answers itself."""
        return not self.group.can_freeze

    def suspend(self) -> None:
        if self.first_host_id and not self.group.can_freeze and not host().trusted_root:
            from ..local.protections import DELEGATE

            # PID 1 may stop its own user's processes only.
            raise Unsupported(
                "no cgroup that can freeze processes of several users",
                backend=self.backend.name,
                operation="suspend",
                hint=DELEGATE,
            )
        super().suspend()

    def _freeze(self, frozen: bool) -> None:
        if self.group.can_freeze:
            self.group.freeze() if frozen else self.group.thaw()
        else:
            self.ask("stop" if frozen else "continue")

    def _keep_paused(self, paused: bool) -> None:
        self.backend.handover.change_paused(self, paused)

    def align(self, suspended: bool) -> None:
        """Of an earlier process: make the kernel agree with what was written down last.

        What it was killed in the middle of (a suspend, a snapshot, a kill) may have left more or less.
        """
        with self._lock:
            if self.state is State.TERMINATED:
                return
            self.group.unthrottle(False)
            if self.was_paused:
                self._freeze(False)
                self._keep_paused(False)
            if suspended:
                self.suspend()

    def _end(self, was_suspended: bool) -> None:
        # First: a process that is killed from here on is not to leave half of it to another one.
        self.backend.handover.end(self)
        super()._end(was_suspended)
        self._remember_stats()  # while it dies

    def _remember_stats(self) -> None:
        """Counters vanish with the cgroup: keep them, so that killed runs are still accounted."""
        try:
            from .usage import last_stats

            uptime_s = time.monotonic() - self.created
            self._last_stats = last_stats(self, uptime_s, self.count)
        except OSError:
            pass  # out of file descriptors: that the sandbox ends matters more

    def leave(self) -> None:
        """Let it live on for another process, which has copies of all that is closed here."""
        with self._lock:
            if self._state is State.TERMINATED:
                return
            self._state = State.TERMINATED
            for run in list(self.runs.values()):
                run.close()
            namespace_fds: list[int] = []
            self._close(namespace_fds)
            self.network.close()
            for fd in namespace_fds:
                os.close(fd)
            for part in self.protected:
                for fd in part.locks:
                    os.close(fd)
                part.locks.clear()

    def _close(self, left: list[int]) -> None:
        """Close what it has; put descriptors of its namespaces into `left`, the caller's to close."""
        with self._send_lock:
            for control in (self.control, *self.agents.values()):
                control.close()
        with self._fds_lock:
            pidfds = [self.pidfd, *self._ending]
            left += self.namespace_fds
            self.pidfd, self.namespace_fds, self._ending = -1, [], []
        for pidfd in pidfds:
            os.close(pidfd)
        self.group.asked_last()

    def _release(self) -> None:
        namespace_fds: list[int] = []
        with Acquired() as held:
            held.callback(self.backend.released, self)
            held.callback(self._leave, namespace_fds)
            # The zygote knows a prebuilt one by the id that it was built with.
            name = self.lockdown["id"]
            held.callback(journal.give_up, self.protected, self.note, name, self.zygote)
            held.callback(self.network.close)
            self._close(namespace_fds)

    def _leave(self, namespace_fds: list[int]) -> None:
        """Let go of its cgroups and of its mounts.

        With the last descriptor of the mounts go all its files, and the kernel waits for every
        processor: the zygote can do that as well. But not while others wait for it, nor what would
        keep it from them for long, nor what holds a directory of the host's, which its owner may
        want to unmount at once.
        """
        directories = self.group.directories
        if self.backend.is_making:
            launcher_cgroups.remove(directories)
        last = self._last_stats
        peak = last.peak_memory_bytes if last else None
        few = peak is not None and peak < _QUICKLY_FREED_BYTES
        of_host = self.host_directory or self.base
        try:
            fds = namespace_fds if few and not (of_host or self.backend.is_making) else []
            self.zygote.clear_up(self.lockdown["id"], directories, fds)
        finally:
            for fd in namespace_fds:
                os.close(fd)

    # -- the rest of the contract -------------------------------------------------------------

    def attach(self, mount: Mount) -> ResolvedMount:
        from .attach import attach

        with self._lock:
            self._require(self._state, "mount")
            resolved = attach(self, mount)
            self.mounts.append(resolved)
            self.backend.handover.change(self)
            return resolved

    def renew_boot_id(self) -> None:
        from .attach import renew_boot_id

        with self._lock:
            self._require(self._state, "mount")
            renew_boot_id(self)

    def serve_network(self) -> None:
        """Begin to answer what its programs ask of the network; when that fails, it has ended."""
        try:
            self.network.serve()
        except BaseException:
            self.terminate()
            raise

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        from dataclasses import replace

        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("network policy")
            self.network.check(policy)
            if policy == self.spec.network:
                return
            self.network.change(policy)
            self.spec = replace(self.spec, network=policy)
            self._environment = environment(self.spec, self.network.environment())
            self.backend.handover.change(self)

    def connect(self, port: int) -> socket.socket:
        return self.network.dial(port)

    def forward(self, port: int, client: socket.socket) -> None:
        self.network.forward(port, client)

    def network_log(self) -> list[NetworkEvent]:
        return self.network.events()

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        del metadata
        raise Unsupported(
            "the native backend saves files only",
            backend=self.backend.name,
            operation="checkpoint",
            hint="snapshot() saves files; a strong backend saves memory too",
        )

    def running(self) -> Mapping[str, str]:
        return {run.id: run.facts[0] for run in list(self.runs.values())}

    def template(self, run: BackendExec) -> ProcessTemplate:
        from .live_copies import NativeTemplate, refused

        assert isinstance(run, LocalExec)
        if self.state is State.SUSPENDED:
            raise refused(f"{run.id} cannot be copied: the sandbox is suspended")
        return NativeTemplate(self, run)

    def _about_to_end(self) -> None:
        """See to it that templates have the memory of what runs here: they live on."""
        for template in tuple(self.loading):
            try:
                template.wait()
            except Unsupported:
                pass  # its copies are refused, and say why

    def expect_end(self, pidfd: int) -> None:
        """Take the descriptor of a helper that was let go of: what it kept inside is killed with it."""
        self.wait_for_helpers(0)
        with self._fds_lock:
            if self.pidfd >= 0:
                self._ending.append(pidfd)
                return
        os.close(pidfd)

    def wait_for_helpers(self, timeout_s: float) -> None:
        """Wait until each helper that was let go of has ended."""
        with self._fds_lock:
            pidfds, self._ending = self._ending, []
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(timeout_s * 1000):
                os.close(pidfd)
            else:
                self._ending.append(pidfd)

    def left_behind(self) -> Sequence[str]:
        from .live_copies import left_behind

        return left_behind(self)

    def sides(self, since: str, directory: str, stack: ExitStack) -> tuple[Part, Part] | None:
        """See `Layered`."""
        from .sides import sides

        return sides(self, since, directory, stack)

    def save_layer(self, path: str) -> None:
        """Write what was changed of the image this sandbox started from to the new file `path`.

        Raises:
            LifecycleError: It did not start from an image.
            ResourceExhausted: The disk is full.
        """
        from .snapshots import save_layer

        save_layer(self, path)

    def snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None = None) -> Snapshot:
        from .snapshots import save

        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("snapshot")
            return save(self, catalogue or self.backend.catalogue(), metadata)
