"""The native backend: provisions sandboxes through the zygote of this process."""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread

from ...errors import InvalidRequest, RingfenceError, SandboxLost
from ...model.base.ids import new_id
from ...model.spec import LIGHT
from ..local import journal
from ..local.base import LocalBackend
from ..local.host import cgroups, identity
from ..local.host.facts import Host, host, with_files
from . import ids, making, planner
from .fd_store.no_handover import NoHandover
from .prebuilt.burst import Burst, kind_of
from .profiles import BUILT_IN, Profile, profile_named
from .zygote import Zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from ...policy.seccomp import SeccompPolicy
    from ..local.fd_store import FdStore
    from ..local.mounts.images import Held
    from .fd_store.handover import Handover
    from .prebuilt.prewarming import Prewarming
    from .prebuilt.warm import NativeWarm
    from .sandbox import NativeSandbox

NAME = "native"


class NativeBackend(LocalBackend):
    """See `Backend`.

    Args:
        profiles: Profiles of the caller's own, by name.
        state_dir: Where snapshots are kept; None is this user's data directory.
        zygote: One that was started early, and is this backend's from now on.
        egress: Who serves the sockets of sandboxes with rules; None is the one of this process.
        fd_store: Keeps what sandboxes hang on, so that they outlive this process; one that it kept of an
            earlier process is gone on with. None: they end with this process.
        ahead: Whether, in a burst, the next sandbox is built ahead; None: unless RINGFENCE_AHEAD=off.
    """

    name = NAME
    tiers = (LIGHT,)
    least = planner.LEAST

    def __init__(
        self,
        *,
        profiles: Mapping[str, Profile] | None = None,
        state_dir: str | None = None,
        zygote: Zygote | None = None,
        egress: Callable[[], Egress] | None = None,
        fd_store: FdStore | None = None,
        ahead: bool | None = None,
    ) -> None:
        super().__init__(egress, state_dir)
        self.handover: Handover | NoHandover = NoHandover()
        if fd_store is not None:
            from .fd_store.handover import Handover

            self.handover = Handover(self, fd_store)
        self.burst = Burst(self, ahead)
        self.profiles = dict(profiles or {})
        self._lock, self._first_use = allocate_lock(), allocate_lock()
        self._early = zygote
        self._zygote: Zygote | None = None
        self._layout: cgroups.Layout | None = None
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, NativeSandbox] = {}
        self._making: set[str] = set()
        self._under_way: list[None] = []
        self._prewarming: Prewarming | None = None

    def define_profile(self, name: str, policy: SeccompPolicy | None) -> None:
        """Have a profile like `os_hardened`, but with that system-call policy; None takes it away.

        Sandboxes that are there already keep the filter they have.
        """
        if policy is None:
            self.profiles.pop(name, None)
        else:
            self.profiles[name] = Profile(name, policy=policy)

    # -- provisioning -----------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start the zygote now, so that the first sandbox need not wait for it."""
        self.zygote()

    def provision(self, spec: SandboxSpec) -> NativeSandbox:
        self._under_way.append(None)
        try:
            return with_files(lambda: self._provision_from(spec))
        finally:
            self._under_way.pop()

    @property
    def is_making(self) -> bool:
        """True while a create is in progress."""
        return bool(self._under_way)

    @property
    def others_wait(self) -> bool:
        """True while several creates are in progress."""
        return len(self._under_way) > 1

    def _provision_from(self, spec: SandboxSpec) -> NativeSandbox:
        if spec.image is None:
            return self._provision(spec)
        from ..local.mounts import images

        planner.check(spec)
        return images.made_from(spec, self._provision)

    def prewarm(self, spec: SandboxSpec) -> NativeWarm:
        return self.prewarming.prewarm(spec)

    @property
    def prewarming(self) -> Prewarming:
        """Sandboxes that wait to be claimed."""
        with self._first_use:
            if self._prewarming is None:
                from .prebuilt.prewarming import Prewarming

                self._prewarming = Prewarming(self)
            return self._prewarming

    def _discard_warm(self, zygote: Zygote | None = None) -> None:
        if self._prewarming is not None:
            self._prewarming.discard_all(zygote)

    @property
    def profile_names(self) -> tuple[str, ...]:
        """See `Backend`."""
        return (*BUILT_IN, *self.profiles)

    def refuses(self, spec: SandboxSpec) -> str:
        """See `Backend`."""
        try:
            ids.check(profile_named(spec.profile, self.profiles))
        except RingfenceError as exc:
            return f"no profile {spec.profile}: {exc.message}"
        return ""

    def checked_profile(self, spec: SandboxSpec) -> Profile:
        """The profile that it names. Raises `InvalidRequest` for what this host cannot do or nobody can."""
        planner.check(spec)
        identity.uid_of(spec.user)
        profile = profile_named(spec.profile, self.profiles)
        ids.check(profile)
        if profile.landlock and host().landlock_abi < planner.LEAST_LANDLOCK_ABI:
            planner.require_allowed(
                spec, "landlock", "this kernel has no usable Landlock", "profile"
            )
        return profile

    def _provision(self, spec: SandboxSpec, image: Held | None = None) -> NativeSandbox:
        profile = self.checked_profile(spec)
        if spec.network.needs_tls_termination:
            self.egress().expect(spec.network)
        zygote = self.zygote()
        ahead = None if image else self.burst.take(spec, kind_of(spec, profile), zygote)
        if ahead is not None:
            try:
                return making.make(self, spec, profile, ahead.id, zygote, ahead)
            except SandboxLost:
                self.burst.end(ahead)  # it did not live to see this
                zygote = self.zygote()
            except BaseException:
                self.burst.end(ahead)
                raise
        sandbox_id = self.new_id(spec)
        try:
            return making.make(self, spec, profile, sandbox_id, zygote, image=image)
        except SandboxLost:
            if zygote.alive or image:  # what an image is held by has been given up
                raise
            # It was dying already when it was asked: nothing of this one has run.
            return making.make(self, spec, profile, sandbox_id, self.zygote())
        finally:
            self.made(sandbox_id)

    def take_host_ids(self, profile: Profile) -> int:
        """The first of a range that is one sandbox's, where it has ids of its own; else 0."""
        return self.host_ids().take() if ids.are_wanted(profile) else 0

    def new_id(self, spec: SandboxSpec) -> str:
        """The id that it asks for, or a new one; nobody else gets it until `made`."""
        if spec.id is None:
            return new_id(NAME)
        with self._lock:
            if any(spec.id in ids for ids in self._ids()):
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
            self._making.add(spec.id)
        return spec.id

    def _ids(self) -> Iterator[tuple[str, ...]]:
        """Yield the ids of all sandboxes in lifecycle order, so that one that moves on meanwhile is
        not missed.
        """
        yield self._prewarming.ids() if self._prewarming else ()
        yield tuple(self._making)
        yield tuple(self._live)

    def making(self, sandbox_id: str) -> None:
        """It is being made of one built ahead."""
        self._making.add(sandbox_id)

    def made(self, sandbox_id: str) -> None:
        """It is there, or it could not be made."""
        self._making.discard(sandbox_id)

    def released(self, sandbox: NativeSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        self.burst.over()
        if sandbox.first_host_id:
            self.host_ids().give_back(sandbox.first_host_id)
        self._live.pop(sandbox.id, None)
        if sandbox.image is not None:
            sandbox.image.close()

    # -- for whoever takes over ---------------------------------------------------------------

    def anchor(self) -> tuple[int, int]:
        """The process whose end ends every sandbox made from now on: pid, and when it started."""
        zygote = self.zygote()
        return zygote.pid, zygote.started

    def end_leftovers(self, pid: int, started: int) -> None:
        """End an anchor of an earlier process, and clear up what it cannot any more."""
        from .fd_store import leftovers

        leftovers.end(pid, started)
        cgroups.sweep(self.layout())
        journal.sweep()

    def adopt(self, sandbox_id: str) -> NativeSandbox | None:
        """A live sandbox of this backend, for another user of it than the one who made it."""
        self.handover.open()
        return self._live.get(sandbox_id)

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

    @property
    def outlives(self) -> bool:
        """True if its sandboxes can outlive this process."""
        return self.handover.outlives

    def label(self) -> str:
        """Of the process with which its sandboxes end, where that is not this one."""
        return self.zygote().label if self.handover.outlives else ""

    def living(self) -> list[NativeSandbox]:
        """Every sandbox that has not ended."""
        return list(self._live.values())

    def count(self, sandbox: NativeSandbox) -> None:
        """It is one of ours: just made, or by an earlier process."""
        self._live[sandbox.id] = sandbox

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
                self.burst.lapsed(zygote, fd)
        for sandbox in [s for s in list(self._live.values()) if s.zygote is zygote]:
            sandbox.end_unwatched()
        self._discard_warm(zygote)
        self.burst.lost(zygote)
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

    # -- the rest of the contract -------------------------------------------------------------

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> NativeSandbox:
        from dataclasses import replace

        from . import snapshots

        _saved, taken_under, content = self.catalogue().open(snapshot_id)
        try:
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            sandbox = self.provision(again)
            try:
                snapshots.load(sandbox, content)
            except BaseException:
                sandbox.terminate()
                raise
        finally:
            os.close(content)
        return sandbox

    def snapshot(self, sandbox: NativeSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save(sandbox, self.catalogue(), metadata)

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.terminate()
        self._discard_warm()
        self.handover.close()
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
        if self._host_ids is not None:
            self._host_ids.close()


def current_host() -> Host:
    """The facts of this host."""
    return host()
