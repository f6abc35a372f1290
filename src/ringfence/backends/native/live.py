"""A running native sandbox: its facts, and how the host reaches PID 1 and the namespaces."""

from __future__ import annotations

import os
import time

from ...linux import namespaces
from ...model.state import State
from ..local.host.facts import host
from ..local.sandbox import InCgroup
from ..local.session import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from ...egress.host.client import Egress
    from ...launcher import wire
    from ...launcher.plan import Plan
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.agents.execs import LocalExec
    from ..local.host.cgroups import Group, Layout
    from ..local.network import SandboxNetwork
    from ..optional import ProcessTemplate
    from .fd_store.no_handover import NoHandover
    from .planner import Draft
    from .zygote import Zygote

    class Home(Protocol):
        """Interface that a sandbox needs of its backend."""

        name: str
        handover: NoHandover

        @property
        def is_making(self) -> bool: ...
        def egress(self) -> Egress: ...
        def catalogue(self) -> Catalogue: ...
        def label(self) -> str: ...
        def layout(self) -> Layout: ...
        def released(self, sandbox: LiveSandbox) -> None: ...


class LiveSandbox(InCgroup):
    """The state of a native sandbox. The operations of `NativeSandbox` are built on it."""

    backend: Home
    network: SandboxNetwork

    def __init__(
        self, backend: Home, draft: Draft, control: wire.Socket, plan: Plan, zygote: Zygote
    ) -> None:
        super().__init__(backend, draft.spec, draft.spec.id or draft.id, draft.mounts, control, -1)
        self.profile, self.sizes = draft.request.profile, draft.request.sizes
        self.group: Group = draft.group
        self.uid, self.first_host_id = draft.uid, draft.first_host_id
        self.landlock_writable = draft.writable
        self.host_directory = draft.host_directory
        self.base = draft.base
        self.lower = draft.base.lower if draft.base is not None else ()
        self.furniture = b""  # packed, where its root has nothing else; see `fresh`
        self.pid, self.zygote = 0, zygote
        self.namespace_fds: list[int] = []  # mnt; and pid, where it could not be opened again
        self.protected, self.note = draft.protected, draft.note
        self.disk = draft.disk
        self.agents: dict[int, wire.Socket] = {}  # uid -> control of an agent of that user
        self.unix_sockets = draft.unix_sockets
        self.lockdown = plan.copy()
        self.lockdown["trees"], self.lockdown["steps"] = [], []
        self.spec_text: tuple[SandboxSpec, str] | None = None  # a spec of it, as it is kept
        self.created = time.monotonic()
        self.count = 0  # of execs so far
        self.runs: dict[int, LocalExec] = {}
        # For want of memory: how many, and when the last was seen.
        self._kills_seen, self._killed_at = 0, 0.0
        # Paths, by device and inode, of files that copied processes in it have mapped: see `live_copies`.
        self.mapped_files: dict[tuple[int, int], bytes] = {}
        self.was_paused = False  # by an earlier process, as far as it came
        # Templates that read memory of copies in its PID namespace, which end with it.
        self.loading: set[ProcessTemplate] = set()

    def begun(self, pid: int, pidfd: int, namespace_fds: list[int], sockets: list[int]) -> None:
        """It is there: its PID 1, and descriptors of its mount and PID namespace and its network."""
        self.pid, self.pidfd, self.namespace_fds = pid, pidfd, namespace_fds
        if host().opens_namespaces:
            for fd in namespace_fds[1:]:
                os.close(fd)
            del namespace_fds[1:]
        self.network.have(sockets)

    def remember(self, created: float, count: int, placeholders: dict[str, str]) -> None:
        """Restore the state that an earlier process had of it."""
        self.created, self.count = created, count
        self._state = State.RUNNING if count else State.PROVISIONED
        self.network.placeholders = placeholders
        self._environment = environment(self.spec, self.network.environment())

    def restore_state(self, state: State) -> None:
        """After a pause of our own, which the state must not tell about."""
        with self._lock:
            if self._state is State.RUNNING:
                self._state = state

    def forget(self, run: LocalExec) -> None:
        """The exec has ended or is no longer watched."""
        self.runs.pop(run.number, None)

    # -- asking PID 1 -----------------------------------------------------------------------

    def oom_kills(self) -> int | None:
        """Every exec asks twice."""
        count = self.group.oom_kills(again=self.pidfd >= 0)
        if count and count != self._kills_seen:
            self._kills_seen, self._killed_at = count, time.monotonic()
        return count

    def tell(self, verb: str, *args: object, fds: list[int]) -> None:
        """Send PID 1 a request that is answered on one of `fds`, or not at all."""
        self.send((verb, *args), fds)

    def ask_files(self, verb: str, *args: object) -> tuple[bytes, list[int]]:
        """`ask`, where the state allows it."""
        self.require_awake()
        return self.ask(verb, *args)

    def borrow_namespaces(self) -> list[int]:
        """Descriptors of its user, mount and PID namespace, the caller's to close.

        Copies: the sandbox may end at any moment, and the number of a descriptor that was closed is
        soon that of another one, of another sandbox even.

        Raises:
            SandboxLost: It is gone.
        """
        borrowed: list[int] = []
        try:
            with self._fds_lock:
                if not self.namespace_fds:
                    raise self.lost_error()
                borrowed.append(namespaces.owner_of(self.namespace_fds[0]))
                borrowed += map(os.dup, self.namespace_fds)
            if len(borrowed) < 3:
                borrowed.append(self._open_pid_namespace())
        except BaseException:
            for fd in borrowed:
                os.close(fd)
            raise
        return borrowed

    def _open_pid_namespace(self) -> int:
        try:
            fd = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            raise self.lost_error() from None
        if self._is_gone():  # then its number may be somebody else's by now
            os.close(fd)
            raise self.lost_error()
        return fd
