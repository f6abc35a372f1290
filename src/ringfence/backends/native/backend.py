"""The native backend: provisions sandboxes through the zygote of this process."""

from __future__ import annotations

from ...errors import RingfenceError, SandboxLost
from ...model.capabilities import NAMESPACES
from ...model.spec import LIGHT
from ..local import journal
from ..local.host import cgroups
from ..local.host.facts import ExplainedFileLimit
from ..local.host.mountinfo import masks_of_proc
from ..optional import Durable, ProfileStore
from . import ids
from .prebuilt.prebuilder import Prebuilder
from .profiles import BUILT_IN, Profile, profile_named
from .provision import Provision
from .request import BORROWED, LEAST, request
from .runtime import Runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ...model.spec import SandboxSpec
    from ...policy.seccomp import SeccompPolicy
    from .live import LiveSandbox
    from .prebuilt.prewarming import NativeWarm, Prewarming
    from .request import Over, Request
    from .sandbox import NativeSandbox
    from .zygote import Zygote


class NativeBackend(Runtime, Durable, ProfileStore):
    """See `Backend`.

    Args:
        profiles: Profiles of the caller's own, by name.
        state_dir: Where snapshots are kept; None is this user's data directory.
        zygote: One that was started early, and is this backend's from now on.
        egress: Who serves the sockets of sandboxes with rules; None is the one of this process.
        restart_dir, outlive_s: See `Durable`; None: sandboxes end with this process.
        prebuilt_s: How long after a create the next sandbox is kept prebuilt; 0: none is. None: a minute,
            unless RINGFENCE_PREBUILT=off.
    """

    tiers = (LIGHT,)
    least = LEAST

    def __init__(
        self,
        *,
        profiles: Mapping[str, Profile] | None = None,
        state_dir: str | None = None,
        zygote: Zygote | None = None,
        egress: Callable[[], Egress] | None = None,
        restart_dir: str | None = None,
        outlive_s: float | None = None,
        prebuilt_s: float | None = None,
    ) -> None:
        super().__init__(egress, state_dir, zygote, dict(profiles or {}))
        if restart_dir is not None:
            from ..local.fd_store import FdStore, end_of

            if outlive_s is None:
                end_of(restart_dir)
            else:
                from .fd_store.handover import Handover

                self.handover = Handover(self, FdStore(restart_dir, outlive_s))
        self.prebuilder = Prebuilder(self, prebuilt_s)
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

    def provision(self, spec: SandboxSpec, over: Over | None = None) -> NativeSandbox:
        """See `Backend`.

        Args:
            over: See `request`.
        """
        self._under_way.append(None)
        try:
            with ExplainedFileLimit(), request(spec, self.profiles, over) as asked:
                return self._provision(asked)
        finally:
            self._under_way.pop()

    def _provision(self, asked: Request) -> NativeSandbox:
        if asked.spec.network.needs_tls_termination:
            self.egress().expect(asked.spec.network)
        zygote = self.zygote()
        if (prebuilt := self.prebuilder.take(asked, zygote)) is not None:
            try:
                return Provision(self, asked, prebuilt, self.prebuilder).run()
            except RingfenceError:
                zygote = self.zygote()  # it has ended, or is of another plan
        try:
            return Provision(self, asked, None, self.prebuilder).run()
        except SandboxLost:
            if zygote.alive or asked.base:  # what an image is held by has been given up
                raise
            # It was dying already when it was asked: nothing of this one has run.
            return Provision(self, asked, None, self.prebuilder).run()

    def prewarm(self, spec: SandboxSpec) -> NativeWarm:
        return self.prewarming.prewarm(spec)

    @property
    def prewarming(self) -> Prewarming:
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
        return (*BUILT_IN, *self.profiles)

    def refuses(self, spec: SandboxSpec) -> str:
        try:
            ids.check(profile_named(spec.profile, self.profiles))
        except RingfenceError as exc:
            return f"no profile {spec.profile}: {exc.message}"
        if NAMESPACES not in spec.allow_degraded and masks_of_proc():
            return f"the kernel mounts no new /proc beside masked paths: {BORROWED}"
        return ""

    def released(self, sandbox: LiveSandbox) -> None:
        self.prebuilder.ended(sandbox.id)
        super().released(sandbox)

    def _prebuilt_ids(self) -> tuple[str, ...]:
        return self._prewarming.ids() if self._prewarming else ()

    def _hear(self, zygote: Zygote, fd: int) -> None:
        self.prebuilder.hear(zygote, fd)

    def _lose(self, zygote: Zygote) -> None:
        self._discard_warm(zygote)
        self.prebuilder.lost(zygote)

    # -- for whoever takes over ---------------------------------------------------------------

    def anchor(self) -> tuple[int, int]:
        """The process whose end ends every sandbox made from now on: pid, and when it started."""
        zygote = self.zygote()
        return zygote.pid, zygote.started

    def end_leftovers(self, pid: int, started: int) -> None:
        """End an anchor of an earlier process, and clear up what it cannot any more."""
        from .fd_store import leftovers

        layout = self.layout()  # swept on first use, for all that had ended before
        if leftovers.end(pid, started):
            cgroups.sweep(layout)
            journal.sweep()

    def adopt(self, sandbox_id: str) -> NativeSandbox | None:
        """A live sandbox of this backend, for another user of it than the one who made it."""
        self.handover.open()
        return self._live.get(sandbox_id)

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
        from . import snapshots

        return snapshots.restore(
            self.provision, self.catalogue(), self.profiles, snapshot_id, spec, secrets or {}
        )

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.prebuilder.drop_over(snapshot_id)
        super().delete_snapshot(snapshot_id)

    def leave(self) -> None:
        self.prebuilder.drop()
        super().leave()

    def close(self) -> None:
        for sandbox in self.living():
            sandbox.terminate()
        self._discard_warm()
        self.prebuilder.drop()
        super().close()
