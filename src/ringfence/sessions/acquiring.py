"""From a request to a session: taken again, from the pool, or made for it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace

from ..errors import InvalidRequest, RingfenceError, SandboxNotFound
from ..model.acquire import AcquireOptions, AttachRequest, check_client
from ..model.base.ids import new_id
from ..model.spec import SandboxSpec
from ..store import records
from . import capabilities, selection, snapshots
from .catalogue.records import record_of, spec_text
from .keys import digest_of
from .lease import Lease
from .live import Live
from .maker import EVICTED, NOT_MADE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..store.records import SnapshotRecord
    from .parts import Manager
    from .pools.pool import PooledSandbox
    from .templates.built import Built

SESSION = "sess"


def acquire(
    manager: Manager,
    spec: SandboxSpec,
    options: AcquireOptions,
    client_id: str,
    most: int | None = None,
    request: str = "",
) -> Lease:
    """See `SessionManager.acquire`.

    Args:
        request: Digest of what was asked for under the key; empty: that of the spec and the options.
    """
    check_client(client_id)
    spec = _checked(spec, options)
    if not options.key:
        return Acquiring(manager, spec, options, client_id, most=most).lease()
    with manager.keys.turn(client_id, options.key):
        digest = request or digest_of(spec, options)
        asked = Acquiring(manager, spec, options, client_id, digest, most=most)
        known = manager.index.under_key(client_id, options.key)
        if known is None:
            return asked.lease()
        if known.request != asked.request:
            raise InvalidRequest("this idempotency key was used for another request", field="key")
        return Lease(manager, known, newly_created=False)


def attach(manager: Manager, request: AttachRequest, most: int | None = None) -> Lease:
    check_client(request.client_id, "request.client_id")
    missing = SandboxNotFound(f"no session or sandbox {request.sandbox_id!r}")
    live = manager.index.find(request.sandbox_id, request.client_id)
    if live is not None:
        manager.activate(live)
        return Lease(manager, live, newly_created=False)
    if not request.create_if_missing or not _is_free(manager, request.sandbox_id):
        raise missing
    options = AcquireOptions(preferred_id=request.sandbox_id)
    spec = request.create_spec or SandboxSpec()
    lease = acquire(manager, spec, options, request.client_id, most)
    if lease.session.sandbox_id != request.sandbox_id:
        lease.release()  # somebody else was quicker
        raise missing
    return lease


def _checked(spec: SandboxSpec, options: AcquireOptions) -> SandboxSpec:
    if spec.id is not None:
        raise InvalidRequest(
            "must be empty: choose the sandbox with options.preferred_id", field="spec.id"
        )
    for name, value in options.required_labels.items():
        if spec.labels.get(name, value) != value:
            raise InvalidRequest("the spec does not match", field=f"required_labels.{name}")
    selection.check_required(spec, options.required)
    if not options.required_labels:
        return spec
    return replace(spec, labels={**spec.labels, **options.required_labels})


def _is_free(manager: Manager, sandbox_id: str) -> bool:
    """Return whether a new sandbox may have the id; ids are never reused."""
    return manager.store.sandbox(sandbox_id) is None


class Acquiring:
    def __init__(
        self,
        manager: Manager,
        spec: SandboxSpec,
        options: AcquireOptions,
        client_id: str,
        request: str = "",
        *,
        most: int | None = None,
    ) -> None:
        self.manager, self.spec, self.options = manager, spec, options
        self.client_id, self.request = client_id, request
        bounds = [each for each in (most, manager.config.max_of_client) if each is not None]
        self.most = min(bounds, default=None)
        self.began = manager.clock.now()
        self.profile = ""  # of the pool that it came from
        self.share: object = None
        self.is_written = False
        self.saved: SnapshotRecord | None = None  # whose files it starts with
        self.built: Built | None = None

    def lease(self) -> Lease:
        wanted = self.options.preferred_id
        # Two who prefer the same id at once: one gets it, and the other sees that.
        turn: AbstractContextManager[None] = nullcontext()
        if wanted is not None:
            turn = self.manager.keys.turn("", wanted)
        with turn:
            again = self._again(wanted)
            if again is not None:
                return Lease(self.manager, again, newly_created=False)
            with self.manager.index.share(self.client_id, self.most) as self.share:
                return Lease(self.manager, self._new(wanted))

    def _again(self, wanted: str | None) -> Live | None:
        """The client's own sandbox of the preferred id, if it will do."""
        options = self.options
        if wanted is None or options.require_fresh or options.snapshot_id is not None:
            return None
        live = self.manager.index.find(wanted, self.client_id)
        if live is None or live.sandbox_id != wanted:
            return None
        labels = live.spec.labels
        has_labels = all(labels.get(k) == v for k, v in options.required_labels.items())
        if not has_labels or options.preferred_backend not in ("", live.backend):
            return None
        try:
            if options.required.is_anything:
                capabilities.check(self.manager.capabilities(live.id), options.required)
            self.manager.activate(live)
        except RingfenceError:
            return None  # it will not do, or has just ended
        return live

    def _new(self, wanted: str | None) -> Live:
        manager = self.manager
        preferred = self.options.preferred_backend
        self._find_files()
        if self.saved is not None:
            preferred = self.saved.backend  # no other one can read it
        backend = manager.maker.choose(self.spec, preferred)
        if wanted is not None and not _is_free(manager, wanted) and not self._has_back(wanted):
            wanted = None
        live = self._warm(backend) if wanted is None else None
        if live is None:
            live = self._cold(backend, wanted)
        self._begin(live)
        if self.built is not None:
            self._start_what_it_starts(live, self.built)
        if self.options.required.is_anything:
            self._see_that_it_will_do(live)
        took = manager.clock.now() - self.began
        manager.counters.add("created")
        manager.counters.creation.add(took)
        if self.profile:
            manager.counters.claim.add(took)
        return live

    def _has_back(self, wanted: str) -> bool:
        """Return whether a sandbox comes back that was evicted from here; then its record is removed."""
        record = self.manager.store.sandbox(wanted)
        if self.saved is None or record is None or record.phase != records.ENDED:
            return False
        # A restore that failed leaves a record too, and is tried again under the same id.
        has_left = record.reason == EVICTED or record.reason.startswith(NOT_MADE)
        if not has_left or record.owner != self.client_id:
            return False
        self.manager.store.forget_sandbox(wanted)
        return True

    def _find_files(self) -> None:
        """The snapshot to start with: the one that is named, or the template's."""
        manager, name = self.manager, self.spec.template
        if self.options.snapshot_id is not None:
            if name != "default":
                hint = "omit template: a snapshot of its sandbox has the template's files"
                raise InvalidRequest("a snapshot has files of its own", field="template", hint=hint)
            self.saved = snapshots.need(manager, self.options.snapshot_id, self.client_id)
        elif name != "default":
            self.built = manager.templates.resolve(name, self.client_id)
            if self.built is not None:
                self.spec = self.built.merged(self.spec)
                if self.built.snapshot is not None:
                    self.saved = snapshots.need(manager, self.built.snapshot, None)

    def _start_what_it_starts(self, live: Live, built: Built) -> None:
        from .templates import steps

        request = built.request
        if not (request.start or request.ready):
            return
        try:
            steps.start(live.sandbox, request, steps.READY_S)
        except BaseException:
            self.manager.end(live, "start command")
            raise

    def _warm(self, backend: str) -> Live | None:
        manager = self.manager
        wanted = self.options.use_pool and self.options.snapshot_id is None
        if not (wanted and manager.config.pool.enabled):
            return None
        snapshot = self.saved.id if self.saved else ""
        while (pooled := manager.pool.claim(self.spec, backend, snapshot)) is not None:
            live = self._claimed(pooled)
            if live is not None:
                manager.counters.add("pool_hits")
                return live
        manager.counters.add("pool_misses")
        return None

    def _claimed(self, pooled: PooledSandbox) -> Live | None:
        """The session of a warm sandbox, written down while that is made; None when it was lost before."""
        early: list[Live] = []

        def meanwhile() -> None:
            self.profile = pooled.profile
            early.append(self._session(pooled.backend, pooled.warm.id))
            # Under a key somebody asks again, who is not to be told of what never came to be.
            if not self.options.key:
                self._write_down(early[0])

        inner = None
        try:
            inner = self.manager.maker.claim(pooled, self.spec, meanwhile)
        finally:
            if inner is None:
                self.profile = ""
                self._forget(early)
        if inner is None:
            return None
        early[0].have(inner)
        return early[0]

    def _forget(self, early: list[Live]) -> None:
        """Delete the early record of a sandbox that was not made."""
        while early and self.is_written:
            live = early.pop()
            self.is_written = False
            with suppress(RingfenceError):  # the next start then finds it dead
                self.manager.store.forget_session(live.id, live.sandbox_id)

    def _cold(self, backend: str, wanted: str | None) -> Live:
        manager = self.manager
        if self.spec.template != "default":
            from ..environments.apply import find, store_of

            # By its id: what the name means may change while the sandbox lives.
            self.spec = self.spec.altered(template=find(self.spec.template, store_of()).id)
        take_slot(manager)
        try:
            saved = self.saved.id if self.saved else None
            inner = manager.maker.provision(
                backend, replace(self.spec, id=wanted), self.client_id, saved
            )
        except BaseException:
            manager.slots.give_back()
            raise
        live = self._session(backend, inner.session.id)
        live.have(inner)
        return live

    def _session(self, backend: str, sandbox_id: str) -> Live:
        """A new session, which nobody finds yet."""
        manager, spec = self.manager, self.spec
        timeouts = self.options.timeouts or manager.config.timeouts
        if (idle_s := spec.limits.idle_timeout_s) is not None:
            if self.options.timeouts and timeouts.idle_s is not None:
                idle_s = min(idle_s, timeouts.idle_s)
            timeouts = replace(timeouts, idle_s=idle_s)
        live = Live(
            manager.clock,
            new_id(SESSION),
            self.client_id,
            backend,
            sandbox_id,
            spec,
            timeouts,
            self.options.metadata,
            manager.verbs,
        )
        live.key, live.request, live.profile = self.options.key, self.request, self.profile
        return live

    def _begin(self, live: Live) -> None:
        """Write the session down and let it be found; when that fails, the sandbox is gone."""
        manager = self.manager
        try:
            if not self.is_written:
                self._write_down(live)
            manager.index.enter(live, self.share)
        except BaseException:
            manager.maker.end(live.sandbox_id, live.inner.terminate, "not recorded", live.id)
            raise
        try:
            # Closing forbids more before it ends what is in the book: one of us sees the other.
            manager.check_open()
        except BaseException:
            manager.end(live, "closed")
            raise
        manager.reaper.expect(live)
        manager.events.add("created", live)

    def _write_down(self, live: Live) -> None:
        store, clock = self.manager.store, self.manager.clock
        with store.together():
            store.change_sandbox(
                live.sandbox_id,
                phase=records.LIVE,
                owner=live.client_id,
                spec=spec_text(live.spec),
                boot=clock.boot,
                expires_ns=None if live.expires is None else int(live.expires * 1e9),
            )
            store.add_session(record_of(live, clock))
        self.is_written = True

    def _see_that_it_will_do(self, live: Live) -> None:
        try:
            capabilities.check(self.manager.capabilities(live.id), self.options.required)
        except BaseException:
            self.manager.end(live, "requirements")
            raise


def take_slot(manager: Manager) -> None:
    """A slot for a client's sandbox: one that is merely warm makes room for it.

    Raises:
        ResourceExhausted: All are clients', and none came free in time.
    """
    while not manager.slots.try_take():
        pooled = manager.pool.take_any()
        if pooled is None:
            manager.slots.take()
            return
        manager.maker.discard(pooled, "made room")
