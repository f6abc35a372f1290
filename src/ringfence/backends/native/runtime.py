"""State that the sandboxes of a native backend share: its zygote, cgroups, host ids and fd store."""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread

from ...errors import InvalidRequest
from ...model.base.ids import new_id
from ..local import journal
from ..local.base import LocalBackend
from ..local.host import cgroups, identity
from . import ids
from .fd_store.no_handover import NoHandover
from .zygote import Zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...egress.host.client import Egress
    from ...model.spec import SandboxSpec
    from .live import LiveSandbox
    from .profiles import Profile
    from .sandbox import NativeSandbox

NAME = "native"


class Runtime(LocalBackend):
    """The state of a native backend. `NativeBackend` makes sandboxes with it."""

    name = NAME

    def __init__(
        self,
        egress: Callable[[], Egress] | None,
        state_dir: str | None,
        zygote: Zygote | None,
        profiles: dict[str, Profile],
    ) -> None:
        super().__init__(egress, state_dir)
        self.handover = NoHandover()
        self.profiles = profiles
        self._lock, self._first_use = allocate_lock(), allocate_lock()
        self._early = zygote
        self._zygote: Zygote | None = None
        self._layout: cgroups.Layout | None = None
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, NativeSandbox] = {}
        self._making: set[str] = set()
        self._under_way: list[None] = []

    # -- sandboxes --------------------------------------------------------------------------

    @property
    def is_making(self) -> bool:
        """True while a create is in progress."""
        return bool(self._under_way)

    @property
    def others_wait(self) -> bool:
        """True while several creates are in progress."""
        return len(self._under_way) > 1

    def take_host_ids(self, profile: Profile) -> int:
        """The first of a range that is one sandbox's, where it has ids of its own; else 0."""
        return self.host_ids().take() if ids.are_wanted(profile) else 0

    def new_id(self, spec: SandboxSpec) -> str:
        """The id that it asks for, or a new one; nobody else gets it until `made`."""
        if spec.id is None:
            return new_id(NAME)
        with self._lock:
            if any(spec.id in ids for ids in self._ids()):
                raise InvalidRequest(f"a sandbox {spec.id!r} already exists", field="id")
            self._making.add(spec.id)
        return spec.id

    def _ids(self) -> Iterator[tuple[str, ...]]:
        """Yield the ids of all sandboxes in lifecycle order, so that one that moves on meanwhile is
        not missed.
        """
        yield self._prebuilt_ids()
        yield tuple(self._making)
        yield tuple(self._live)

    def making(self, sandbox_id: str) -> None:
        """It is being made of one built ahead."""
        self._making.add(sandbox_id)

    def made(self, sandbox_id: str) -> None:
        self._making.discard(sandbox_id)

    def released(self, sandbox: LiveSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        if sandbox.first_host_id:
            self.host_ids().give_back(sandbox.first_host_id)
        self._live.pop(sandbox.id, None)
        if sandbox.base is not None:
            sandbox.base.close()
        if sandbox.disk is not None:
            sandbox.disk.remove()

    @property
    def outlives(self) -> bool:
        return self.handover.outlives

    def label(self) -> str:
        """Of the process with which its sandboxes end, where that is not this one."""
        return self.zygote().label if self.handover.outlives else ""

    def living(self) -> list[NativeSandbox]:
        return list(self._live.values())

    def count(self, sandbox: NativeSandbox) -> None:
        """It is one of ours: just made, or by an earlier process."""
        self._live[sandbox.id] = sandbox
        if sandbox.disk is not None and sandbox.disk.path:
            from ..local.mounts import disks

            disks.watch(sandbox.disk, sandbox.sizes, sandbox)

    def leave(self) -> None:
        """Let every sandbox live on for the next process. Preconditions: there is an fd store."""
        self.handover.leave()
        for sandbox in self.living():
            sandbox.leave()
        self._live.clear()
        with self._lock:
            if self._zygote is not None:
                self._zygote.leave()
                self._zygote = None
        if self._host_ids is not None:
            self._host_ids.leave()

    def close(self) -> None:
        """End the zygote, and let go of the ids. Preconditions: every sandbox has ended."""
        self.handover.close()
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
        if self._host_ids is not None:
            self._host_ids.close()

    # -- shared parts -----------------------------------------------------------------------

    def zygote(self) -> Zygote:
        """The zygote of this process; a new one when the last is gone or belongs to our parent."""
        self.handover.open()
        with self._lock:
            if self._zygote is None or self._zygote.owner != os.getpid() or not self._zygote.alive:
                started, self._early = self._early or Zygote(outlives=self.outlives), None
                self._begin(started)
                self.handover.change_zygote(started)
            assert self._zygote is not None
            return self._zygote

    def use(self, zygote: Zygote) -> None:
        """Take over the zygote of an earlier process."""
        with self._lock:
            self._begin(zygote)

    def _begin(self, zygote: Zygote) -> None:
        self._zygote = zygote
        if self._host_ids is not None:
            for lock in self._host_ids.locks():
                zygote.tell("hold", None, [lock])
        # Its death ends every sandbox; somebody must thaw the frozen and clear up.
        start_new_thread(self._watch, (zygote,))

    def _watch(self, zygote: Zygote) -> None:
        while ended := zygote.wait_or_hear():
            for fd in ended:
                self._hear(zygote, fd)
        for sandbox in [s for s in list(self._live.values()) if s.zygote is zygote]:
            sandbox.end_unwatched()
        self._lose(zygote)
        zygote.finish({each for ids in self._ids() for each in ids})
        zygote.release()

    def layout(self) -> cgroups.Layout:
        """Where cgroups go; what dead processes left there is swept first."""
        self.handover.open()
        with self._first_use:
            if self._layout is None:
                known = self.handover.layout
                layout = cgroups.Layout(known)
                if known is None:
                    self.handover.change_layout(layout)
                cgroups.sweep(layout)
                journal.sweep()
                self._layout = layout
            return self._layout

    def host_ids(self) -> identity.HostIds:
        self.handover.open()
        with self._first_use:
            if self._host_ids is None:
                self._host_ids = ids.host_ids(self._hold)
            return self._host_ids

    def _hold(self, lock_fd: int) -> None:
        """The zygote shares the lock: ids stay ours until its last sandbox is gone."""
        self.handover.add_ids(lock_fd)
        self.zygote().tell("hold", None, [lock_fd])

    # -- prebuilt sandboxes -----------------------------------------------------------------

    def _prebuilt_ids(self) -> tuple[str, ...]:
        return ()

    def _hear(self, zygote: Zygote, fd: int) -> None:
        """Called when the other end of a watched socket has closed, or at the time of its alarm."""

    def _lose(self, zygote: Zygote) -> None:
        """Called when a zygote has died, and all that it had prebuilt."""
