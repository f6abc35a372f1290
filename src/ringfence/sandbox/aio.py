"""`AsyncSandbox`: the surface of `Sandbox` for asyncio and trio. Nothing here blocks the loop."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from math import inf

from ..model.calls import check_callbacks, make_request
from . import remote
from .process import Process
from .pump import Pump
from .reactor import reactor
from .sync import DEFAULT_BACKEND, Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
    from typing import Any, TypeVar

    from ..backends.protocol import Backend
    from ..client import AsyncClient
    from ..model.calls import Network
    from ..model.capabilities import Protection
    from ..model.exec import ExecResult
    from ..model.found import FileChange
    from ..model.granted import SandboxCapabilities
    from ..model.limits import Limits
    from ..model.mount import Mount
    from ..model.netlog import NetworkEvent
    from ..model.network import NetworkPolicy
    from ..model.session import ResolvedMount, Session
    from ..model.snapshot import Snapshot
    from ..model.spec import SandboxSpec
    from ..model.state import State
    from ..model.stats import SandboxStats
    from .expose import Exposure
    from .looking import Watch
    from .stream import Stream

    T = TypeVar("T")

# Control calls are short (milliseconds) but do block: they run here, execs in the reactor. Copies may
# take long, and have threads of their own: however many there are, `terminate` finds one that is free.
_control = ThreadPoolExecutor(max_workers=32, thread_name_prefix="ringfence")
_copies = ThreadPoolExecutor(max_workers=32, thread_name_prefix="ringfence-files")


async def resolve(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait for a future of another thread under whatever event loop runs this.

    Raises:
        TimeoutError: It had no result within `timeout_s` seconds.
        RuntimeError: No event loop that is known here runs.
    """
    trio = _running_trio()
    if trio is None:
        import asyncio

        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def tell(_: Future[T]) -> None:
        try:
            token.run_sync_soon(done.set)
        except trio.RunFinishedError:
            pass  # who waited was cancelled, and so is everything else there

    future.add_done_callback(tell)
    with trio.move_on_after(inf if timeout_s is None else timeout_s):
        await done.wait()
    if not done.is_set():
        raise TimeoutError
    return future.result()


