"""A sandbox with an agent inside, seen from the host: requests, suspension, termination."""

from __future__ import annotations

import _signal as signal
import os
import select
import time
from _thread import RLock, allocate_lock

from ...errors import ExecError, InvalidRequest, IsolationError, LifecycleError, SandboxLost
from ...launcher import wire
from ...model.session import ResolvedMount, Session
from ...model.state import State, check_transition
from ..optional import Clearable, Comparable
from .answers import SEND_S, answer, bound_sends
from .host.facts import out_of_files
from .session import is_below, session_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Protocol

    from ...model.capabilities import Protection
    from ...model.changes import Changes
    from ...model.execs.exec import ExecRequest
    from ...model.spec import SandboxSpec
    from ...model.stats import SandboxStats
    from .host.cgroups import Group

    class Named(Protocol):
        """A backend, as far as every sandbox needs it."""

        name: str


_ASK_S = 30.0
_DYING_MS = 30_000
_CLEARING_S, _CLEARING_PAUSE_S = 10.0, 0.01


class LocalSandbox(Comparable, Clearable):
    """The part of `BackendSandbox` that is the same for all on this host.

    All methods may be called from any thread.

    Args:
        control: To who answers inside.
        pidfd: Of a process that ends last of all, and with whose death all others die: PID 1.

    Attributes:
        has_whiteouts: Snapshots of it name removed files, also without an image.
        lower: Ids of the snapshots that new ones of it lie over, the uppermost first.
        ended_on_request: Whether `terminate` ended it while it lived; False while it lives.
    """

    ended_on_request = _unwatched = has_whiteouts = False
    ended_because = ""
    _how_it_ended = ""
    lower: tuple[str, ...] = ()

    backend: Named
    _environment: dict[str, str]

    def __init__(
        self,
        backend: Named,
        spec: SandboxSpec,
        sandbox_id: str,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        pidfd: int,
    ) -> None:
        self.backend, self.spec, self.id, self.mounts = backend, spec, sandbox_id, mounts
        self.control, self.pidfd = control, pidfd
        bound_sends(control)
        self.root = session_root(spec)
        self._lock = RLock()
        self._send_lock, self._order = allocate_lock(), allocate_lock()
        self._fds_lock, self._unthrottle_lock = allocate_lock(), allocate_lock()
        self._state = State.PROVISIONED
        self._last_stats: SandboxStats | None = None
        self.last_protections: tuple[Protection, ...] = ()
        self.crowded = 0  # execs of which processes were killed as more than there may be

    # -- describing -------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        labels = {**self.spec.labels, "profile": self.spec.profile, "tier": self.spec.tier}
        return Session(self.id, self.backend.name, self.state, tuple(self.mounts), labels)

    @property
    def state(self) -> State:
        if self._state is not State.TERMINATED and self._is_gone():
            self.terminate()
        return self._state

    @property
    def paused(self) -> bool:
        return self._state is State.SUSPENDED

    @property
    def answers_frozen(self) -> bool:
        """True if the agent answers even while the sandbox is suspended."""
        return False

    def oom_kills(self) -> int | None:
        """How often the host killed something inside for lack of memory; None where nobody counts."""
        return None

    def unthrottle(self, on: bool) -> None:
        """Something is being killed, which no processor limit must slow down; or is no more."""

    # -- asking -----------------------------------------------------------------------------

    def working_directory(self, cwd: str | None) -> str:
        return os.path.join(self.root, cwd) if cwd else self.root

    def no_directory(self, cwd: str, why: str) -> InvalidRequest:
        if hiding := [each.target for each in self.mounts if is_below(cwd, each.target)]:
            hint = f"the mount at {hiding[-1]} hides the directory"
            if cwd == self.root and self.spec.workdir is None:  # nobody named it
                hint += ": mount it elsewhere, or name a workdir that is there"
                return InvalidRequest(f"{cwd}: {why}", field="mounts.target", hint=hint)
            return InvalidRequest(f"{cwd}: {why}", field="cwd", hint=hint)
        hint = (
            "choose an existing directory of the sandbox, or create one with files.make_dir(PATH)"
        )
        return InvalidRequest(f"{cwd}: {why}", field="cwd", hint=hint)

    def as_asked(self, request: ExecRequest, own: Mapping[str, str]) -> tuple[Any, ...]:
        """Build the exec request for the agent; `own` holds the variables of its user's account."""
        environment = {**self._environment, **own, **request.env}
        if request.pty is not None:
            environment.setdefault("TERM", "xterm-256color")
        timeout = request.timeout_s or self.spec.limits.wall_time_s or 0.0
        cwd = self.working_directory(request.cwd)
        rest = timeout, request.pty, request.session_leader
        return list(request.argv), environment, cwd, *rest

    def send(self, message: object, fds: list[int], control: wire.Socket | None = None) -> None:
        """Send a request whose answer, if any, comes on the first of `fds`.

        Raises:
            SandboxLost: The agent is gone.
            IsolationError: It does not read.
        """
        try:
            with self._send_lock:
                wire.send(control or self.control, message, fds)
        except BlockingIOError as exc:
            raise IsolationError(
                f"the sandbox's agent took no request for {SEND_S:.0f} s",
                hint="the host may be overloaded; if it does not recover, terminate the sandbox",
            ) from exc
        except OSError as exc:
            if problem := out_of_files(exc):
                raise problem from exc
            raise self.lost_error() from exc

    def request(
        self,
        verb: str,
        args: tuple[object, ...],
        fds: tuple[int, ...] = (),
        control: wire.Socket | None = None,
    ) -> wire.Socket:
        """Send a request; the caller reads the answers from the socket, and then closes it."""
        ours, theirs = wire.socketpair()
        try:
            self.send((verb, *args), [theirs.fileno(), *fds], control)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def ask(
        self,
        verb: str,
        *args: object,
        timeout_s: float = _ASK_S,
        control: wire.Socket | None = None,
    ) -> tuple[bytes, list[int]]:
        """Send a request to the agent, or to another process by `control`, and return its answer.

        Raises:
            Refused: With the kernel's errno.
            SandboxLost: The agent is gone.
        """
        reply = self.request(verb, args, control=control)
        try:
            return answer(reply, timeout_s)
        except SandboxLost:
            raise self.lost_error() from None
        finally:
            reply.close()

    def require_awake(self) -> None:
        """Raises LifecycleError unless something inside can answer."""
        with self._lock:
            if self._state is State.SUSPENDED:
                raise LifecycleError("a suspended sandbox does not answer", hint="resume it first")
            if self._state is State.TERMINATED:
                raise self.terminated_error()

    def lost_error(self) -> SandboxLost | LifecycleError:
        """Why nothing more can be learnt from this sandbox."""
        if self.ended_because:
            return SandboxLost(
                f"the sandbox was ended: {self.ended_because}",
                hint="create a new one, with a higher limit",
            )
        if self._state is State.TERMINATED and not self._how_it_ended:
            return SandboxLost("the sandbox was terminated during the operation")
        how = self._how_it_ended or self._unexpectedly()
        return SandboxLost(f"the sandbox {how}", hint="create a new sandbox")

    def _unexpectedly(self) -> str:
        why = self._cause()
        return f"ended unexpectedly: {why}" if why else "ended unexpectedly"

    def _cause(self) -> str:
        """Find why it ended by itself; empty where nothing tells."""
        return "the kernel ran out of the memory allowed to it" if self.oom_kills() else ""

    def terminated_error(self, verb: str = "") -> LifecycleError:
        """Return the error of an operation that came after its end, with what ended it."""
        how = f", it {self._how_it_ended}" if self._how_it_ended else ""
        what = f"the sandbox is terminated{how}"
        return LifecycleError(f"{verb}: {what}" if verb else what, hint="create a new one")

    def _is_gone(self) -> bool:
        with self._fds_lock:
            return self.pidfd < 0 or _has_ended(self.pidfd, 0)

    def borrow_pidfd(self) -> int:
        """A pidfd of PID 1, the caller's to close.

        Raises:
            SandboxLost: It is gone.
        """
        with self._fds_lock:
            if self.pidfd < 0:
                raise self.lost_error()
            return os.dup(self.pidfd)

    # -- standing still -----------------------------------------------------------------------

    def _require(self, then: State, verb: str, *, looks: bool = True) -> None:
        """Go to a state, where that is allowed.

        Args:
            looks: Whether it has ended by itself; False where what is sent to it will tell.
        """
        if (self.state if looks else self._state) is State.TERMINATED:
            raise self.terminated_error(verb)
        if self._state is State.SUSPENDED and then is State.RUNNING and verb != "resume":
            raise LifecycleError(f"{verb}: the sandbox is suspended", hint="resume it first")
        self._state = check_transition(self._state, then)

    def suspend(self) -> None:
        with self._lock:
            if self._state is State.SUSPENDED:
                return
            if self.state is State.TERMINATED:
                raise self.terminated_error("suspend")
            self._keep_paused(True)
            self._freeze(True)
            self._state = check_transition(self._state, State.SUSPENDED)

    def resume(self) -> None:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("resume: the sandbox is terminated", hint="create a new one")
            if self._state is not State.SUSPENDED:
                self._resume_awake()
                return
            self._freeze(False)
            self._keep_paused(False)
            self._state = State.RUNNING

    def awake(self) -> Awake:
        """For a moment in which they must answer although the sandbox is suspended."""
        return Awake(self, self._lock)

    def _freeze(self, frozen: bool) -> None:
        """Have every process stand still, or go on."""
        raise NotImplementedError

    def _keep_paused(self, paused: bool) -> None:
        """Every process is about to stand still, or goes on again: write it down where that is kept."""

    def _resume_awake(self) -> None:
        """It is to be resumed, and was not suspended."""

    # -- ending -----------------------------------------------------------------------------

    def end_processes(self) -> None:
        """See `Clearable`."""
        self.require_awake()
        until = time.monotonic() + _CLEARING_S
        self.unthrottle(True)
        try:
            while left := self._end_programs():
                if time.monotonic() >= until:
                    raise ExecError(
                        f"{left} processes of the sandbox could not be ended",
                        hint="try again, or end the sandbox",
                        retryable=True,
                    )
                time.sleep(_CLEARING_PAUSE_S)
        finally:
            self.unthrottle(False)

    def _end_programs(self) -> int:
        """Kill programs of all users, once; return how many are left, those not yet reaped included."""
        raise NotImplementedError

    def compare(self, since: str | None) -> Changes:
        from .comparing import changes

        backend: Any = self.backend
        return changes(self, backend, since)

    def terminate(self) -> None:
        with self._lock:
            if self._state is State.TERMINATED:
                return
            was_suspended = self._state is State.SUSPENDED
            self.ended_on_request = not (self._unwatched or self._is_gone())
            if not self.ended_on_request:
                why = self.ended_because
                self._how_it_ended = f"was ended: {why}" if why else self._unexpectedly()
            self._about_to_end()
            self._state = State.TERMINATED
            self._end(was_suspended)
            self._wait_until_empty()
            self._release()

    def _about_to_end(self) -> None:
        """The last moment at which it may still answer."""

    def _end(self, was_suspended: bool) -> None:
        """Kill PID 1, and with it its namespace."""
        del was_suspended
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end_because(self, why: str) -> None:
        """End everything; later calls are told why."""
        self.ended_because = why
        self.end_unwatched()

    def end_unwatched(self) -> None:
        """End everything: the agent that watched over a process tree, or the zygote, died without a report.

        What they watched may run on, and nobody could end it in time.
        """
        try:
            with self._lock:
                self._unwatched = True
                self.terminate()
        except ExecError:
            pass  # reported by the next call

    def _wait_until_empty(self) -> None:
        """A PID namespace's PID 1 ends only when all the others have: then every process is gone."""
        if not _has_ended(self.pidfd, _DYING_MS):
            raise ExecError(
                "a process of the sandbox cannot be killed (uninterruptible sleep?)",
                hint="its user ids and cgroup stay reserved until the process ends",
            )

    def _release(self) -> None:
        """Close and give back what it had: nothing of it runs any more."""
        raise NotImplementedError


