"""A sandbox whose processes an agent inside starts, ends and reaches files for, seen from the host."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from _thread import RLock, allocate_lock
from dataclasses import replace

from ...errors import (
    ConnectError,
    ExecError,
    InvalidRequest,
    LifecycleError,
    NetworkPolicyError,
    SandboxLost,
    Unsupported,
)
from ...launcher import wire
from ...model import checks
from ...model.exec import ExecRequest
from ...model.session import ResolvedMount, Session
from ...model.state import State, check_transition
from ...model.stats import SandboxStats
from .accounts import Account, find
from .answers import Refused, answer
from .execs import LocalExec
from .guest_files import GuestFiles
from .host import out_of_files
from .session import environment, session_root
from .streams import open_channels, reset_on_close

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from ...egress.client import Egress
    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.netlog import NetworkEvent
    from ...model.network import NetworkPolicy
    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from .network import SandboxNetwork

    class Owner(Protocol):
        """What such a sandbox needs of its backend."""

        name: str

        def egress(self) -> Egress:
            """Who moves the data of forwarded connections."""
            ...


_ASK_S, _DIAL_S = 30.0, 10.0
_DYING_MS = 30_000


class GuestSandbox:
    """See `BackendSandbox`. All methods may be called from any thread.

    Args:
        control: To the agent.
        pidfd: Of a process that ends last of all, and with whose death all others die: PID 1.
        last_number: Of the execs that the agent, if it was restored, has had before.

    Attributes:
        can_suspend: Whether there is a `_freeze` that can stop all of it.
    """

    can_suspend = True

    def __init__(
        self,
        backend: Owner,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        pidfd: int,
        last_number: int = 0,
    ) -> None:
        self.backend, self.spec, self.id, self.uid = backend, spec, sandbox_id, uid
        self.mounts, self.control, self.pidfd = mounts, control, pidfd
        self.root = session_root(spec)
        self.files = GuestFiles(self)
        self._lock = RLock()
        self._send_lock, self._order = allocate_lock(), allocate_lock()
        self._fds_lock = allocate_lock()
        self._state = State.PROVISIONED
        self._created = time.monotonic()
        self._numbers = self._execs_before = last_number
        self._live: dict[int, LocalExec] = {}
        self._last_stats: SandboxStats | None = None
        self.last_protections: tuple[Protection, ...] = ()
        self._environment = environment(spec, {})
        self.network: SandboxNetwork | None = None

    def join_network(self, network: SandboxNetwork) -> None:
        """Begin to answer what its programs ask of the network; when that fails, it has ended."""
        self.network = network
        self._environment = environment(self.spec, network.environment())
        try:
            network.serve()
        except BaseException:
            self.terminate()
            raise

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

    def stats(self) -> SandboxStats:
        with self._lock:
            if self._state is State.TERMINATED:
                return self._last_stats or SandboxStats(State.TERMINATED, execs=self._execs)
            return self._read_stats(self._state)

    def _read_stats(self, state: State) -> SandboxStats:
        """What is known of it now; as it will be told once it has ended, if `state` says so."""
        raise NotImplementedError

    def protections(self) -> tuple[Protection, ...]:
        raise NotImplementedError

    def granted(self) -> SandboxCapabilities:
        raise NotImplementedError

    def hurry(self, on: bool) -> None:
        """Something is being killed, which no processor limit must slow down; or is no more."""

    def oom_kills(self) -> int | None:
        """How often the host killed something inside for lack of memory; None where nobody counts."""
        return None

    @property
    def _execs(self) -> int:
        return self._numbers - self._execs_before

    # -- exec -------------------------------------------------------------------------------

    def start(self, request: ExecRequest) -> LocalExec:
        with self._lock:
            self._require(State.RUNNING, "exec")
        account = self._account(request.user)
        ours, theirs, inner, outer = open_channels(request)
        if request.pty is not None:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            near.setblocking(False)
            inner, terminal = [far.detach()], near.detach()
            outer = (terminal, terminal, None)
        environment = {**self._environment, **account.env, **request.env}
        if request.pty is not None:
            environment.setdefault("TERM", "xterm-256color")
        cwd = os.path.join(self.root, request.cwd) if request.cwd else self.root
        timeout = request.timeout_s or self.spec.limits.wall_time_s or 0.0
        rest = (list(request.argv), environment, cwd, timeout, request.pty, account.uid)
        with self._order:
            self._numbers += 1
            number = self._numbers
            kills = self.oom_kills()
            run = GuestExec(self, number, self.control, ours, outer, kills, request.argv[0], cwd)
            self._live[number] = run
            try:
                self.send(("exec", number, *rest), [theirs.fileno(), *inner])
            except BaseException:
                run.close()
                raise
            finally:
                theirs.close()
                for fd in set(inner):
                    os.close(fd)
        return run

    def _account(self, user: str | None) -> Account:
        """Who one exec runs as.

        Raises:
            InvalidRequest: No such user.
            Unsupported: Processes cannot be that user's.
        """
        if user is None:
            return Account(self.uid, {})
        account = find(self.files, user)
        if self._may_be(account.uid):
            return account
        raise Unsupported(
            f"uid {account.uid} is not mapped in this sandbox",
            backend=self.backend.name,
            operation="exec as another user",
            field="user",
            hint="create the sandbox with this user",
        )

    def _may_be(self, uid: int) -> bool:
        return uid == self.uid

    def forget(self, run: LocalExec) -> None:
        """The exec has ended or is no longer watched."""
        self._live.pop(run.number, None)

    # -- asking the agent -------------------------------------------------------------------

    def send(self, message: object, fds: list[int]) -> None:
        """One request that is answered on the first of `fds`, if at all."""
        try:
            with self._send_lock:
                wire.send(self.control, message, fds)
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
        """One request to the agent.

        Raises:
            Refused: As the guest's kernel told the agent.
            SandboxLost: It is gone.
        """
        del control  # there is one agent
        reply = self.request(verb, args)
        try:
            return answer(reply, timeout_s)
        except SandboxLost:
            raise self.lost_error() from None
        finally:
            reply.close()

    def request(
        self, verb: str, args: tuple[object, ...], fds: tuple[int, ...] = ()
    ) -> wire.Socket:
        """One request whose answers the caller reads from the socket, and then closes it."""
        ours, theirs = wire.socketpair()
        try:
            self.send((verb, *args), [theirs.fileno(), *fds])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def require_awake(self) -> None:
        """Raises LifecycleError unless something inside can answer."""
        with self._lock:
            if self._state is State.SUSPENDED:
                raise LifecycleError("a suspended sandbox does not answer", hint="resume it first")
            if self._state is State.TERMINATED:
                raise LifecycleError("the sandbox is terminated")

    def lost_error(self) -> SandboxLost | LifecycleError:
        """Why nothing more can be learnt from this sandbox."""
        if self._state is State.TERMINATED:
            return SandboxLost("the sandbox was terminated under it")
        why = ": the kernel ran out of the memory allowed to it" if self.oom_kills() else ""
        return SandboxLost(f"the sandbox ended unexpectedly{why}", hint="create a new sandbox")

    def _is_gone(self) -> bool:
        with self._fds_lock:
            if self.pidfd < 0:
                return True
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))

    def borrow_pidfd(self) -> int:
        """A pidfd of the hull's PID 1, the caller's to close.

        Raises:
            SandboxLost: It is gone.
        """
        with self._fds_lock:
            if self.pidfd < 0:
                raise self.lost_error()
            return os.dup(self.pidfd)

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
            self._freeze(True)
            self._state = check_transition(self._state, State.SUSPENDED)

    @property
    def paused(self) -> bool:
        """Whether it is suspended."""
        return self._state is State.SUSPENDED

    def awake(self) -> Awake:
        """For a moment in which the agent must answer although the sandbox is suspended."""
        return Awake(self, self._lock)

    def resume(self) -> None:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("resume: the sandbox is terminated")
            if self._state is not State.SUSPENDED:
                if not self.can_suspend:
                    self._freeze(False)  # says so
                return
            self._freeze(False)
            self._state = State.RUNNING

    def _freeze(self, frozen: bool) -> None:
        del frozen
        raise Unsupported(
            f"{self.backend.name} cannot stop what it runs",
            backend=self.backend.name,
            operation="suspend",
        )

    def terminate(self) -> None:
        with self._lock:
            if self._state is State.TERMINATED:
                return
            was_suspended = self._state is State.SUSPENDED
            if not self._is_gone():
                self._remember_stats()
            self._state = State.TERMINATED
            self._end(was_suspended)
            self._wait_until_empty()
            self._release()

    def _end(self, was_suspended: bool) -> None:
        """Kill PID 1, and with it its namespace."""
        del was_suspended
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end_unwatched(self) -> None:
        """The agent is gone without a word, and nobody could end in time what it watched."""
        try:
            self.terminate()
        except ExecError:
            pass  # reported by the next call

    def _remember_stats(self) -> None:
        """Counters vanish with the cgroup: keep them, so that killed runs are still accounted."""
        try:
            self._last_stats = self._read_stats(State.TERMINATED)
        except (OSError, SandboxLost):
            pass

    def _wait_until_empty(self) -> None:
        """A PID namespace's PID 1 ends only when all the others have: then every process is gone."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(_DYING_MS):
            raise ExecError(
                "a process of the sandbox does not die (uninterruptible sleep?)",
                hint="its user ids and cgroup stay reserved until it does",
            )

    def _release(self) -> None:
        with self._send_lock:
            self.control.close()
        with self._fds_lock:
            closing, self.pidfd = self.pidfd, -1
        os.close(closing)
        if self.network is not None:
            self.network.close()
        self._let_go()

    def _let_go(self) -> None:
        """Give back what the backend holds for it: nothing of it runs any more."""

    # -- the rest of the contract -------------------------------------------------------------

    def attach(self, mount: Mount) -> ResolvedMount:
        del mount
        with self._lock:
            self._require(self._state, "mount")
        raise Unsupported(
            f"{self.backend.name} takes no mounts once it runs",
            backend=self.backend.name,
            operation="attach",
            hint="give the mount when the sandbox is created",
        )

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        with self._lock:
            if self.state is State.TERMINATED:
                raise LifecycleError("network policy: the sandbox is terminated")
            if self.network is None:
                raise NetworkPolicyError(
                    f"a {self.backend.name} sandbox that was made without a network policy gets none later",
                    field="network",
                    hint="create a new sandbox with this policy",
                )
            self.network.check(policy)
            if policy != self.spec.network:
                self.network.change(policy)
                self.spec = replace(self.spec, network=policy)
                self._environment = environment(self.spec, self.network.environment())

    def connect(self, port: int) -> socket.socket:
        checks.integer(port, "port", 1, 65535)
        self.require_awake()
        for version in (4, 6):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            reply = self.request("dial", (version, port), (far.fileno(),))
            far.close()
            try:
                answer(reply, _DIAL_S)
            except Refused:
                near.close()
                continue
            except BaseException:
                near.close()
                raise
            finally:
                reply.close()
            return near
        raise ConnectError(
            f"no server inside accepts connections on port {port}",
            hint="it must listen on 127.0.0.1, ::1 or every address",
            field="port",
        )

    def forward(self, port: int, client: socket.socket) -> None:
        with client:
            try:
                with self.connect(port) as inside:
                    self.backend.egress().relay(self.id, port, client.fileno(), inside.fileno())
            except BaseException:
                reset_on_close(client)
                raise

    def network_log(self) -> list[NetworkEvent]:
        # Nothing can be asked of a network that is not there.
        return self.network.events() if self.network is not None else []

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        del metadata
        raise Unsupported(backend=self.backend.name, operation="checkpoint")

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        del metadata
        raise Unsupported(backend=self.backend.name, operation="snapshot")


class GuestExec(LocalExec):
    """A process tree in a guest. Its terminal lies inside; the agent passes bytes on."""

    def resize(self, rows: int, cols: int) -> None:
        if self.stdout is None or self.stderr is not None:
            raise InvalidRequest("this exec has no terminal", field="pty")
        self._sandbox.ask("resize", self.number, rows, cols)


class Awake:
    """Thawed while in the `with` block; nobody else changes the sandbox's state meanwhile."""

    def __init__(self, sandbox: GuestSandbox, lock: RLock) -> None:
        self._sandbox, self._lock, self._frozen = sandbox, lock, False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._frozen = self._sandbox.paused
        if self._frozen:
            self._sandbox._freeze(False)

    def __exit__(self, *_exc: object) -> None:
        try:
            if self._frozen and self._sandbox.paused:
                self._sandbox._freeze(True)
        finally:
            self._lock.release()