async def in_thread(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a short blocking call elsewhere."""
    return await resolve(_control.submit(partial(function, *args, **options)))


async def copying(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a call that may take long, on threads that nothing short waits for."""
    return await resolve(_copies.submit(partial(function, *args, **options)))


def _running_trio() -> Any:
    """The module, when its event loop is the one that runs here."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def _ready(fd: int, side: str) -> None:
    """Wait until a `side`, `reader` or `writer`, of `fd`, which stays open meanwhile, would not block."""
    trio = _running_trio()
    if trio is not None:
        waits = {"reader": trio.lowlevel.wait_readable, "writer": trio.lowlevel.wait_writable}
        await waits[side](fd)
        return
    import asyncio

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    getattr(loop, f"add_{side}")(fd, tell)
    try:
        await ready
    finally:
        getattr(loop, f"remove_{side}")(fd)


class AsyncFiles:
    """`sandbox.files`; see `Files`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._files = sandbox.files

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        async def call(*args: Any, **options: Any) -> Any:
            return await copying(method, *args, **options)

        return call

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """What changes at and below `path`, as it happens, from the beginning of the block to its end."""
        watch = await copying(self._files.begin_watch, path, recursive=recursive)
        try:
            async with aclosing(_changes(watch)) as changes:
                yield changes
        finally:
            await copying(watch.close)


async def _changes(watch: Watch) -> AsyncGenerator[FileChange, None]:
    found = watch.early
    while True:
        for each in found:
            yield each
        if watch.stream < 0:
            return
        await _ready(watch.stream, "reader")
        found = await copying(watch.read)


class AsyncProcess:
    """A background process; see `Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.id = process.id
        self.stdin = AsyncStdin(process) if process.stdin else None
        self.stdout = AsyncStream(process.stdout)
        self.stderr = AsyncStream(process.stderr)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.running

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Its result, once it has ended. The process keeps running when the wait times out.

        Raises:
            TimeoutError: It did not end within `timeout_s` seconds.
        """
        return await resolve(_shield(self._process.future), timeout_s)

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the process itself."""
        await in_thread(self._process.send_signal, signum)

    async def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        await in_thread(self._process.signal_group, signum)

    async def terminate(self) -> None:
        """SIGTERM: ask it to end."""
        await in_thread(self._process.terminate)

    async def kill(self) -> None:
        """Kill it and everything that it started."""
        await in_thread(self._process.kill)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        await in_thread(self._process.resize, rows, cols)


class AsyncStdin:
    """The writing end of a process's standard input."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        self._stdin = process.stdin

    async def write(self, data: bytes) -> None:
        """Write everything, waiting while the process does not read.

        Raises:
            ExecError: It no longer reads.
        """
        view = memoryview(data)
        while view := view[self._stdin.write_some(view) :]:
            fd = self._stdin.duplicate()
            try:
                await _ready(fd, "writer")
            finally:
                os.close(fd)

    async def close(self) -> None:
        """End of input. On a terminal, send b"\\x04" instead."""
        self._stdin.close()


class AsyncStream:
    """One output stream of a process."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self, timeout_s: float | None = None) -> bytes:
        """What came since the last read; empty at the end.

        Raises:
            TimeoutError: Nothing came within `timeout_s` seconds.
        """
        while True:
            await resolve(_shield(self._stream.readable()), timeout_s)
            try:
                return self._stream.read(0)
            except TimeoutError:
                continue  # another reader was faster

    @property
    def dropped_bytes(self) -> int:
        """How many bytes between head and tail were not kept."""
        return self._stream.dropped_bytes

    async def getvalue(self) -> bytes:
        """All that was kept so far, what was read already included; see `Stream.getvalue`."""
        return self._stream.getvalue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def lines(self) -> AsyncIterator[str]:
        """Text lines, without their newline, bad bytes replaced."""
        rest = b""
        async for chunk in self:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")


class AsyncSandbox:
    """One isolated environment, for asyncio and trio; an async context manager. See `Sandbox`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.spec = sandbox.spec
        self.files = AsyncFiles(sandbox)

    @classmethod
    async def create(
        cls,
        spec: SandboxSpec | None = None,
        *,
        mounts: Sequence[Mount | str] = (),
        network: Network = "none",
        limits: Limits | Mapping[str, Any] | None = None,
        backend: Backend | str | None = None,
        server: str | AsyncClient | None = None,
        **others: Any,
    ) -> AsyncSandbox:
        """Make a sandbox, locked down and ready; see `Sandbox.create`."""
        if server is not None:
            with_parts = {"mounts": mounts, "network": network, "limits": limits, **others}
            return await remote.create_async(server, spec, backend, with_parts)
        make = partial(
            Sandbox.create,
            spec,
            mounts=mounts,
            network=network,
            limits=limits,
            backend=backend,
            **others,
        )
        return cls(await owned(make))

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
            return await remote.restore_async(server, snapshot_id, spec, secrets)
        make = partial(Sandbox.restore, snapshot_id, spec, secrets=secrets, backend=backend)
        return cls(await owned(make))

    @staticmethod
    async def snapshots(
        *, backend: Backend | str = DEFAULT_BACKEND, server: str | AsyncClient | None = None
    ) -> list[Snapshot]:
        """Every snapshot that is kept, oldest first."""
        if server is not None:
            async with remote.client_async(server) as client:
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
            async with remote.client_async(server) as client:
                await client.delete_snapshot(snapshot_id)
            return
        await in_thread(Sandbox.delete_snapshot, snapshot_id, backend=backend)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run one process to its end; cancelled, the whole tree is killed first.

        `on_stdout` and `on_stderr` are called from a background thread.
        """
        request = make_request(
            argv,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
        )
        check_callbacks(on_stdout, on_stderr)
        # Starting is one datagram: cheaper than a detour through another thread.
        run = self._sandbox._inner.start(request)
        pump = Pump(run, request, self.spec.limits, on_stdout, on_stderr)
        future = reactor().drive(pump)
        try:
            return await resolve(_shield(future))
        except BaseException:
            if not future.done():
                run.kill()
            raise

    async def shell(self, script: str, **options: Any) -> ExecResult:
        """Run a POSIX shell script; options as for `exec`."""
        return await self.exec(["sh", "-c", script], **options)

    async def start(self, argv: Sequence[str], **options: Any) -> AsyncProcess:
        """Start a process in the background; options as for `Sandbox.start`."""
        return AsyncProcess(await in_thread(self._sandbox.start, argv, **options))

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
        """Change what the sandbox may reach, at once."""
        await in_thread(self._sandbox.apply_network_policy, network)

    async def network_log(self) -> list[NetworkEvent]:
        """What was asked of the network so far, oldest first; bounded. See `Sandbox.network_log`."""
        return await in_thread(self._sandbox.network_log)

    async def learned_policy(self) -> NetworkPolicy:
        """The smallest policy that allows what was reached so far."""
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

    async def checkpoint(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save files and memory, and end; see `Sandbox.checkpoint`."""
        return await in_thread(self._sandbox.checkpoint, metadata)

    async def stats(self) -> SandboxStats:
        """What it uses, from the kernel."""
        return await in_thread(self._sandbox.stats)

    async def capabilities(self) -> SandboxCapabilities:
        """What it can do, read back from the kernel; see `Sandbox.capabilities`."""
        return await in_thread(self._sandbox.capabilities)

    async def protections(self) -> tuple[Protection, ...]:
        """What protects the host, read back from the kernel."""
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
        future = _control.submit(self._sandbox.terminate)
        await resolve(_shield(future))

    def __repr__(self) -> str:
        return f"<Async{repr(self._sandbox)[1:]}"


async def owned(make: Callable[[], Sandbox]) -> Sandbox:
    """Make a sandbox; when the waiting task is cancelled meanwhile, end the sandbox."""
    future = _control.submit(make)
    try:
        return await resolve(_shield(future))
    except BaseException:
        future.add_done_callback(_terminate_made)
        raise


def _terminate_made(future: Future[Sandbox]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().terminate()


def _shield(future: Future[T]) -> Future[T]:
    """A future that may be cancelled without cancelling the work behind it."""
    outer: Future[T] = Future()

    def copy(done: Future[T]) -> None:
        if outer.cancelled() or not outer.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())

    future.add_done_callback(copy)
    return outer
