"""`AsyncSandbox`: the surface of `Sandbox` for asyncio and trio. Nothing here blocks the loop."""

from __future__ import annotations

from functools import partial

from ..model.base.helpful import helpful
from ..model.calls import check_callbacks, make_request, options_in, others_in, shell_argv
from . import remote
from .aio_files import AsyncFiles
from .aio_process import AsyncProcess
from .pump import Pump, begin
from .reactor import reactor
from .sync import DEFAULT_BACKEND, Sandbox
from .waiting import control, in_own_thread, in_thread, owned, resolve, see_through, shield

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Never, Unpack

    from ..backends.protocol import Backend
    from ..client import AsyncClient
    from ..contexts import AsyncContext, Execution
    from ..contexts.context import CellParts
    from ..model.calls import Mounts, Network, StrPath
    from ..model.capabilities import Protection
    from ..model.changes import Changes
    from ..model.execs.exec import ExecResult
    from ..model.fork import ForkReport, Merged
    from ..model.granted import SandboxCapabilities
    from ..model.limits import Limits
    from ..model.mount import Mount
    from ..model.net.netlog import NetworkEvent
    from ..model.net.network import NetworkPolicy
    from ..model.parts import ExecParts, StartParts
    from ..model.session import ResolvedMount, Session, Snapshot
    from ..model.spec import SandboxSpec
    from ..model.state import State
    from ..model.stats import SandboxStats
    from .expose import Exposure
    from .marks import Mark


