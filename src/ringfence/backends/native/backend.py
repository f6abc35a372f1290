"""The native backend: provisions sandboxes through the zygote of this process."""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock, start_new_thread

from ...errors import InvalidRequest, LifecycleError, SandboxLost
from ...launcher import wire
from ...model.ids import new_id
from ..local import cgroups, identity, journal, sizes
from ..local.answers import Refused, answer
from ..local.base import LocalBackend
from ..local.host import Host, host, out_of_files
from . import ids, planner
from .burst import Ahead, Burst, kind_of
from .profiles import Profile, profile_named
from .zygote import Zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from ...egress.client import Egress
    from ...launcher.plan import Plan
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from ...policy.seccomp import SeccompPolicy
    from ..local.execs import LocalExec
    from ..local.holder import Holder
    from ..local.images import Held
    from .keeping import Keeping
    from .sandbox import NativeSandbox
    from .warm import NativeWarm

    T = TypeVar("T")

NAME = "native"
_READY_S = 60.0
_BEHIND_THE_CGROUP = 8  # processes


class NativeBackend(LocalBackend):
    """See `Backend`.

    Args:
        profiles: Profiles of the caller's own, by name.
        state_dir: Where snapshots are kept; None is this user's data directory.
        zygote: One that was started early, and is this backend's from now on.
        egress: Who serves the sockets of sandboxes with rules; None is the one of this process.
        holder: Keeps what sandboxes hang on, so that they outlive this process; one that it kept of an
            earlier process is gone on with. None: they end with this process.
        ahead: Whether, in a burst, the next sandbox is built ahead; None: unless RINGFENCE_AHEAD=off.
    """

    name = NAME

    def __init__(
        self,
        *,
        profiles: Mapping[str, Profile] | None = None,
        state_dir: str | None = None,
        zygote: Zygote | None = None,
        egress: Callable[[], Egress] | None = None,
        holder: Holder | None = None,
        ahead: bool | None = None,
    ) -> None:
        super().__init__(egress, state_dir)
        self._keeping: Keeping | None = None
        if holder is not None:
            from .keeping import Keeping

            self._keeping = Keeping(self, holder)
        self._burst = Burst(self, ahead)
        self.profiles = dict(profiles or {})
        self._lock, self._first_use = allocate_lock(), allocate_lock()
        self._early = zygote
        self._zygote: Zygote | None = None
        self._layout: cgroups.Layout | None = None
        self._host_ids: identity.HostIds | None = None
        self._live: dict[str, NativeSandbox] = {}
        self._making: set[str] = set()
        self._under_way: list[None] = []
        self._warm: dict[str, NativeWarm] = {}

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
            return _with_files(lambda: self._provision_from(spec))
        finally:
            self._under_way.pop()

    @property
    def is_making(self) -> bool:
        """Whether somebody waits for a sandbox just now."""
        return bool(self._under_way)

    def _provision_from(self, spec: SandboxSpec) -> NativeSandbox:
        if spec.image is None:
            return self._provision(spec)
        from ..local import images

        planner.check(spec)
        return images.made_from(spec, self._provision)

    def prewarm(self, spec: SandboxSpec) -> NativeWarm:
        if spec.image is None:
            return _with_files(lambda: self._prewarm(spec))
        from ..local import images

        planner.check(spec)
        return _with_files(lambda: images.made_from(spec, self._prewarm))

    def _checked_profile(self, spec: SandboxSpec) -> Profile:
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
        profile = self._checked_profile(spec)
        if spec.network.needs_tls_termination:
            self.egress().expect(spec.network)
        zygote = self.zygote()
        ahead = None if image else self._burst.take(spec, kind_of(spec, profile), zygote)
        if ahead is not None:
            try:
                return self._make(spec, profile, ahead.id, zygote, ahead)
            except SandboxLost:
                self._burst.end(ahead)  # it did not live to see this
                zygote = self.zygote()
            except BaseException:
                self._burst.end(ahead)
                raise
        sandbox_id = self._new_id(spec)
        try:
            return self._make(spec, profile, sandbox_id, zygote, image=image)
        except SandboxLost:
            if zygote.alive or image:  # what an image is held by has been given up
                raise
            # It was dying already when it was asked: nothing of this one has run.
            return self._make(spec, profile, sandbox_id, self.zygote())
        finally:
            self._making.discard(sandbox_id)

    def _make(
        self,
        spec: SandboxSpec,
        profile: Profile,
        sandbox_id: str,
        zygote: Zygote,
        warm: NativeWarm | Ahead | None = None,
        image: Held | None = None,
    ) -> NativeSandbox:
        uid, here = identity.uid_of(spec.user), host()
        first = warm.first_host_id if warm else self._take_host_ids(profile)
        draft = planner.Draft(spec, sandbox_id, uid, first)
        draft.image = image
        directories: list[str] = []
        try:
            if spec.network.needs_tls_termination:
                from ..local.trusted import trusted_for

                draft.trusted = trusted_for(spec.network, self.egress())
            plan = planner.make_plan(draft, here, profile)
            plan["placeholders"] = [made for part in draft.protected for made in part.placeholders]
            draft.note = journal.note(sandbox_id, plan["placeholders"], self.label())
            plan["note"] = draft.note or ""
            size = sizes.sizes(spec, here)
            group = self._plan_limits(plan, spec, size)
            directories = group.directories
            sandbox = self._launch(warm, zygote, draft, plan, profile, size, group)
            if warm is not None and sandbox.control is not warm.control:
                warm.control.close()  # it got another one from the zygote
        except BaseException:
            journal.give_up(draft.protected, draft.note, sandbox_id, zygote)
            zygote.clear_up(sandbox_id, directories, [])
            if first and not warm:
                self.host_ids().give_back(first)
            raise
        finally:
            draft.close()
        self._live[sandbox_id] = sandbox
        return sandbox

    def _take_host_ids(self, profile: Profile) -> int:
        return self.host_ids().take() if ids.are_wanted(profile) else 0

    # -- warm sandboxes ---------------------------------------------------------------------

    def _prewarm(self, spec: SandboxSpec, image: Held | None = None) -> NativeWarm:
        from . import warm

        shape, bare = warm.shape_of(spec, self.profiles), warm.plain(spec)
        profile, zygote = self._checked_profile(bare), self.zygote()
        sandbox_id = self._new_id(spec)
        try:
            first = self._take_host_ids(profile)
            try:
                draft = planner.Draft(bare, sandbox_id, identity.uid_of(spec.user), first)
                draft.image = image
                plan, group = self._plan_ahead(draft, profile, spec)
                control, pid, pidfd = self._build_ahead(plan, zygote)
            except BaseException:
                if first:
                    self.host_ids().give_back(first)
                raise
            values = plan["cgroup_values"]
            made = warm.NativeWarm(
                self, sandbox_id, shape, first, group, pid, pidfd, zygote, control, values, image
            )
            self._warm[sandbox_id] = made
            return made
        finally:
            self._making.discard(sandbox_id)

    def _plan_ahead(
        self, draft: planner.Draft, profile: Profile, like: SandboxSpec
    ) -> tuple[Plan, cgroups.Group]:
        """The plan of nobody's sandbox, in cgroups with the limits that are asked for most likely."""
        plan = planner.make_plan(draft, host(), profile)
        group = self._plan_limits(plan, draft.spec, sizes.sizes(draft.spec, host()))
        size = sizes.sizes(like, host())
        plan["cgroup_values"] = group.values(draft.spec.limits, size.memory_bytes, size.pids)
        return plan, group

    def _build_ahead(self, plan: Plan, zygote: Zygote) -> tuple[wire.Socket, int, int]:
        """Its control, and its PID 1 as pid and pidfd."""
        ours, theirs = wire.socketpair()
        try:
            try:
                zygote.tell_from(theirs, "prewarm", planner.shape_of(plan), [])
            finally:
                theirs.close()
            body, fds = answer(ours, _READY_S)
        except BaseException as exc:
            ours.close()
            zygote.clear_up(plan["id"], plan["cgroup_dirs"], [])
            if isinstance(exc, Refused):
                from ..local.refusals import error_of

                raise error_of(exc) from exc
            raise
        return ours, int(body), fds[0]

    def claim(self, warm: NativeWarm, spec: SandboxSpec) -> NativeSandbox:
        """Bind everything in `spec` to a warm sandbox; when that fails, the sandbox has ended."""
        with self._lock:
            if self._warm.pop(warm.id, None) is not warm:
                raise LifecycleError(f"{warm.id} was claimed or discarded before")
            self._making.add(warm.id)
        try:
            wanted = warm.fitting(spec)
            if wanted is None or spec.id not in (None, warm.id):
                raise InvalidRequest("this warm sandbox cannot become what is asked for")
            profile = self._checked_profile(wanted)
            sandbox = _with_files(
                lambda: self._make(wanted, profile, warm.id, warm.zygote, warm, warm.image)
            )
        except BaseException:
            warm.discard()
            raise
        finally:
            self._making.discard(warm.id)
        warm.close()
        return sandbox

    def _discard_warm(self, zygote: Zygote | None = None) -> None:
        with self._lock:  # as in `claim`: each is somebody's claim or ours, never both
            mine = [w for w in self._warm.values() if zygote in (None, w.zygote)]
            for warm in mine:
                del self._warm[warm.id]
        for warm in mine:
            warm.discard()

    def discarded(self, warm: NativeWarm) -> None:
        """Called by a warm sandbox that has ended."""
        warm.zygote.clear_up(warm.id, warm.group.directories, [])
        if warm.first_host_id:
            self.host_ids().give_back(warm.first_host_id)
        self._warm.pop(warm.id, None)

    def _new_id(self, spec: SandboxSpec) -> str:
        if spec.id is None:
            return new_id(NAME)
        with self._lock:
            if spec.id in self._live or spec.id in self._warm or spec.id in self._making:
                raise InvalidRequest(f"a sandbox {spec.id!r} exists already", field="id")
            self._making.add(spec.id)
        return spec.id

    def _plan_limits(self, plan: Plan, spec: SandboxSpec, size: sizes.Sizes) -> cgroups.Group:
        layout = self.layout()
        name = cgroups.group_name(plan["id"], self.label())
        group = cgroups.Group(layout, name, cpus=bool(spec.limits.cpus))
        plan["cgroup_dirs"], plan["cgroup_version"] = group.directories, group.version
        plan["cgroup_values"] = group.values(spec.limits, size.memory_bytes, size.pids)
        if spec.limits.cpus and not group.holds_cpus:
            planner.require_allowed(
                spec,
                "cpu_limit",
                f"no cgroup to limit processors with: {layout.why}",
                "limits.cpus",
            )
        import resource

        if layout.version:
            # The cgroup says no first, because it counts how often.
            processes = size.pids + _BEHIND_THE_CGROUP
            plan["rlimits"].append((resource.RLIMIT_NPROC, processes, processes))
        else:
            # Counted per user namespace since Linux 5.14, so it bounds this sandbox alone.
            own = size.pids + cgroups.OWN_PROCESSES
            plan["rlimits"].append((resource.RLIMIT_NPROC, own, own))
            plan["memory_watchdog_bytes"] = size.memory_bytes
            plan["rlimits"].append((resource.RLIMIT_DATA, size.memory_bytes, size.memory_bytes))
        return group

    def _launch(
        self,
        warm: NativeWarm | Ahead | None,
        zygote: Zygote,
        draft: planner.Draft,
        plan: Plan,
        profile: Profile,
        size: sizes.Sizes,
        group: cgroups.Group,
    ) -> NativeSandbox:
        shape, verb = planner.shape_of(plan), "claim" if warm else "create"
        is_straight = warm is not None and warm.takes(plan)
        plan["template"] = b""  # the zygote knows it
        ours, theirs = (warm.control, None) if warm and is_straight else wire.socketpair()
        try:
            try:
                send_plan(ours, plan)
                pooled = None if isinstance(warm, Ahead) else warm
                kind = None if pooled else kind_of(draft.spec, profile)
                self._burst.tell(zygote, theirs, verb, shape, kind, draft)
            finally:
                if theirs:
                    theirs.close()
            # While the kernel builds the sandbox: then nobody has to wait for this.
            from .sandbox import NativeSandbox

            sandbox = NativeSandbox(self, draft, profile, size, group, ours, plan, zygote)
            if self._keeping is not None:
                self._keeping.expect(sandbox)
            if pooled is not None and pooled.meanwhile is not None:
                pooled.meanwhile()
            body, fds = answer(ours, _READY_S)
        except Refused as exc:
            ours.close()
            if exc.errno in (errno.ESRCH, errno.EPIPE, errno.ECONNRESET):
                raise SandboxLost(str(exc.strerror), hint="create a new sandbox") from exc
            from ..local.refusals import error_of

            raise error_of(exc) from exc
        except BaseException:
            ours.close()
            raise
        ours.settimeout(None)
        sockets = fds[3:]
        sandbox.begun(int(body), fds[0], fds[1:3], sockets)
        if self._keeping is not None:
            self._keeping.begin(sandbox, sockets)
        sandbox.serve_network()
        return sandbox

    def released(self, sandbox: NativeSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        self._burst.over()
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
        from . import leftovers

        leftovers.end(pid, started)
        cgroups.sweep(self.layout())
        journal.sweep()

    def adopt(self, sandbox_id: str) -> NativeSandbox | None:
        """A live sandbox of this backend, for another user of it than the one who made it."""
        if self._keeping is not None:
            self._keeping.open()
        return self._live.get(sandbox_id)

    def leave(self) -> None:
        """Let every sandbox live on for the next process. Preconditions: there is a holder."""
        assert self._keeping is not None
        self._keeping.leave()
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
        """Whether its sandboxes can outlive this process."""
        return self._keeping is not None

    def label(self) -> str:
        """Of the process with which its sandboxes end, where that is not this one."""
        return self.zygote().label if self._keeping is not None else ""

    # -- what is kept for a process after this one --------------------------------------------

    def keep(self, sandbox: NativeSandbox) -> None:
        """Something of it has changed."""
        if self._keeping is not None:
            self._keeping.change(sandbox)

    def keep_network(self, sandbox: NativeSandbox, sockets: list[int]) -> None:
        """It has these sockets now, before anybody serves them; or none any more."""
        if self._keeping is not None:
            self._keeping.change_network(sandbox, sockets)

    def keep_agent(self, sandbox: NativeSandbox, uid: int) -> None:
        """There is somebody who starts programs of another user."""
        if self._keeping is not None:
            self._keeping.add_agent(sandbox, uid)

    def keep_exec(self, sandbox: NativeSandbox, run: LocalExec) -> None:
        """It is about to be started."""
        if self._keeping is not None:
            self._keeping.begin_exec(sandbox, run)

    def keep_paused(self, sandbox: NativeSandbox, paused: bool) -> None:
        """Every process in it is about to stand still, or goes on again."""
        if self._keeping is not None:
            self._keeping.change_paused(sandbox, paused)

    def forget_kept(self, sandbox: NativeSandbox) -> None:
        """It is about to end."""
        if self._keeping is not None:
            self._keeping.end(sandbox)

    def living(self) -> list[NativeSandbox]:
        """Every sandbox that has not ended."""
        return list(self._live.values())

    def go_on_with(self, sandbox: NativeSandbox) -> None:
        """It is ours now: an earlier process made it."""
        self._live[sandbox.id] = sandbox

    # -- shared parts -----------------------------------------------------------------------

    def zygote(self) -> Zygote:
        """The zygote of this process; a new one when the last is gone or belongs to our parent."""
        if self._keeping is not None:
            self._keeping.open()
        with self._lock:
            if self._zygote is None or self._zygote.owner != os.getpid() or not self._zygote.alive:
                started, self._early = self._early or Zygote(outlives=self.outlives), None
                self._begin(started)
                if self._keeping is not None:
                    self._keeping.change_zygote(started)
            assert self._zygote is not None
            return self._zygote

    def use(self, zygote: Zygote) -> None:
        """One that an earlier process had."""
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
                self._burst.lapsed(zygote, fd)
        for sandbox in [s for s in list(self._live.values()) if s.zygote is zygote]:
            sandbox.terminate()
        self._discard_warm(zygote)
        self._burst.lost(zygote)
        zygote.finish({*self._live, *self._warm, *self._making})
        zygote.bury()

    def layout(self) -> cgroups.Layout:
        """Where cgroups go; what dead processes left there is swept first."""
        if self._keeping is not None:
            self._keeping.open()
        with self._first_use:
            if self._layout is None:
                known = self._keeping.layout if self._keeping is not None else None
                layout = cgroups.Layout(known)
                if self._keeping is not None and known is None:
                    self._keeping.change_layout(layout)
                cgroups.sweep(layout)
                journal.sweep()
                self._layout = layout
            return self._layout

    def host_ids(self) -> identity.HostIds:
        if self._keeping is not None:
            self._keeping.open()
        with self._first_use:
            if self._host_ids is None:
                self._host_ids = ids.host_ids(self._hold)
            return self._host_ids

    def _hold(self, lock_fd: int) -> None:
        """The zygote shares the lock: ids stay ours until its last sandbox is gone."""
        if self._keeping is not None:
            self._keeping.add_ids(lock_fd)
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
        if self._keeping is not None:
            self._keeping.close()
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
        if self._host_ids is not None:
            self._host_ids.close()


def send_plan(control: wire.Socket, plan: Plan) -> None:
    """Put it where the sandbox at the other end will find it.

    Raises:
        SandboxLost: Nobody is there any more.
    """
    try:
        wire.send(control, plan)
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
        raise SandboxLost("the sandbox has ended", hint="create a new one") from exc


def _with_files(make: Callable[[], T]) -> T:
    """`make()`; that this process has too many files open is said as such."""
    try:
        return make()
    except OSError as exc:
        if problem := out_of_files(exc):
            raise problem from exc
        raise


def current_host() -> Host:
    """The facts of this host."""
    return host()
