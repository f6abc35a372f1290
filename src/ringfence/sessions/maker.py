"""Making and ending sandboxes, each written down before anything of it exists."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from ..backends.optional import Durable, Tenanted
from ..errors import ExecError, LifecycleError, RingfenceError, SandboxLost
from ..model.base.ids import new_id
from ..store import records
from . import selection
from .catalogue.records import spec_text
from .pools.pool import PooledSandbox
from .pools.restored import Restored

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..backends.protocol import Backend, BackendSandbox, WarmSandbox
    from ..model.capabilities import BackendReport
    from ..model.spec import SandboxSpec
    from ..store.records import SnapshotRecord
    from ..store.store import Store
    from .admission import Slots
    from .clock import Clock

SANDBOX = "sbx"
NOT_MADE = "not made"
EVICTED = "evicted"
"""Why a sandbox ended here that another node restores."""
NOBODY = ""  # the owner of what is warm


class Maker:
    """Turns specs into sandboxes of the backends it is given."""

    def __init__(
        self, backends: Mapping[str, Backend], store: Store, slots: Slots, clock: Clock
    ) -> None:
        self.backends, self._store, self._slots, self._clock = backends, store, slots, clock
        self._reports: dict[str, BackendReport] = {}
        self._anchors: dict[str, tuple[int, int]] = {}
        self._templates: dict[str, int] = {}  # by sandbox: descriptors that keep their files
        self.undying: dict[str, str] = {}  # sandboxes that the kernel does not let go of, and why

    # -- what there is ------------------------------------------------------------------------

    def report(self, name: str, *, afresh: bool = False) -> BackendReport:
        """Report a backend's capabilities; probe it until it is available, and with `afresh`
        again.

        A probe makes sandboxes. After a restart beside 50 clients it waits seconds for theirs, and so the
        report is kept for as long as the process that all sandboxes of the backend depend on.
        """
        known = self._reports.get(name) or (None if afresh else self._kept_report(name))
        if afresh or known is None or not known.available:
            known = self.backends[name].report()
            self._keep_report(name, known)
        self._reports[name] = known
        return known

    def _keep_report(self, name: str, report: BackendReport) -> None:
        with suppress(RingfenceError):  # with a full disk it is found again
            if report.available and (anchor := self._anchor(name)):
                kept = {"anchor": anchor, "report": report.to_json()}
                self._store.set_setting(f"report {name}", json.dumps(kept))

    def _kept_report(self, name: str) -> BackendReport | None:
        from ..model.capabilities import BackendReport

        with suppress(RingfenceError):
            if anchor := self._anchor(name):
                kept = json.loads(self._store.setting(f"report {name}") or "{}")
                if kept and kept["anchor"] == anchor:
                    return BackendReport.from_json(kept["report"])
        return None

    def _anchor(self, name: str) -> list[int | str] | None:
        backend = self.backends[name]
        anchor = backend.anchor() if isinstance(backend, Durable) and backend.outlives else None
        return [*anchor, self._clock.boot] if anchor else None

    def forget_report(self, name: str) -> None:
        """Have a backend probed again, when it is set up in another way."""
        self._reports.pop(name, None)
        self._store.set_setting(f"report {name}", "{}")

    def choose(self, spec: SandboxSpec, preferred: str = "") -> str:
        """The backend for a spec.

        Raises:
            BackendUnavailable: None can make it; the message says of each why not.
        """
        selection.check_known(preferred, self.backends)
        selection.check_profile(spec, self.backends)
        refusals = {name: selection.beforehand(spec, each) for name, each in self.backends.items()}
        for name in (preferred,) if preferred else refusals:
            # Not more of them than are needed: to ask one means to let it make a sandbox.
            why = refusals[name] = refusals[name] or selection.refusal(spec, self.report(name))
            if not why:
                return name
        for name in refusals.keys() - {preferred} if preferred else ():
            known = self._reports.get(name)
            why = selection.refusal(spec, known) if known else selection.NOT_TRIED
            refusals[name] = refusals[name] or why
        hint = selection.hint_beforehand(spec, self.backends)
        raise selection.none_can(refusals, preferred, hint)

    # -- making -------------------------------------------------------------------------------

    def provision(
        self, name: str, spec: SandboxSpec, owner: str, snapshot_id: str | None = None
    ) -> BackendSandbox:
        """A new sandbox for a client, with the files of a snapshot if it names one.

        Preconditions: the caller has a slot for it.
        """
        sandbox_id = spec.id or new_id(SANDBOX)
        shown = self.hold_template(sandbox_id, spec)
        self._plan(name, sandbox_id, owner, spec)
        self._tell_whose(name, sandbox_id, owner)
        try:
            wanted = for_backend(shown, sandbox_id)
            if snapshot_id is not None:
                return self.backends[name].restore(snapshot_id, wanted)
            return self.backends[name].provision(wanted)
        except BaseException as exc:
            self.ended(sandbox_id, f"{NOT_MADE}: {type(exc).__name__}")
            raise

    def restore_again(
        self, name: str, owner: str, snapshot_id: str, spec: SandboxSpec
    ) -> BackendSandbox:
        """A sandbox in the place of one that has been saved with its memory, with its slot and its record."""
        self._tell_whose(name, spec.id or "", owner)
        return self.backends[name].restore(snapshot_id, spec)

    def hold_template(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """Keep a template's files until the sandbox has ended; the spec for a backend.

        Raises:
            InvalidRequest: The user who runs the server has no such template.
        """
        if spec.template == "default":
            return spec
        from ..environments.apply import apply

        shown, self._templates[sandbox_id] = apply(spec)
        return shown

    def build_ahead(
        self, spec: SandboxSpec, profile: str, saved: SnapshotRecord | None = None
    ) -> PooledSandbox | None:
        """A warm sandbox of a profile, with a slot of its own; None where there is none free.

        Args:
            saved: The snapshot whose files it has.
        """
        name = self.choose(spec, saved.backend if saved else "")
        if not self._slots.try_take():
            return None
        sandbox_id = new_id(SANDBOX)
        try:
            self._plan(name, sandbox_id, NOBODY, spec)
            self._tell_whose(name, sandbox_id, sandbox_id)  # nobody knows yet: no other's, then
            warm: WarmSandbox
            try:
                wanted = for_backend(spec, sandbox_id)
                if saved is None:
                    warm = self.backends[name].prewarm(wanted)
                else:
                    warm = Restored(self.backends[name].restore(saved.id, wanted), spec)
            except BaseException as exc:
                self.ended(sandbox_id, f"{NOT_MADE}: {type(exc).__name__}")
                raise
        except BaseException:
            self._slots.give_back()
            raise
        self._note(sandbox_id, phase=records.WARM)
        return PooledSandbox(warm, name, profile, self._clock.now(), saved.id if saved else "")

    def claim(
        self, pooled: PooledSandbox, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> BackendSandbox | None:
        """Make a warm sandbox what is asked for; None when it was lost before, with its slot given back.

        Args:
            meanwhile: See `WarmSandbox.claim`.
        """
        try:
            return pooled.warm.claim(for_backend(spec, pooled.warm.id), meanwhile)
        except (SandboxLost, LifecycleError):
            self.discard(pooled, "lost")
            return None
        except BaseException:
            self.discard(pooled, "claim failed")
            raise

    def discard(self, pooled: PooledSandbox, reason: str = "discarded") -> None:
        """End a warm sandbox, however it is, and give its slot back."""
        with suppress(RingfenceError):  # `undying` has it then
            self.end(pooled.warm.id, pooled.warm.discard, reason)

    def end(
        self,
        sandbox_id: str,
        terminate: Callable[[], None],
        reason: str,
        session_id: str | None = None,
    ) -> None:
        """End a sandbox for good, with its session, and give its slot back.

        Raises:
            RingfenceError: It does not die. Its slot stays taken, and the next start looks for it.
        """
        try:
            terminate()
        except Exception as exc:
            self.undying[sandbox_id] = str(exc)
            self._note(sandbox_id, phase=records.ENDING, reason=reason)
            if isinstance(exc, RingfenceError):
                raise
            # Callers that end several sandboxes go on after a RingfenceError alone.
            raise ExecError(f"the sandbox could not be ended: {type(exc).__name__}: {exc}") from exc
        self.ended(sandbox_id, reason, session_id)
        self._slots.give_back()

    def _plan(self, name: str, sandbox_id: str, owner: str, spec: SandboxSpec) -> None:
        """Write it down, and whose end would end it: from here on a crash leaves a trace to follow."""
        self._note_anchor(name)
        self._store.add_sandbox(
            records.SandboxRecord(
                id=sandbox_id,
                owner=owner,
                backend=name,
                phase=records.PLANNED,
                spec=spec_text(spec),
                created_at=self._clock.wall(),
                boot=self._clock.boot,
            )
        )

    def _tell_whose(self, name: str, sandbox_id: str, tenant: str) -> None:
        """Where sandboxes of one tenant share what others must not: pages of the page cache."""
        backend = self.backends[name]
        if isinstance(backend, Tenanted):
            backend.belongs_to(sandbox_id, tenant)

    def _note_anchor(self, name: str) -> None:
        backend = self.backends[name]
        found = backend.anchor() if isinstance(backend, Durable) else None
        if found is not None and self._anchors.get(name) != found:
            whose = self._store.identity
            self._store.add_anchor(records.Anchor(name, *found, self._clock.boot, whose))
            self._anchors[name] = found

    def ended(self, sandbox_id: str, reason: str, session_id: str | None = None) -> None:
        """Write down that nothing is left of a sandbox, and that its session is over: both or neither."""
        files = self._templates.pop(sandbox_id, None)
        if files is not None:
            os.close(files)
        # With a full disk, ending things must go on. What is not written now is found out at the
        # next start, from the kernel.
        with suppress(RingfenceError), self._store.together():
            self._note(sandbox_id, phase=records.ENDED, ended_at=self._clock.wall(), reason=reason)
            if session_id is not None:
                self._store.end_session(session_id, reason)

    def _note(self, sandbox_id: str, **columns: object) -> None:
        with suppress(RingfenceError):
            self._store.change_sandbox(sandbox_id, **columns)


def for_backend(spec: SandboxSpec, sandbox_id: str) -> SandboxSpec:
    """The spec without what the manager itself sees to."""
    limits = spec.limits
    if limits.idle_timeout_s is not None:
        limits = limits.altered(idle_timeout_s=None)
    return spec.altered(id=sandbox_id, limits=limits, ttl_s=None)
