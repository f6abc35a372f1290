"""A sandbox without namespaces, seen from the host."""

from __future__ import annotations

import _signal as signal
import socket
import time

from ...errors import InvalidRequest
from ...guest.without_namespaces.landlocked import ENDED_ALL, kill_members
from ...model.state import State
from ...policy.trust import DIRECTORY
from ..command.sandbox import CommandSandbox, end
from ..local.agents.fileinfo import absolute
from ..local.agents.guest import GuestSandbox
from ..local.agents.guest_files import GuestFiles
from ..local.answers import answer
from ..local.host.accounts import Account
from ..local.jailed import saving
from . import stopping
from .network import LandlockNetwork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ...launcher import wire
    from ...model.execs.exec import ExecRequest
    from ...model.net.network import NetworkPolicy
    from ...model.session import ResolvedMount, Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.host.cgroups import Group
    from ..local.mounts.trusted import Trusted
    from ..local.network import SandboxNetwork
    from ..local.protections import Reader
    from .backend import LandlockBackend
    from .network import Loopback
    from .place import Place
    from .starter import Guardian

_PAUSE_S = 0.001
# git ends when it may not read a configuration of the host's that exists.
# glibc asks for names over TCP with the second: there are no datagrams.
_OWN = {"GIT_CONFIG_NOSYSTEM": "1", "RES_OPTIONS": "use-vc"}
_VARIABLES = ("HOME", "RINGFENCE_MEMORY_DIR", "RINGFENCE_OUTPUTS_DIR")


class LandlockSandbox(CommandSandbox):
    """See `BackendSandbox`. Its first process is the guardian, with which everything ends.

    Args:
        asks_about_forks: Each fork waits for the agent, which counts processes.
        tag_base: All its processes have a tag of `guest.without_namespaces.landlocked.TAGS` below this.
    """

    place: Place  # type: ignore[assignment]
    has_whiteouts = False  # a snapshot has all of its directories

    def __init__(
        self,
        backend: LandlockBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        guardian: Guardian,
        agent: int,
        group: Group,
        place: Place,
        host_ids: int,
        tag_base: int,
        loopback: Loopback,
        trusted: Trusted | None,
        *,
        asks_about_forks: bool,
    ) -> None:
        self.asks_about_forks = asks_about_forks
        self._tag_base, self._loopback = tag_base, loopback
        super().__init__(
            backend,
            spec,
            sandbox_id,
            uid,
            mounts,
            control,
            [],
            guardian.pid,
            agent,
            None,
            guardian,  # type: ignore[arg-type]
            group,
            place,  # type: ignore[arg-type]
            host_ids,
            trusted,
        )
        self.network = LandlockNetwork(self, loopback, trusted)  # type: ignore[assignment]
        self.can_suspend = True
        self._stopped: set[int] = set()
        self.root = place.mapped(self.root)
        self.files = LandlockFiles(self)

    def join_network(self, network: SandboxNetwork) -> None:
        super().join_network(network)
        self._environment |= self._of_place()

    def begin(self, spec: SandboxSpec) -> None:
        super().begin(spec)
        self._environment |= self._of_place()

    def _of_place(self) -> dict[str, str]:
        """Variables that tell where its directories are; the user's own win."""
        own = {name: self.place.mapped(self._environment[name]) for name in _VARIABLES}
        trusted = self.network.trusted
        for name, value in (trusted.env if trusted else {}).items():
            own[name] = value.replace(DIRECTORY, self.place.mapped(DIRECTORY))
        return {**_OWN, "TMPDIR": self.place.mapped("/tmp"), **own, **self.spec.env}

    def seen_at(self, path: str) -> str:
        return self.place.mapped(path)

    def working_directory(self, cwd: str | None) -> str:
        return self.place.mapped(super().working_directory(cwd))

    def as_asked(self, request: ExecRequest, own: Mapping[str, str]) -> tuple[Any, ...]:
        """See `LocalSandbox`; a whole argument that is a path in its directories is mapped, too."""
        argv, *rest = super().as_asked(request, own)
        return [self.place.mapped(word) if word[:1] == "/" else word for word in argv], *rest

    def _account(self, user: str | None) -> Account:
        if user in (None, "sandbox", str(self.uid)):
            return Account(self.uid, {})
        raise InvalidRequest(
            f"no user {user!r} here: without a user namespace all processes have one uid, {self.uid}",
            field="user",
        )

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        GuestSandbox.apply_network_policy(self, policy)
        self._environment |= self._of_place()

    def connect(self, port: int) -> socket.socket:
        return GuestSandbox.connect(self, port)

    def _reader(self) -> Reader:
        from .report import LandlockReader

        return LandlockReader(self)

    # -- standing still, and snapshots ------------------------------------------------------------

    @property
    def answers_frozen(self) -> bool:
        """See `LocalSandbox`: signals stop the programs alone."""
        return not self.group.can_freeze

    def _freeze(self, frozen: bool) -> None:
        if self.group.can_freeze:
            super()._freeze(frozen)
        elif frozen:
            self._stopped = stopping.stop(self._tag_base, self.pid)
        else:
            stopping.go_on(self._tag_base, self._stopped)

    def snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None = None) -> Snapshot:
        """See `BackendSandbox`. The agent reads the files, so signals stop the programs meanwhile."""
        with self._lock:
            if self.state is State.TERMINATED:
                raise self.terminated_error("snapshot")
            stopped = stopping.begin(
                self._tag_base, self.pid
            )  # they stay still when a cgroup lets the agent go on
            try:
                with self.awake():
                    stopped |= stopping.stop(self._tag_base, self.pid)
                    kept = catalogue or self.owner.catalogue()
                    return saving.keep(self, kept, metadata, self._save)
            finally:
                stopping.go_on(self._tag_base, stopped)

    def _save(self, pipe: int) -> None:
        reply = self.request("save", (self.place.saved(), self.place.links), (pipe,))
        try:
            answer(reply, None)
        finally:
            reply.close()

    def load(self, content: int) -> None:
        """Unpack a snapshot's files; on failure the sandbox is ended."""
        self.unpack((self.place.path, self.place.saved(), self.place.links), content)

    # -- end --------------------------------------------------------------------------------------

    def _end(self, was_suspended: bool) -> None:
        """Have the guardian end everything: it sees that nobody is at the other end any more."""
        self.unthrottle(True)
        try:
            self.control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # nobody is there
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
        except ProcessLookupError:
            pass
        if was_suspended and self.group.can_freeze:
            try:
                self.group.thaw()
            except OSError:
                pass

    def _let_go(self) -> None:
        end(self._launcher)
        # If the guardian and the agent were killed at once, nobody was left to end the others.
        while self._launcher.returncode != ENDED_ALL and kill_members(self._tag_base):
            time.sleep(_PAUSE_S)
        self._loopback.close()
        super()._let_go()


class LandlockFiles(GuestFiles):
    """See `BackendFiles`: paths of the sandbox's own directories are mapped to where they are."""

    _sandbox: LandlockSandbox

    def _absolute(self, path: str) -> str:
        place: Any = self._sandbox.place
        mapped: str = place.mapped(absolute(self._sandbox.root, path))
        return mapped