class InCgroup(LocalSandbox):
    group: Group
    _hurries = 0

    def unthrottle(self, on: bool) -> None:
        with self._unthrottle_lock:
            self._hurries += 1 if on else -1
            if self._hurries != (1 if on else 0):
                return  # something else is being killed as well
            try:
                self.group.unthrottle(on)
            except OSError:
                pass  # the cgroup is gone: everything in it is dead

    def oom_kills(self) -> int | None:
        return self.group.oom_kills()

    def _end(self, was_suspended: bool) -> None:
        self.unthrottle(True)
        super()._end(was_suspended)
        if was_suspended and self.group.can_freeze:
            # Newer kernels let SIGKILL through a freeze: then the cgroup may be gone already.
            try:
                self.group.thaw()
            except OSError:
                pass


class Awake:
    """Thawed while in the `with` block; nobody else changes the sandbox's state meanwhile."""

    def __init__(self, sandbox: LocalSandbox, lock: RLock) -> None:
        self._sandbox, self._lock, self._frozen = sandbox, lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._frozen = self._sandbox.paused and not self._sandbox.answers_frozen
        if self._frozen:
            self._sandbox._freeze(False)

    def __exit__(self, *_exc: object) -> None:
        try:
            if self._frozen and self._sandbox.paused:
                self._sandbox._freeze(True)
        finally:
            self._lock.release()


def _has_ended(pidfd: int, patience_ms: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(patience_ms))
