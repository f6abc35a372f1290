"""`AsyncSessionManager` and `AsyncSandboxBash`: the surface of the others for asyncio and trio."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..model.base import checks
from ..model.base.helpful import helpful
from ..sandbox.aio import AsyncSandbox
from ..sandbox.waiting import control, copies, copying, in_thread, owned, resolve, shield
from .lease import Lease
from .manager import DEFAULT_BACKENDS, SessionManager
from .shells.bash import WORKSPACE, BashOutput, SandboxBash

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ..backends.protocol import Backend
    from ..model.acquire import AcquireOptions, AttachRequest
    from ..model.changes import Changes
    from ..model.client_session import ClientSession, SessionRef, SessionState
    from ..model.fork import Merged
    from ..model.granted import SandboxCapabilities
    from ..model.manager_stats import Health, ManagerStats
    from ..model.session import Snapshot
    from ..model.spec import SandboxSpec
    from .config import ManagerConfig, PoolConfig
    from .shells.bash import BashConfig

    Sessions = list[ClientSession]  # `list` is a method here


@helpful
class AsyncLease:
    """A session of a client's; as an async context manager it is released at the end. See `Lease`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.sandbox = AsyncSandbox(lease.sandbox)
        self.newly_created = lease.newly_created

    @property
    def session(self) -> ClientSession:
        """The session as it is now; also when it has ended."""
        return self._lease.session

    @property
    def id(self) -> str:
        """Of the session."""
        return self._lease.id

    async def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do."""
        return await in_thread(self._lease.capabilities)

    async def release(self, *, keep_alive: bool = False) -> None:
        """See `SessionManager.release`."""
        await in_thread(self._lease.release, keep_alive=keep_alive)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        # Not cancellable halfway: it is released even when this task is cancelled.
        await resolve(shield(control.submit(self._lease.release)))

    def __repr__(self) -> str:
        return f"<Async{repr(self._lease)[1:]}"


@helpful
class AsyncSessionManager:
    """`SessionManager` for asyncio and trio; an async context manager. No call blocks the loop.

    `AsyncSessionManager(manager)` is another surface of a manager that is there; `open` makes one.
    """

    def __init__(self, manager: SessionManager) -> None:
        self.manager = manager

    @classmethod
    async def open(
        cls,
        config: ManagerConfig | None = None,
        *,
        state_dir: str | None = None,
        backends: Sequence[Backend | str] = DEFAULT_BACKENDS,
        background: bool = True,
        outlive_s: float | None = None,
    ) -> AsyncSessionManager:
        """Make a manager; arguments as of `SessionManager`."""
        make = partial(
            SessionManager,
            config,
            state_dir=state_dir,
            backends=backends,
            background=background,
            outlive_s=outlive_s,
        )
        return cls(await owned(make, SessionManager.close))

    async def acquire(
        self,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        options: AcquireOptions | Mapping[str, Any] | None = None,
        *,
        client_id: str,
    ) -> AsyncLease:
        """See `SessionManager.acquire`; cancelled, what was made meanwhile is released."""
        # `copies`: a thread waiting for room must not block the threads that release sandboxes.
        make = partial(self.manager.acquire, spec, options, client_id=client_id)
        return AsyncLease(await owned(make, Lease.release, copies))

    async def attach(self, request: AttachRequest | Mapping[str, Any]) -> AsyncLease:
        """See `SessionManager.attach`."""
        return AsyncLease(await copying(self.manager.attach, request))

    async def release(
        self, session: SessionRef, *, keep_alive: bool = False, client_id: str | None = None
    ) -> ClientSession:
        """See `SessionManager.release`."""
        release = self.manager.release
        return await in_thread(release, session, keep_alive=keep_alive, client_id=client_id)

    async def detach(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Leave a session alone for a while; what runs goes on."""
        return await in_thread(self.manager.detach, session, client_id)

    async def suspend(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Freeze every process of a session."""
        return await in_thread(self.manager.suspend, session, client_id)

    async def resume(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Let the processes of a session go on, and make it active."""
        return await in_thread(self.manager.resume, session, client_id)

    async def touch(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """Begin the timeouts of a session anew."""
        return await in_thread(self.manager.touch, session, client_id)

    async def extend(
        self, session: SessionRef, ttl_s: float, client_id: str | None = None
    ) -> ClientSession:
        """Let a session end `ttl_s` seconds from now."""
        return await in_thread(self.manager.extend, session, ttl_s, client_id)

    async def change(
        self,
        session: SessionRef,
        *,
        name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        client_id: str | None = None,
    ) -> ClientSession:
        """Change a sandbox's name, if one is given, and some of its labels; a label of None goes."""
        change = self.manager.change
        return await in_thread(change, session, name=name, labels=labels, client_id=client_id)

    async def terminate(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """End a session and its sandbox; legal in every state, idempotent."""
        return await in_thread(self.manager.terminate, session, client_id)

    async def snapshot(
        self,
        session: SessionRef,
        metadata: Mapping[str, str] | None = None,
        client_id: str | None = None,
    ) -> Snapshot:
        """Save a sandbox's files, for its client."""
        return await copying(self.manager.snapshot, session, metadata, client_id)

    async def checkpoint(
        self,
        session: SessionRef,
        metadata: Mapping[str, str] | None = None,
        client_id: str | None = None,
    ) -> Snapshot:
        """Save a sandbox's files and memory, and end it."""
        return await copying(self.manager.checkpoint, session, metadata, client_id)

    async def changes(
        self, session: SessionRef, since: str | None = None, client_id: str | None = None
    ) -> Changes:
        """List what has changed in a sandbox; see `SessionManager.changes`."""
        return await copying(self.manager.changes, session, since, client_id)

    async def fork(
        self,
        session: SessionRef,
        n: int = 1,
        *,
        processes: str = "auto",
        changes: Mapping[str, Any] | None = None,
        judge: Callable[[SandboxSpec], SandboxSpec] | None = None,
        client_id: str | None = None,
        key: str = "",
    ) -> list[AsyncLease]:
        """Make sessions with the files that this one has now; see `SessionManager.fork`."""
        make = partial(
            self.manager.fork,
            session,
            n,
            processes=processes,
            changes=changes,
            judge=judge,
            client_id=client_id,
            key=key,
        )
        return [AsyncLease(each) for each in await copying(make)]

    async def merge(
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
        """Merge what has changed since a snapshot into another session; see `SessionManager.merge`."""
        options: dict[str, Any] = {"path": path, "prefer": prefer, "dry_run": dry_run}
        return await copying(
            partial(self.manager.merge, session, into, base, client_id=client_id, **options)
        )

    async def snapshots(self, client_id: str | None = None) -> list[Snapshot]:
        """Every snapshot of a client, oldest first."""
        return await in_thread(self.manager.snapshots, client_id)

    async def delete_snapshot(self, snapshot_id: str, client_id: str | None = None) -> None:
        """Remove a snapshot."""
        await in_thread(self.manager.delete_snapshot, snapshot_id, client_id)

    async def get(self, session: SessionRef, client_id: str | None = None) -> ClientSession:
        """A session, also for a while after it has ended."""
        return await in_thread(self.manager.get, session, client_id)

    async def list(
        self,
        client_id: str | None = None,
        *,
        states: Sequence[SessionState] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Sessions:
        """Sessions that have not ended, oldest first."""
        return await in_thread(self.manager.list, client_id, states=states, labels=labels)

    async def sandbox(self, session: SessionRef, client_id: str | None = None) -> AsyncSandbox:
        """The sandbox of a session, to work with."""
        return AsyncSandbox(await in_thread(self.manager.sandbox, session, client_id))

    async def set_default_sandbox(self, client_id: str, session: SessionRef | None) -> None:
        """Choose the sandbox that a client means when it names none; None: none."""
        await in_thread(self.manager.set_default_sandbox, client_id, session)

    async def default_sandbox(self, client_id: str) -> ClientSession | None:
        """The session of a client's default sandbox; None when there is none, or it has ended."""
        return await in_thread(self.manager.default_sandbox, client_id)

    async def capabilities(
        self, session: SessionRef, client_id: str | None = None
    ) -> SandboxCapabilities:
        """Read back from the kernel what a sandbox can do."""
        return await in_thread(self.manager.capabilities, session, client_id)

    async def stats(self) -> ManagerStats:
        """Return counts and times since the start, and current numbers."""
        return await in_thread(self.manager.stats)

    async def stats_of(self, client_id: str) -> ManagerStats:
        """Count one client's sandboxes and sessions."""
        return await in_thread(self.manager.stats_of, client_id)

    async def health(self) -> Health:
        """Check whether any backend can make sandboxes, and the other parts of the manager."""
        return await copying(self.manager.health)

    async def change_pool(self, config: PoolConfig) -> None:
        """Keep other sandboxes warm from now on."""
        await in_thread(self.manager.change_pool, config)

    async def cleanup_expired(self) -> Sessions:
        """Check every session now; return those that ended."""
        return await in_thread(self.manager.cleanup_expired)

    async def fill_pool(self) -> None:
        """Fill the pool now."""
        await copying(self.manager.fill_pool)

    async def close(self, *, keep: bool = False) -> None:
        """End every session and everything that is warm; not cancellable halfway, idempotent."""
        await resolve(shield(copies.submit(partial(self.manager.close, keep=keep))))

    async def __aenter__(self) -> AsyncSessionManager:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


@helpful
class AsyncSandboxBash:
    """`SandboxBash` for asyncio and trio: the same arguments and rules, and an async context manager.

    Cancelling a command kills it, with everything that it started; of a persistent shell that ends
    what was remembered, as a timeout does.
    """

    def __init__(
        self,
        workspace: str | None = None,
        config: BashConfig | None = None,
        *,
        backend: Backend | None = None,
        manager: SessionManager | AsyncSessionManager | None = None,
        client_id: str = "bash",
    ) -> None:
        if isinstance(manager, AsyncSessionManager):
            manager = manager.manager
        self._bash = SandboxBash(
            workspace, config, backend=backend, manager=manager, client_id=client_id
        )
        self.config = self._bash.config
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="ringfence-shell")

    async def exec_command(
        self, command: str, guest_workspace: str = WORKSPACE, *, timeout_s: float | None = None
    ) -> BashOutput:
        """Run a command line; see `SandboxBash.exec_command`."""
        checks.text(command, "command")
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        sandbox, shell, persistent = await copying(self._bash.begin)
        if persistent is None:
            inside = AsyncSandbox(sandbox)
            argv = [shell, "-c", command]
            return BashOutput.of(await inside.exec(argv, cwd=guest_workspace, timeout_s=timeout_s))
        cancelled = threading.Event()
        run = partial(persistent.run, command, guest_workspace, timeout_s, cancelled)
        try:
            return await resolve(self._turns.submit(run))
        except BaseException:
            persistent.cancel(cancelled)
            raise

    @property
    def sandbox(self) -> AsyncSandbox | None:
        """The sandbox of the commands; None before the first."""
        sandbox = self._bash.sandbox
        return None if sandbox is None else AsyncSandbox(sandbox)

    async def shutdown(self) -> None:
        """End the sandbox; never raises but for a cancellation, and is not cancellable halfway."""
        await resolve(shield(control.submit(self._bash.shutdown)))

    async def __aenter__(self) -> AsyncSandboxBash:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.shutdown()
