"""One native sandbox, seen from the host."""

from __future__ import annotations

import _signal as signal
import os
import select
import time
from _thread import RLock, allocate_lock

from ...errors import (
    ExecError,
    LifecycleError,
    SandboxLost,
    Unsupported,
)
from ...launcher import cgroups as launcher_cgroups
from ...launcher import wire
from ...model.exec import ExecRequest
from ...model.session import ResolvedMount, Session
from ...model.state import State, check_transition
from ...model.stats import SandboxStats
from ..local import identity, journal
from ..local.answers import answer
from ..local.execs import LocalExec
from ..local.host import out_of_files
from ..local.session import environment, session_root
from ..local.streams import open_channels
from .files import NativeFiles
from .network import NativeNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from ...launcher.plan import Plan
    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.netlog import NetworkEvent
    from ...model.network import NetworkPolicy
    from ...model.snapshot import Snapshot
    from ..local.cgroups import Group
    from ..local.sizes import Sizes
    from .backend import NativeBackend
    from .planner import Draft
    from .profiles import Profile
    from .zygote import Zygote

_ASK_S = 30.0
_QUICKLY_FREED_BYTES = 64 << 20  # in milliseconds


class NativeSandbox:
    """See `BackendSandbox`. All methods may be called from any thread."""

    def __init__(
        self,
        backend: NativeBackend,
        draft: Draft,
        profile: Profile,
        sizes: Sizes,
        group: Group,
        control: wire.Socket,
        plan: Plan,
        pid: int,
        pidfd: int,
        namespace_fds: list[int],
        zygote: Zygote,
        sockets: list[int],
    ) -> None:
        self.backend, self.spec, self.profile, self.sizes, self.group = (
            backend,
            draft.spec,
            profile,
            sizes,
            group,
        )
        self.id, self.uid, self.first_host_id = draft.id, draft.uid, draft.first_host_id
        self.mounts: list[ResolvedMount] = draft.mounts
        self.landlock_writable = draft.writable
        self.host_directory = draft.host_directory
        self.root = session_root(draft.spec)
        self.image = draft.image
        self.pid, self.pidfd, self.zygote = pid, pidfd, zygote
        self.namespace_fds = namespace_fds  # user, mnt, pid
        self.files = NativeFiles(self)
        self.protected, self.note = draft.protected, draft.note
        self.control = control
        self.agents: dict[int, wire.Socket] = {}  # uid -> control of an agent of that user
        self.unix_sockets = draft.unix_sockets
        self.lockdown = plan.copy()
        self.lockdown["trees"], self.lockdown["steps"] = [], []
        self._lock = RLock()
        self._send_lock, self._order = allocate_lock(), allocate_lock()
        self._fds_lock = allocate_lock()
        self._hurry_lock, self._hurries = allocate_lock(), 0
        self._state = State.PROVISIONED
        self.created = time.monotonic()
        self.count = 0  # of execs so far
        self.runs: dict[int, LocalExec] = {}
        self.was_paused = False  # by an earlier process, as far as it came
        self._last_stats: SandboxStats | None = None
        self.last_protections: tuple[Protection, ...] = ()
        self.network = NativeNetwork(self, sockets, draft.trusted)
        self._environment = environment(self.spec, self.network.environment())

    def remember(self, created: float, count: int, placeholders: dict[str, str]) -> None:
        """What an earlier process knew of it."""
        self.created, self.count = created, count
        self._state = State.RUNNING if count else State.PROVISIONED
        self.network.placeholders = placeholders
        self._environment = environment(self.spec, self.network.environment())

    # -- describing -------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        labels = {**self.spec.labels, "profile": self.profile.name, "tier": self.spec.tier}
        return Session(self.id, self.backend.name, self.state, tuple(self.mounts), labels)

    @property
    def state(self) -> State:
        if self._state is not State.TERMINATED and self._is_gone():
            self.terminate()
        return self._state

    def stats(self) -> SandboxStats:
        from .usage import read_stats

        with self._lock:
            if self._state is State.TERMINATED:
                return self._final_stats()
            return read_stats(self, self._state, time.monotonic() - self.created, self.count)

    def _final_stats(self) -> SandboxStats:
        return self._last_stats or SandboxStats(State.TERMINATED, execs=self.count)

    def protections(self) -> tuple[Protection, ...]:
        from .report import sandbox_protections

        return sandbox_protections(self)

    def granted(self) -> SandboxCapabilities:
        from .granted import granted

        return granted(self)

    def cpu_ns(self) -> int | None:
        """As `stats` says, but it asks for nothing else."""
        from .usage import cpu_ns

        return cpu_ns(self)

    def hurry(self, on: bool) -> None:
        """Something is being killed, which the processor limit must not slow down; or is no more."""
        with self._hurry_lock:
            self._hurries += 1 if on else -1
            if self._hurries != (1 if on else 0):
                return  # something else is being killed as well
            try:
                self.group.hurry(on)
            except OSError:
                pass  # the cgroup is gone: everything in it is dead

    def oom_kills(self) -> int | None:
        return self.group.oom_kills()

    # -- exec -------------------------------------------------------------------------------

    def start(self, request: ExecRequest, label: str = "") -> LocalExec:
        """See `BackendSandbox`; `label` is what a later process will know the exec by."""
        with self._lock:
            self._require(State.RUNNING, "exec")
        control, uid, own = self.control, self.uid, {}
        if request.user is not None:
            from ..local import accounts

            account = accounts.find(self.files, request.user)
            uid, own = account.uid, account.env
        if uid != self.uid:
            from .users import control_of

            with self._lock:
                control = control_of(self, uid)
        return self._start(request, control, uid, own, label)

    def _start(
        self,
        request: ExecRequest,
        control: wire.Socket,
        uid: int,
        own: Mapping[str, str],
        label: str,
    ) -> LocalExec:
        ours, theirs, inner, outer = open_channels(request)
        if self.first_host_id:
            # A pipe belongs to who made it, and only its owner may open it anew, as /dev/stdout.
            owner = identity.host_id(self.first_host_id, uid)
            for fd in inner:
                os.fchown(fd, owner, owner)
        environment = {**self._environment, **own, **request.env}
        if request.pty is not None:
            environment.setdefault("TERM", "xterm-256color")
        cwd = self.working_directory(request.cwd)
        timeout = request.timeout_s or self.spec.limits.wall_time_s or 0.0
        rest = (list(request.argv), environment, cwd, timeout, request.pty)
        # Numbers reach PID 1 in order: the limit that carries a process's tag can only be lowered.
        with self._order:
            self.count += 1
            number = self.count
            run = LocalExec(
                self, number, control, ours, outer, self.oom_kills(), request.argv[0], cwd
            )
            run.uid = uid if uid != self.uid else None
            run.label, run.is_terminal = label, request.pty is not None
            self.runs[number] = run
            try:
                self.backend.keep_exec(self, run)
                self._send(("exec", number, *rest), [theirs.fileno(), *inner], control)
            except BaseException:
                run.close()
                raise
            finally:
                theirs.close()
                for fd in set(inner):
                    os.close(fd)
        if request.pty is not None:
            run.take_terminal()
        return run

    def working_directory(self, cwd: str | None) -> str:
        return os.path.join(self.root, cwd) if cwd else self.root

    def forget(self, run: LocalExec) -> None:
        """The exec has ended or is no longer watched."""
        self.runs.pop(run.number, None)

    def adopted_execs(self) -> list[LocalExec]:
        """Those that have not been closed, of an earlier process and of this one."""
        return list(self.runs.values())

    # -- asking PID 1 -----------------------------------------------------------------------

    def _send(self, message: object, fds: list[int], control: wire.Socket) -> None:
        try:
            with self._send_lock:
                wire.send(control, message, fds)
        except OSError as exc:
            if problem := out_of_files(exc):
                raise problem from exc
            raise self.lost_error() from exc

    def ask(
        self,
        verb: str,
        *args: object,
        timeout_s: float = _ASK_S,
        control: wire.Socket | None = None,
    ) -> tuple[bytes, list[int]]:
        """One request to PID 1, or to another agent's `control`.

        Raises:
            OSError: As the kernel told PID 1.
            SandboxLost: It is gone.
        """
        ours, theirs = wire.socketpair()
        try:
            try:
                self._send((verb, *args), [theirs.fileno()], control or self.control)
            finally:
                theirs.close()
            return answer(ours, timeout_s)
        except SandboxLost:
            raise self.lost_error() from None
        finally:
            ours.close()

    def tell(self, verb: str, *args: object, fds: list[int]) -> None:
        """One request to PID 1 that is answered on one of `fds`, or not at all."""
        self._send((verb, *args), fds, self.control)

    def ask_files(self, verb: str, *args: object) -> tuple[bytes, list[int]]:
        """`ask`, where the state allows it."""
        self.require_awake()
        return self.ask(verb, *args)

    def require_awake(self) -> None:
        """Raises LifecycleError unless something inside can answer."""
        with self._lock:
            if self._state is State.SUSPENDED:
                raise LifecycleError("a suspended sandbox does not answer", hint="resume it first")
            if self._state is State.TERMINATED:
                raise LifecycleError("the sandbox is terminated")

    def borrow_namespaces(self) -> list[int]:
        """Descriptors of its user, mount and PID namespace, the caller's to close.

        Copies: the sandbox may end at any moment, and the number of a descriptor that was closed is
        soon that of another one, of another sandbox even.

        Raises:
            SandboxLost: It is gone.
        """
        with self._fds_lock:
            if not self.namespace_fds:
                raise self.lost_error()
            return [os.dup(fd) for fd in self.namespace_fds]

    def borrow_pidfd(self) -> int:
        """A pidfd of PID 1, the caller's to close; see `borrow_namespaces`."""
        with self._fds_lock:
            if self.pidfd < 0:
                raise self.lost_error()
            return os.dup(self.pidfd)

    def lost_error(self) -> SandboxLost | LifecycleError:
        """Why nothing more can be learnt from this sandbox."""
        if self._state is State.TERMINATED:
            return SandboxLost("the sandbox was terminated under it")
        kills = self.oom_kills()
        why = ": the kernel ran out of the memory allowed to it" if kills else ""
        return SandboxLost(f"the sandbox ended unexpectedly{why}", hint="create a new sandbox")

    def _is_gone(self) -> bool:
        with self._fds_lock:
            if self.pidfd < 0:
                return True
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))

    # -- life -------------------------------------------------------------------------------

    def _require(self, then: State, verb: str) -> None:
        if self.state is State.TERMINATED:
            raise LifecycleError(f"{verb}: the sandbox is terminated", hint="create a new one")
        if self._state is State.SUSPENDED and then is State.RUNNING and verb != "resume":
            raise LifecycleError(f"{verb}: the sandbox is suspended", hint="resume it first")
        self._state = check_transition(self._state, then)

    def suspend(self) -> None:
        with self._lock:
            if self._state is State.SUSPENDED:
                return
            if self.state is State.TERMINATED:
                raise LifecycleError("suspend: the sandbox is terminated")
            self.backend.keep_paused(self, True)
            if self.group.can_freeze:
                self.group.freeze()
            else:
                self.ask("stop")
            self._state = check_transition(self._state, State.SUSPENDED)

    @property
    def paused(self) -> bool:
        """Whether it is suspended."""
        return self._state is State.SUSPENDED

    def awake(self) -> Awake:
        """For a moment in which PID 1 must answer although the sandbox is suspended."""
        return Awake(self, self._lock)

    def resume(self) -> None:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("resume: the sandbox is terminated")
            if self._state is not State.SUSPENDED:
                return
            if self.group.can_freeze:
                self.group.thaw()
            else:
                self.ask("continue")
            self.backend.keep_paused(self, False)
            self._state = State.RUNNING

    def align(self, suspended: bool) -> None:
        """Of an earlier process: make the kernel agree with what was written down last.

        What it was killed in the middle of (a suspend, a snapshot, a kill) may have left more or less.
        """
        with self._lock:
            if self.state is State.TERMINATED:
                return
            self.group.hurry(False)
            if self.was_paused:
                if self.group.can_freeze:
                    self.group.thaw()
                else:
                    self.ask("continue")
                self.backend.keep_paused(self, False)
            if suspended:
                self.suspend()

    def restore_state(self, state: State) -> None:
        """After a pause of our own, which the state must not tell about."""
        with self._lock:
            if self._state is State.RUNNING:
                self._state = state

    def terminate(self) -> None:
        with self._lock:
            if self._state is State.TERMINATED:
                return
            was_suspended = self._state is State.SUSPENDED
            self._state = State.TERMINATED
            # First: a process that is killed from here on is not to leave half of it to another one.
            self.backend.forget_kept(self)
            self.hurry(True)
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if was_suspended and self.group.can_freeze:
                # Newer kernels let SIGKILL through a freeze: then the cgroup may be gone already.
                try:
                    self.group.thaw()
                except OSError:
                    pass
            self._remember_stats()  # while it dies
            self._wait_until_empty()
            self._release()

    def end_unwatched(self) -> None:
        """Who watched over a process tree is gone without a word, PID 1 or another user's agent.

        What it watched may run on, and nobody could end it in time: so everything ends.
        """
        try:
            self.terminate()
        except ExecError:
            pass  # reported by the next call

    def _remember_stats(self) -> None:
        """Counters vanish with the cgroup: keep them, so that killed runs are still accounted."""
        try:
            from .usage import last_stats

            uptime_s = time.monotonic() - self.created
            self._last_stats = last_stats(self, uptime_s, self.count)
        except OSError:
            pass  # out of file descriptors: that the sandbox ends matters more

    def _wait_until_empty(self) -> None:
        """PID 1 ends only when its PID namespace is empty: then every process is gone."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(30_000):
            raise ExecError(
                "a process of the sandbox does not die (uninterruptible sleep?)",
                hint="its user ids and cgroup stay reserved until it does",
            )

    def leave(self) -> None:
        """Let it live on for another process, which has copies of all that is closed here."""
        with self._lock:
            if self._state is State.TERMINATED:
                return
            self._state = State.TERMINATED
            for run in list(self.runs.values()):
                run.close()
            for fd in self._close():
                os.close(fd)
            for part in self.protected:
                for fd in part.locks:
                    os.close(fd)
                part.locks.clear()

    def _close(self) -> list[int]:
        """Returns descriptors of its namespaces, the caller's to close."""
        with self._send_lock:
            for control in (self.control, *self.agents.values()):
                control.close()
        with self._fds_lock:
            pidfd, namespace_fds = self.pidfd, self.namespace_fds
            self.pidfd, self.namespace_fds = -1, []
        os.close(pidfd)
        self.network.close()
        return namespace_fds

    def _release(self) -> None:
        namespace_fds = self._close()
        journal.give_up(self.protected, self.note, self.id, self.zygote)
        self._leave(namespace_fds)
        self.backend.released(self)

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
        of_host = self.host_directory or self.image
        try:
            fds = namespace_fds if few and not (of_host or self.backend.is_making) else []
            self.zygote.clear_up(self.id, directories, fds)
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
            self.backend.keep(self)
            return resolved

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
                raise LifecycleError("network policy: the sandbox is terminated")
            self.network.check(policy)
            if policy == self.spec.network:
                return
            self.network.change(policy)
            self.spec = replace(self.spec, network=policy)
            self._environment = environment(self.spec, self.network.environment())
            self.backend.keep(self)

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

    def save_layer(self, path: str) -> None:
        """Write what was changed of the image this sandbox started from to the new file `path`.

        Raises:
            LifecycleError: It did not start from an image.
            ResourceExhausted: The disk is full.
        """
        from .snapshots import save_layer

        save_layer(self, path)

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("snapshot: the sandbox is terminated")
            return self.backend.snapshot(self, metadata)


class Awake:
    """Thawed while in the `with` block; nobody else changes the sandbox's state meanwhile."""

    def __init__(self, sandbox: NativeSandbox, lock: RLock) -> None:
        self._sandbox, self._lock, self._frozen = sandbox, lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        sandbox = self._sandbox
        self._frozen = sandbox.paused and sandbox.group.can_freeze
        if self._frozen:
            sandbox.group.thaw()

    def __exit__(self, *_exc: object) -> None:
        try:
            if self._frozen and self._sandbox.paused:
                self._sandbox.group.freeze()
        finally:
            self._lock.release()
