"""A sandbox with an agent inside that starts and ends processes and serves files, seen from the host."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

from ....errors import (
    ConnectError,
    InvalidRequest,
    IoError,
    NetworkPolicyError,
    SandboxLost,
    Unsupported,
)
from ....launcher import wire
from ....model.base import checks
from ....model.execs.exec import ExecRequest
from ....model.session import ResolvedMount
from ....model.state import State
from ....model.stats import SandboxStats
from ..acquired import Acquired
from ..answers import Refused, answer
from ..host.accounts import Account, find
from ..sandbox import LocalSandbox
from ..session import environment
from .execs import LocalExec
from .guest_files import GuestFiles
from .streams import lend, open_channels, reset_on_close

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from ....egress.host.client import Egress
    from ....model.capabilities import Protection
    from ....model.granted import SandboxCapabilities
    from ....model.mount import Mount
    from ....model.net.netlog import NetworkEvent
    from ....model.net.network import NetworkPolicy
    from ....model.session import Snapshot
    from ....model.spec import SandboxSpec
    from ..network import SandboxNetwork
    from ..protections import Reader

    class Owner(Protocol):
        """Interface that such a sandbox needs of its backend."""

        name: str

        def egress(self) -> Egress:
            """Return the egress process, which moves the data of forwarded connections."""
            ...


_ASK_S, _DIAL_S = 30.0, 10.0
_DYING_MS = 30_000


class GuestSandbox(LocalSandbox):
    """See `BackendSandbox`. All methods may be called from any thread.

    Args:
        control: To the agent.
        pidfd: Of a process that ends last of all, and with whose death all others die: PID 1.
        last_number: Of the execs that the agent, if it was restored, has had before.

    Attributes:
        can_suspend: Whether there is a `_freeze` that can stop all of it.
    """

    backend: Owner
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
        super().__init__(backend, spec, sandbox_id, mounts, control, pidfd)
        self.uid = uid
        self.files = GuestFiles(self)
        self._created = time.monotonic()
        self._numbers = self._execs_before = last_number
        self._live: dict[int, LocalExec] = {}
        self._environment = environment(spec, {})
        self.network: SandboxNetwork | None = None

    def begin(self, spec: SandboxSpec) -> None:
        """Be somebody's, from now on, under a spec that differs in what the host alone keeps."""
        self.spec, self._created = spec, time.monotonic()
        self._environment = environment(
            spec, self.network.environment() if self.network is not None else {}
        )

    def complete(self, *steps: Callable[[], object]) -> None:
        """Take the last steps of a create, one after the other; where one fails, the sandbox has ended."""
        with Acquired() as acquired:
            acquired.callback(self.terminate)
            for step in steps:
                step()
            acquired.pop_all()

    def join_network(self, network: SandboxNetwork) -> None:
        """Begin to answer what its programs ask of the network."""
        self.network = network
        self._environment = environment(self.spec, network.environment())
        network.serve()

    # -- describing -------------------------------------------------------------------------

    def stats(self) -> SandboxStats:
        with self._lock:
            if self._state is State.TERMINATED:
                return self._last_stats or SandboxStats(State.TERMINATED, execs=self._execs)
            return self._read_stats(self._state)

    def _read_stats(self, state: State) -> SandboxStats:
        """Read the current usage; as it will be reported after the end, if `state` says so."""
        raise NotImplementedError

    def protections(self) -> tuple[Protection, ...]:
        """Of a live sandbox; of one that stands still or has ended, what was last read."""
        from ..protections import protections_of

        return protections_of(self, self._reader)

    def _reader(self) -> Reader:
        """Make what reads its protections back."""
        raise NotImplementedError

    def granted(self) -> SandboxCapabilities:
        raise NotImplementedError

    @property
    def _execs(self) -> int:
        return self._numbers - self._execs_before

    def seen_at(self, path: str) -> str:
        """Return where the agent finds an absolute path of the sandbox: the same, with a root of its own."""
        return path

    def unpack(self, arguments: tuple[Any, ...], content: int) -> None:
        """Have the agent unpack a snapshot's files.

        Args:
            arguments: Of its verb `load`.

        Raises:
            IoError: It could not, and why.
        """
        reply = self.request("load", arguments, (content,))
        try:
            answer(reply, None)
        except Refused as exc:
            raise IoError(f"the snapshot was not unpacked: {exc.strerror}") from exc
        finally:
            reply.close()

    def _end_programs(self) -> int:
        return int(self.ask("end_all")[0])

    # -- exec -------------------------------------------------------------------------------

    def start(self, request: ExecRequest) -> LocalExec:
        return self._start(request, GuestExec)

    def _start(self, request: ExecRequest, kind: type[GuestExec]) -> GuestExec:
        with self._lock:
            self._require(State.RUNNING, "exec")
        account = self._account(request.user)
        ours, theirs, inner, outer = open_channels(request)
        if request.pty is not None:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            near.setblocking(False)
            inner, terminal = [far.detach()], near.detach()
            outer = (terminal, terminal, None)
        else:
            lend(inner)
        rest = (*self.as_asked(request, account.env), account.uid, kind.is_relayed)
        cwd = self.working_directory(request.cwd)
        with self._order:
            self._numbers += 1
            number = self._numbers
            kills = self.oom_kills()
            run = kind(self, number, self.control, ours, outer, kills, request.argv[0], cwd)
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
        """Find the user of an exec.

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

    # -- life -------------------------------------------------------------------------------

    def _resume_awake(self) -> None:
        if not self.can_suspend:
            self._freeze(False)  # says so

    def _freeze(self, frozen: bool) -> None:
        del frozen
        raise Unsupported(
            f"{self.backend.name} cannot suspend processes",
            backend=self.backend.name,
            operation="suspend",
        )

    def _about_to_end(self) -> None:
        if not self._is_gone():
            self._remember_stats()

    def _remember_stats(self) -> None:
        """Counters vanish with the cgroup: keep them, so that killed runs are still accounted."""
        try:
            self._last_stats = self._read_stats(State.TERMINATED)
        except (OSError, SandboxLost):
            pass

    def _release(self) -> None:
        with self._send_lock:
            self.control.close()
        with self._fds_lock:
            closing, self.pidfd = self.pidfd, -1
        with Acquired() as held:
            held.callback(self._let_go)
            if self.network is not None:
                held.callback(self.network.close)
            os.close(closing)

    def _let_go(self) -> None:
        """Give back what the backend holds for it: nothing of it runs any more."""

    # -- the rest of the contract -------------------------------------------------------------

    def attach(self, mount: Mount) -> ResolvedMount:
        del mount
        with self._lock:
            self._require(self._state, "mount")
        raise Unsupported(
            f"{self.backend.name} cannot add mounts to a running sandbox",
            backend=self.backend.name,
            operation="attach",
            hint="give the mount when the sandbox is created",
        )

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("network policy")
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
            f"no server in the sandbox accepts connections on port {port}",
            hint="the server must listen on 127.0.0.1, ::1 or all addresses",
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
    """A process tree in a guest. Its terminal lies inside; the agent passes bytes on.

    Attributes:
        is_relayed: The agent passes on the bytes of its other streams too.
    """

    asks_to_resize = True
    is_relayed = False

    def resize(self, rows: int, cols: int) -> None:
        if self.stdout is None or self.stderr is not None:
            raise InvalidRequest("this exec has no terminal", field="pty")
        self._sandbox.ask("resize", self.number, rows, cols)
