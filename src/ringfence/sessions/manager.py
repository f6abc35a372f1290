"""`SessionManager`: sandboxes leased to clients, kept warm, watched, and ended in time."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from ..backends import registry
from ..backends.optional import Durable
from ..errors import InvalidRequest, LifecycleError, RingfenceError, SandboxNotFound, StorageFull
from ..model.acquire import AcquireOptions, AttachRequest, check_client
from ..model.base.helpful import helpful
from ..model.client_session import ClientSession, SessionState, check_session_step, id_of
from ..model.create import CreateRequest
from ..model.spec import SandboxSpec
from ..store.store import Store
from . import acquiring, forks, liveness, snapshots
from .admission import Slots
from .catalogue.ended import EndedSandboxes
from .catalogue.index import SessionIndex
from .catalogue.records import NAME, map_text, spec_text, view_of
from .clock import Clock
from .config import ManagerConfig, PoolConfig
from .counts.statistics import Counters
from .events import Events
from .keys import Keys
from .lease import Lease
from .live import Live
from .maker import Maker
from .pools import pool_config
from .pools.pool import Pool, PooledSandbox
from .reaper import Reaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ..backends.protocol import Backend
    from ..model.changes import Changes
    from ..model.client_session import SessionRef
    from ..model.fork import Merged
    from ..model.granted import SandboxCapabilities
    from ..model.manager_stats import Health, ManagerStats
    from ..model.session import Snapshot
    from ..sandbox.sync import Sandbox
    from ..snapshots.shared import SharedSnapshots
    from ..store.directory import StateDirectory
    from .forks import Carry

    Sessions = list[ClientSession]  # `list` is a method here
    Snapshots = list[Snapshot]

DEFAULT_BACKENDS = (registry.DEFAULT,)
_LONGEST_TTL_S = 366 * 86_400.0


@helpful
class SessionManager:
    """Sessions of many clients. Every method may be called from any thread; the verbs are idempotent.

    `session` is an id, of the session or its sandbox, or an object that has one: a `ClientSession`, a
    `Lease`, a `Sandbox`. Specs, options and requests may be mappings of their JSON form. Where a
    method takes a `client_id`, that client finds only what is its own; None finds everything.

    Args:
        config: Bounds, timeouts and the pool; None takes the defaults.
        state_dir: Where sessions are written down, to survive this process. One process holds it at a
            time; whoever passes one that is held lets go of it. None keeps them in memory only.
        backends: Names, or backends of the caller's own; the first that can make a sandbox does.
        outlive_s: How long sandboxes live on after this process was killed, or closed with `keep`, until
            a manager of the same `state_dir` goes on with them; None: they end with this process.
        background: Whether expiry and the pool have threads of their own. Without, call
            `cleanup_expired` and `fill_pool`.
        shared: Where snapshots are also kept, to outlive this machine; None: on this machine only.

    Raises:
        StateInUse: Another process holds `state_dir`.
        StateTooNew: A newer version wrote it.
    """

    def __init__(
        self,
        config: ManagerConfig | None = None,
        *,
        state_dir: str | StateDirectory | None = None,
        backends: Sequence[Backend | str] = DEFAULT_BACKENDS,
        background: bool = True,
        clock: Clock | None = None,
        outlive_s: float | None = None,
        shared: SharedSnapshots | None = None,
    ) -> None:
        self.shared = shared  # where snapshots outlive this machine
        self.config = ManagerConfig() if config is None else ManagerConfig.taken(config, "config")
        self.clock = clock or Clock()
        self.has_background = background
        self.not_ours: list[str] = []  # left by earlier managers, of backends that are not here
        self.before_store_closes: list[Callable[[], None]] = []  # every sandbox has ended
        self._started, self._pid, self._closed = self.clock.now(), os.getpid(), False
        self._own_backends: list[Backend] = []
        self._outlive_s = outlive_s
        self.store = Store(state_dir)
        try:
            with suppress(StorageFull):  # then this moment is the first that is known
                self.clock.first_ahead_s = self.clock.ahead_s
                self.clock.first_ahead_s = self.store.first_ahead_s(
                    self.clock.boot, self.clock.ahead_s
                )
            self._open(backends)
            if background:
                self.reaper.start()
                try:
                    self.pool.start()
                except BaseException:
                    self.reaper.close()
                    raise
        except BaseException:
            try:
                # Sandboxes of an earlier process may have been found in part: the next one gets all.
                self._close_backends(keep=bool(self.store.unended_sandboxes()))
            finally:
                self.store.close()
            raise

    def _open(self, backends: Sequence[Backend | str]) -> None:
        self._configured_pool = self.config.pool
        pool = pool_config.pool_of(self.store, self._configured_pool)
        config = self.config = replace(self.config, pool=pool)
        self.index, self.counters, self.keys, self.events = (
            SessionIndex(),
            Counters(),
            Keys(),
            Events(),
        )
        self.ended = EndedSandboxes()
        self.slots = Slots(config.max_sandboxes, config.max_waiting, config.wait_s)
        if isinstance(backends, str):
            hint = f'as ["{backends}"]'
            raise InvalidRequest("must be a list, not str", field="backends", hint=hint)
        self.maker = Maker(self._by_name(backends), self.store, self.slots, self.clock)
        self.pool = Pool(config.pool, self.clock, self._build_ahead, self.maker.discard)
        self.reaper: Reaper = Reaper(self, self.clock)
        from .recovery import recover
        from .templates.catalogue import Templates

        recover(self)
        self.templates = Templates(self)
        self.templates.recover()

    def _by_name(self, wanted: Sequence[Backend | str]) -> dict[str, Backend]:
        found: dict[str, Backend] = {}
        for each in wanted:
            backend = self._make_backend(each) if isinstance(each, str) else each
            if backend.name in found:
                what = f"two backends named {backend.name!r}"
                raise InvalidRequest(what, field="backends", hint="give each one once")
            found[backend.name] = backend
        return found

    def _make_backend(self, name: str) -> Backend:
        options: dict[str, Any] = {}
        if (directory := self.store.directory) is not None:
            options = {"state_dir": directory.file("snapshots"), "restart_dir": directory.path}
            options["outlive_s"] = self._outlive_s
        self._own_backends.append(registry.new_backend(name, **options))
        return self._own_backends[-1]

    def _build_ahead(self, profile: str) -> PooledSandbox | None:
        spec = self.config.pool.profiles[profile]
        # Of a template that every client may use: nobody knows yet who gets the sandbox.
        built = None if spec.template == "default" else self.templates.resolve(spec.template, "")
        if built is None:
            return self.maker.build_ahead(spec, profile)
        snapshot = snapshots.need(self, built.snapshot, None) if built.snapshot else None
        return self.maker.build_ahead(built.merged(spec), profile, snapshot)

    # -- getting a sandbox --------------------------------------------------------------------

    def acquire(
        self,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        options: AcquireOptions | Mapping[str, Any] | None = None,
        *,
        client_id: str,
        most: int | None = None,
    ) -> Lease:
        """A session on a sandbox that is as `spec` asks and that no other client has ever used.

        Args:
            most: Sandboxes that this client may have with it, beside the manager's `max_of_client`.

        Raises:
            InvalidRequest: The request is malformed or contradicts itself; nothing was started.
            BackendUnavailable: No backend can; the message says of each why not.
            ResourceExhausted: As many sandboxes as may be are in use. Try again later.
            QuotaExceeded: This client has as many as it may.
            Unsupported: What was made did not have what `options.required` asks for; it is gone.
        """
        self.check_open()
        spec = SandboxSpec() if spec is None else SandboxSpec.taken(spec, "spec")
        options = AcquireOptions() if options is None else AcquireOptions.taken(options, "options")
        return acquiring.acquire(self, spec, options, client_id, most)

    def attach(
        self, request: AttachRequest | Mapping[str, Any], *, most: int | None = None
    ) -> Lease:
        """Work with a certain sandbox: detached, suspended, or in use by the same client already.

        Args:
            most: As of `acquire`, where it is made.

        Raises:
            SandboxNotFound: This client has none of that id, and it may not or cannot be made.
        """
        self.check_open()
        return acquiring.attach(self, AttachRequest.taken(request, "request"), most)

    def release(
        self, session: SessionRef, *, keep_alive: bool = False, client_id: str | None = None
    ) -> ClientSession:
        """End a session that is no longer needed; releasing it twice is once.

        Args:
            keep_alive: Have a fresh sandbox of the same kind warm instead, as far as the pool may
                grow. The used one never comes back: it is gone in any case.
        """
        live = self.index.find(id_of(session), client_id)
        if live is None:
            return self._ended(session, client_id)
        profile = live.profile
        if keep_alive and not profile:
            profile = self.pool.profile_for(live.spec, live.backend)
        if self.end(live, "released") and keep_alive and profile:
            self.pool.order(profile)
        return live.view()

    # -- the other verbs ----------------------------------------------------------------------

    def detach(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Leave a session alone for a while; what runs goes on. Detaching twice is once.

        Raises:
            LifecycleError: It is suspended, or over.
        """
        live = self._need(session, client_id)
        with live.lock:
            self._step(live, SessionState.DETACHED)
        return live.view()

    def suspend(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Freeze every process of a session."""
        live = self._need(session, client_id)
        with live.lock:
            check_session_step(live.state, SessionState.SUSPENDED)
            live.inner.suspend()
            self._step(live, SessionState.SUSPENDED)
        return live.view()

    def resume(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Let the processes of a session go on, and make it active.

        Raises:
            SandboxNotFound: There is none.
            LifecycleError: It is over.
        """
        live = self._need(session, client_id)
        self.activate(live)
        return live.view()

    def activate(self, live: Live) -> None:
        """Make a session active, whatever it was."""
        with live.lock:
            check_session_step(live.state, SessionState.ACTIVE)
            if live.state == SessionState.SUSPENDED:
                live.inner.resume()
            self._step(live, SessionState.ACTIVE)

    def touch(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Say that a session is still wanted: its timeouts begin anew."""
        live = self._need(session, client_id)
        live.touch()
        return live.view()

    def extend(
        self, session: SessionRef, ttl_s: float, client_id: str | None = None
    ) -> ClientSession:
        """Let a session end `ttl_s` seconds from now, whenever it was to end before."""
        if not 0 < ttl_s <= _LONGEST_TTL_S:
            raise InvalidRequest("must be above 0 and within a year", field="ttl_s")
        live = self._need(session, client_id)
        with live.lock:
            if live.state == SessionState.TERMINATED:
                raise _over(live.view())
            expires = self.clock.now() + ttl_s
            self.store.change_sandbox(live.sandbox_id, expires_ns=int(expires * 1e9))
            live.expires = expires
        self.reaper.expect(live)
        return live.view()

    def change(
        self,
        session: SessionRef,
        *,
        name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        client_id: str | None = None,
    ) -> ClientSession:
        """Change a sandbox's name, if one is given, and some of its labels; a label of None goes.

        Raises:
            InvalidRequest: They may not be so, or there would be too many.
            LifecycleError: It is over.
        """
        live = self._need(session, client_id)
        with live.lock:
            if live.state == SessionState.TERMINATED:
                raise _over(live.view())
            merged = {**live.spec.labels, **(labels or {})}
            spec = replace(live.spec, labels={k: v for k, v in merged.items() if v is not None})
            metadata = {**live.metadata, **({} if name is None else {NAME: name})}
            CreateRequest(spec, name=metadata.get(NAME, ""), metadata=metadata)  # checks them
            with self.store.together():
                self.store.change_sandbox(live.sandbox_id, spec=spec_text(spec))
                self.store.change_session(live.id, metadata=map_text(metadata))
            live.spec = live.sandbox.spec = spec
            live.metadata = metadata
        return live.view()

    def terminate(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """End a session and its sandbox. Legal in every state; ending it twice is once."""
        live = self.index.find(id_of(session), client_id)
        if live is None:
            return self._ended(session, client_id)
        self.end(live, "terminated")
        return live.view()

    def _step(self, live: Live, then: SessionState) -> None:
        """Go to a state that the table allows, and write it down. `live.lock` is held."""
        check_session_step(live.state, then)
        live.touch()
        if live.state == then:
            return
        live.saved_activity = last = live.activity.last
        self.store.change_session(
            live.id, state=str(then), active_ns=int(last * 1e9), active_at=self.clock.wall_at(last)
        )
        live.state = then
        self.reaper.expect(live)
        self.events.add(str(then), live)

    def end(self, live: Live, reason: str) -> bool:
        """End a session; False when it had ended already."""
        with live.lock:
            if live.state == SessionState.TERMINATED:
                return False
            live.state, live.reason = SessionState.TERMINATED, reason
            self.counters.add("terminated")
            self.counters.add(f"terminated: {reason}")
            try:
                self.maker.end(live.sandbox_id, live.inner.terminate, reason, live.id)
                self.ended.keep(live.sandbox)
            finally:
                self.index.leave(live)
                self.events.add("ended", live)
        self.pool.wake()
        return True

    # -- snapshots ----------------------------------------------------------------------------

    def snapshot(
        self,
        session: SessionRef,
        metadata: Mapping[str, str] | None = None,
        client_id: str | None = None,
    ) -> Snapshot:
        """Save a sandbox's files, for its client; restored by `acquire` with `snapshot_id`."""
        return snapshots.take(self, self._need(session, client_id), metadata or {})

    def checkpoint(
        self,
        session: SessionRef,
        metadata: Mapping[str, str] | None = None,
        client_id: str | None = None,
    ) -> Snapshot:
        """Save a sandbox's files and memory, and end it: `acquire` lets all that ran go on.

        Raises:
            Unsupported: Its backend saves files only; it goes on.
            LifecycleError: Something inside holds what cannot be saved; it goes on.
        """
        return snapshots.checkpoint(self, self._need(session, client_id), metadata or {})

    def changes(
        self, session: SessionRef, since: str | None = None, client_id: str | None = None
    ) -> Changes:
        """List what has changed in a sandbox, as `Sandbox.changes`.

        Args:
            since: Id of the snapshot to compare with; None: a new sandbox of the same spec.

        Raises:
            SnapshotNotFound: There is none, or it is another client's.
        """
        return snapshots.changes(self, self._need(session, client_id), since, client_id)

    def fork(
        self,
        session: SessionRef,
        n: int = 1,
        *,
        processes: str = "auto",
        changes: Mapping[str, Any] | None = None,
        judge: Callable[[SandboxSpec], SandboxSpec] | None = None,
        client_id: str | None = None,
        most: int | None = None,
        key: str = "",
        carry: Carry | None = None,
    ) -> list[Lease]:
        """Make `n` sessions of the same client with the files that this one has now; see `Sandbox.fork`.

        Args:
            n: 1 to 1,000.
            processes: `none`, `auto` or `required`.
            changes: `network`, `limits`, `labels` and `secrets` of the forks.
            judge: Checks the spec of the forks, which may have another one in its place.
            most: As of `acquire`.
            key: Asking again under the same key gives the same sessions.
            carry: Takes along what runs; None: files only.

        Raises:
            QuotaExceeded, ResourceExhausted: As `acquire`; none is left.
            InvalidRequest: The key was used for another request.
            LifecycleError: Sessions of that key have ended.
        """
        live = self._need(session, client_id)
        carry = carry or forks.Carry()
        return forks.fork(self, live, n, processes, changes or {}, judge, most, key, carry)

    def merge(
        self,
        session: SessionRef,
        into: SessionRef,
        base: str,
        *,
        path: str = ".",
        prefer: str | None = None,
        dry_run: bool = False,
        client_id: str | None = None,
    ) -> Merged:
        """Merge what has changed in a session since a snapshot into another one; see `Sandbox.merge`.

        Args:
            into: Session to merge into.
            base: Id of the snapshot that both come from.
            path: Directory in both: absolute, or relative to the session's root.
            prefer: `ours` or `theirs`; None: what both changed is a conflict.
            dry_run: Only tell what would change.

        Raises:
            SnapshotNotFound: There is none of the id `base`, or it is another client's.
        """
        branch, target = self._need(session, client_id), self._need(into, client_id)
        return forks.merge(self, branch, target, base, path, prefer, dry_run, client_id)

    def snapshots(self, client_id: str | None = None) -> Snapshots:
        """Every snapshot of a client, oldest first."""
        self.check_open()
        return snapshots.every(self, client_id)

    def delete_snapshot(self, snapshot_id: str, client_id: str | None = None) -> None:
        """Remove a snapshot; sandboxes restored from it are not touched.

        Raises:
            SnapshotNotFound: There is none, or it is another client's.
        """
        self.check_open()
        snapshots.delete(self, snapshot_id, client_id)

    # -- looking ------------------------------------------------------------------------------

    def get(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """A session, also for a while after it has ended.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        live = self._find(session, client_id)
        return live.view() if live is not None else self._ended(session, client_id)

    def list(
        self,
        client_id: str | None = None,
        *,
        states: Sequence[SessionState] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Sessions:
        """Sessions that have not ended, oldest first."""
        self.check_open()
        wanted = (labels or {}).items()
        found = []
        for live in self.index.all():
            mine = client_id in (None, live.client_id)
            if mine and not liveness.notice_loss(self, live):
                view = live.view()
                has_labels = all(live.spec.labels.get(name) == value for name, value in wanted)
                if has_labels and view.state in (states or tuple(SessionState)[:3]):
                    found.append(view)
        return found

    def sandbox(self, session: SessionRef, client_id: str | None = None) -> Sandbox:
        """The sandbox of a session, to work with.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
            LifecycleError: It has ended.
        """
        return self._need(session, client_id).sandbox

    def set_default_sandbox(self, client_id: str, session: SessionRef | None) -> None:
        """Choose the sandbox that a client means when it names none; None: none."""
        live = None if session is None else self._need(session, client_id)
        self.store.set_default(check_client(client_id), live.sandbox_id if live else None)

    def default_sandbox(self, client_id: str) -> ClientSession | None:
        """The session of a client's default sandbox; None when there is none, or it has ended."""
        self.check_open()
        sandbox_id = self.store.default(check_client(client_id))
        live = self._find(sandbox_id, client_id) if sandbox_id else None
        return live.view() if live is not None else None

    def capabilities(
        self, session: SessionRef, client_id: str | None = None
    ) -> SandboxCapabilities:
        """Read back from the kernel what a sandbox can do and what restricts it."""
        from .capabilities import granted

        return granted(self._need(session, client_id), self.clock)

    @property
    def uptime_s(self) -> float:
        """Since the manager was made."""
        return self.clock.now() - self._started

    def stats(self) -> ManagerStats:
        """Return counts and times since the start, and current numbers."""
        from .counts.report import stats

        self.list()  # notices what was lost
        return stats(self)

    def stats_of(self, client_id: str) -> ManagerStats:
        """Count one client's sandboxes and sessions; counts over all clients stay zero."""
        from .counts.report import stats_of

        self.list(client_id)  # marks sandboxes that died unnoticed
        return stats_of(self, client_id)

    def health(self) -> Health:
        """Check everything that a manager needs, now."""
        from .counts.report import health

        self.check_open()
        return health(self)

    # -- in time ------------------------------------------------------------------------------

    def change_pool(self, config: PoolConfig) -> None:
        """Keep other sandboxes warm from now on. What fits no profile any more is discarded.

        Kept in the state directory: the next manager does so too, unless its own configuration of the
        pool is another one than this one's was.

        Raises:
            StorageFull: That could not be written down; nothing has changed.
        """
        self.check_open()
        pool_config.keep_pool(self.store, config, self._configured_pool)
        self.config = replace(self.config, pool=config)
        self.pool.change(config)

    def cleanup_expired(self) -> Sessions:
        """Check every session now; return those that ended."""
        self.check_open()
        return [live.view() for live in self.index.all() if liveness.look_at(self, live)]

    def fill_pool(self) -> None:
        """Fill the pool now, and discard sandboxes that are too old."""
        self.check_open()
        self.pool.fill()

    # -- ending -------------------------------------------------------------------------------

    def close(self, *, keep: bool = False) -> None:
        """End every session and everything that is warm; idempotent.

        Args:
            keep: Leave the clients' sandboxes, for another manager on the same state directory and
                the same backends to take over: those of backends of the caller's own, and with
                `outlive_s` those of `Durable` ones.
        """
        if self._closed or self._pid != os.getpid():
            return
        self.templates.close()
        self._closed = True
        self.slots.close()
        self.reaper.close()
        self.pool.close()
        if keep:
            liveness.tidy(self)
        else:
            self._end_all()
            for settle in self.before_store_closes:
                settle()
        self._close_backends(keep=keep)
        self.templates.remove_places()
        self.store.close()

    def _end_all(self) -> None:
        for live in self.index.all():
            try:
                self.end(live, "closed")
            except RingfenceError:
                continue  # `maker.undying`; the next start looks for it
        if not self.not_ours and not self.maker.undying:
            for anchor in self.store.anchors():
                self.store.forget_anchor(anchor)

    def _close_backends(self, *, keep: bool = False) -> None:
        for backend in reversed(self._own_backends):
            if keep and isinstance(backend, Durable) and backend.outlives:
                backend.save()
                backend.leave()
            else:
                backend.close()

    def __enter__(self) -> SessionManager:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raises LifecycleError unless this manager, in this process, still manages."""
        if self._pid != os.getpid():
            raise LifecycleError(
                "a session manager cannot be used after fork(): create one in each process"
            )
        if self._closed:
            raise LifecycleError("the session manager is closed")

    # -- finding ------------------------------------------------------------------------------

    @property
    def verbs(self) -> dict[str, Callable[[str], object]]:
        """Session-level actions that replace the sandbox's own, so that the manager knows of them."""
        return {"terminate": self.terminate, "suspend": self.suspend, "resume": self.resume}

    def _find(self, session: SessionRef, client_id: str | None) -> Live | None:
        self.check_open()
        live = self.index.find(id_of(session), client_id)
        if live is not None and liveness.notice_loss(self, live):
            return None
        return live

    def _need(self, session: SessionRef, client_id: str | None) -> Live:
        live = self._find(session, client_id)
        if live is None:
            raise _over(self._ended(session, client_id))
        return live

    def _ended(self, session: SessionRef, client_id: str | None) -> ClientSession:
        self.check_open()
        any_id = id_of(session)
        found = self.store.session(any_id) or self.store.last_session_of(any_id)
        if found is None or client_id not in (None, found.owner):
            raise SandboxNotFound(f"no session or sandbox {any_id!r}")
        return view_of(found)


def _over(session: ClientSession) -> LifecycleError:
    return LifecycleError(
        f"session {session.session_id} has ended: {session.reason or session.state}",
        hint="acquire a new one",
    )