@helpful
class AsyncSandbox:
    """An isolated environment for asyncio and trio; an async context manager. See `Sandbox`."""

    if not TYPE_CHECKING:

        def __new__(cls, *parts: object, **options: object) -> AsyncSandbox:
            if len(parts) != 1 or options or not isinstance(parts[0], Sandbox):
                raise TypeError(
                    "AsyncSandbox() is not a constructor: use await AsyncSandbox.create(...)"
                )
            return object.__new__(cls)

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.spec = sandbox.spec
        self.files = AsyncFiles(sandbox)

    @classmethod
    async def create(
        cls,
        spec: SandboxSpec | None = None,
        *,
        mounts: Mounts = (),
        network: Network = "none",
        limits: Limits | Mapping[str, Any] | None = None,
        backend: Backend | str | None = None,
        server: str | AsyncClient | None = None,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | int | None = None,
        workdir: StrPath | None = None,
        ttl_s: float | None = None,
        python_env: bool | None = None,
        disk_root: bool | None = None,
        protect: Sequence[str] | None = None,
        unprotect: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
        memory_dir: StrPath | None = None,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        tier: str | None = None,
        profile: str | None = None,
        template: str | None = None,
        allow_degraded: Sequence[str] | None = None,
    ) -> AsyncSandbox:
        """Make a sandbox, locked down and ready; see `Sandbox.create`."""
        others = others_in(locals())
        if server is not None:
            with_parts = {"mounts": mounts, "network": network, "limits": limits, **others}
            name = remote.name_of(backend)
            created = remote.make_async(server, "create", spec, backend=name, **with_parts)
            return await created  # type: ignore[no-any-return]  # as in `Sandbox.create`
        make = partial(
            Sandbox.create,
            spec,
            mounts=mounts,
            network=network,
            limits=limits,
            backend=backend,
            **others,
        )
        return cls(await owned(make, Sandbox.terminate))

    @classmethod
    async def restore(
        cls,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
        backend: Backend | str | None = None,
        server: str | AsyncClient | None = None,
    ) -> AsyncSandbox:
        """A new sandbox with the files of a snapshot; see `Sandbox.restore`."""
        if server is not None:
            restored = remote.make_async(server, "restore", snapshot_id, spec, secrets=secrets)
            return await restored  # type: ignore[no-any-return]
        make = partial(Sandbox.restore, snapshot_id, spec, secrets=secrets, backend=backend)
        return cls(await owned(make, Sandbox.terminate))

    @staticmethod
    async def snapshots(
        *, backend: Backend | str = DEFAULT_BACKEND, server: str | AsyncClient | None = None
    ) -> list[Snapshot]:
        """Every snapshot that is kept, oldest first."""
        if server is not None:
            async with remote.opened_async(server) as client:
                return await client.snapshots()
        return await in_thread(Sandbox.snapshots, backend=backend)

    @staticmethod
    async def delete_snapshot(
        snapshot_id: str,
        *,
        backend: Backend | str = DEFAULT_BACKEND,
        server: str | AsyncClient | None = None,
    ) -> None:
        """Remove a snapshot; sandboxes restored from it are not touched."""
        if server is not None:
            async with remote.opened_async(server) as client:
                await client.delete_snapshot(snapshot_id)
            return
        await in_thread(Sandbox.delete_snapshot, snapshot_id, backend=backend)

    async def exec(
        self,
        argv: Sequence[StrPath],
        *more: Never,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        session_leader: bool = True,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run one process to its end; cancelled, the whole tree is killed first, and is gone.

        `on_stdout` and `on_stderr` are called from a background thread.
        """
        request = make_request(argv, *more, **options_in(locals()))
        check_callbacks(on_stdout, on_stderr)
        # Starting is one datagram: cheaper than a detour through another thread.
        run = begin(self._sandbox._inner, request)
        pump = Pump(run, request, self.spec.limits, on_stdout, on_stderr)
        future = reactor().drive(pump)
        try:
            return await resolve(shield(future))
        except BaseException as exc:
            if not future.done():
                run.kill()
                await see_through(future, exc)
            raise

    async def shell(self, script: str, **options: Unpack[ExecParts]) -> ExecResult:
        """Run a POSIX shell script; options as for `exec`."""
        return await self.exec(shell_argv(script), **options)

    async def start(self, argv: Sequence[StrPath], **options: Unpack[StartParts]) -> AsyncProcess:
        """Start a process in the background; options as for `Sandbox.start`."""
        return AsyncProcess(await in_thread(self._sandbox.start, argv, **options))

    async def process(self, exec_id: str) -> AsyncProcess:
        """A process that was started before; see `Sandbox.process`."""
        return AsyncProcess(self._sandbox.process(exec_id))

    async def context(
        self,
        language: str = "python",
        *,
        kernel: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> AsyncContext:
        """Begin an interpreter that keeps its variables; see `Sandbox.context`."""
        from ..contexts import AsyncContext

        begin = partial(self._sandbox.context, language, kernel=kernel, cwd=cwd, env=env, id=id)
        return AsyncContext(await in_own_thread(begin), in_own_thread)

    async def run_code(
        self, code: str, *, language: str = "python", **options: Unpack[CellParts]
    ) -> Execution:
        """Run a cell in the default context; see `Sandbox.run_code`."""
        from ..contexts import AsyncContext
        from ..contexts.context import check_options

        check_options(options)
        context = await in_own_thread(partial(self._sandbox._its_contexts.default, language))
        return await AsyncContext(context, in_own_thread).run(code, **options)

    @property
    def id(self) -> str:
        """Time-ordered, and valid as a file name."""
        return self._sandbox.id

    @property
    def session(self) -> Session:
        """Id, backend, state and mounts now."""
        return self._sandbox.session

    @property
    def state(self) -> State:
        """`provisioned`, `running`, `suspended` or `terminated`."""
        return self._sandbox.state

    async def mount(self, mount: Mount | str) -> ResolvedMount:
        """Add a mount to the live sandbox."""
        return await in_thread(self._sandbox.mount, mount)

    async def apply_network_policy(self, network: Network) -> None:
        """Change the network policy at once."""
        await in_thread(self._sandbox.apply_network_policy, network)

    async def network_log(self) -> list[NetworkEvent]:
        """List the network events so far, oldest first; bounded. See `Sandbox.network_log`."""
        return await in_thread(self._sandbox.network_log)

    async def learned_policy(self) -> NetworkPolicy:
        """Build the smallest policy that allows the destinations reached so far."""
        return await in_thread(self._sandbox.learned_policy)

    async def connect(self, port: int) -> socket.socket:
        """A non-blocking connection to a server inside; see `Sandbox.connect`."""
        sock = await in_thread(self._sandbox.connect, port)
        sock.setblocking(False)
        return sock

    async def expose(
        self, port: int, *, host: str = "127.0.0.1", host_port: int = 0, unix: str | None = None
    ) -> Exposure:
        """An address on the host that leads to a server inside; see `Sandbox.expose`."""
        return await in_thread(
            self._sandbox.expose, port, host=host, host_port=host_port, unix=unix
        )

    async def suspend(self) -> None:
        """Freeze every process; idempotent."""
        await in_thread(self._sandbox.suspend)

    async def resume(self) -> None:
        """Let them go on; idempotent."""
        await in_thread(self._sandbox.resume)

    async def snapshot(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save the sandbox's files; restorable after the sandbox is gone."""
        return await in_thread(self._sandbox.snapshot, metadata)

    async def changes(self, since: Snapshot | str | None = None) -> Changes:
        """List the paths that were added, changed or removed; see `Sandbox.changes`."""
        return await in_thread(self._sandbox.changes, since)

    @property
    def parent(self) -> str | None:
        """Id of the sandbox that this one was forked from; None: it is no fork."""
        return self._sandbox.parent

    async def lineage(self) -> tuple[str, ...]:
        """Return the ids of the sandboxes that this one descends from; see `Sandbox.lineage`."""
        return self._sandbox.lineage()

    @property
    def fork_report(self) -> ForkReport | None:
        """Return what this fork took along; None: it is no fork."""
        return self._sandbox.fork_report

    async def fork(
        self,
        n: int = 1,
        *,
        at: Mark | None = None,
        processes: str = "auto",
        network: Network | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> list[AsyncSandbox]:
        """Make `n` new sandboxes with the files that this one has now; see `Sandbox.fork`."""
        made = await in_thread(
            self._sandbox.fork,
            n,
            at=at,
            processes=processes,
            network=network,
            limits=limits,
            labels=labels,
            secrets=secrets,
        )
        return [type(self)(each) for each in made]

    async def mark(self, *, processes: str = "auto") -> Mark:
        """Keep this moment; see `Sandbox.mark`."""
        return await in_thread(self._sandbox.mark, processes=processes)

    async def rewind(self, mark: Mark) -> None:
        """Go back to a mark of this sandbox; see `Sandbox.rewind`.

        Args:
            mark: Of this sandbox, and not closed.
        """
        await in_thread(self._sandbox.rewind, mark)

    async def merge(
        self,
        into: AsyncSandbox | StrPath,
        *,
        base: Snapshot | str,
        path: StrPath = ".",
        prefer: str | None = None,
        dry_run: bool = False,
    ) -> Merged:
        """Merge what has changed in a directory since a snapshot; see `Sandbox.merge`."""
        target = into._sandbox if isinstance(into, AsyncSandbox) else into
        return await in_thread(
            self._sandbox.merge, target, base=base, path=path, prefer=prefer, dry_run=dry_run
        )

    async def checkpoint(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save files and memory, and end; see `Sandbox.checkpoint`."""
        return await in_thread(self._sandbox.checkpoint, metadata)

    async def stats(self) -> SandboxStats:
        """Return the current resource usage, read from the kernel."""
        return await in_thread(self._sandbox.stats)

    async def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do; see `Sandbox.capabilities`."""
        return await in_thread(self._sandbox.capabilities)

    async def protections(self) -> tuple[Protection, ...]:
        """Read back from the kernel the protections of the host."""
        return await in_thread(self._sandbox.protections)

    async def terminate(self) -> None:
        """End it. Legal in every state, idempotent."""
        await in_thread(self._sandbox.terminate)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if not self._sandbox._is_ours:
            return  # the copy of a forked child
        # Not cancellable halfway: the sandbox is ended even when this task is cancelled.
        future = control.submit(self._sandbox.terminate)
        await resolve(shield(future))

    if not TYPE_CHECKING:  # for checkers a wrong name is an error

        def __setattr__(self, name: str, value: object) -> None:
            if name[0] != "_" and name not in self.__dict__:
                from ..model.calls import check_assignment

                check_assignment(self, name)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Async{repr(self._sandbox)[1:]}"
