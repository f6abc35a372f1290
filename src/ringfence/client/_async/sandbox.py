"""A sandbox of a server, with the surface of a local one."""

from __future__ import annotations

import os
import uuid
from functools import partial

from ...errors import InvalidRequest, LifecycleError, Unsupported
from ...model.base import checks
from ...model.base.helpful import helpful
from ...model.calls import (
    check_callbacks,
    make_request,
    options_in,
    parse_mount,
    parse_network,
    shell_argv,
)
from ...model.capabilities import Protection
from ...model.changes import Changes
from ...model.execs.exec import ExecResult
from ...model.execs.exec_view import ExecView
from ...model.fork import ForkReport, Merged
from ...model.granted import SandboxCapabilities
from ...model.limits import Limits
from ...model.net.netlog import NetworkEvent
from ...model.net.network import NetworkPolicy
from ...model.sandbox import SandboxView
from ...model.session import ResolvedMount, Session, Snapshot
from ...model.spec import LINEAGE
from ...model.stats import SandboxStats
from ..copies import pack_snapshot, pack_tree
from ..exposure import RemoteExposure, connect
from .contexts import default_context, open_context
from .files import AsyncRemoteFiles
from .pauses import CANCELLABLE, blocking, made
from .process import AsyncRemoteProcess, split_input, wait_for
from .transport import AsyncTransport, segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Never, Self, Unpack

    from ...contexts import AsyncContext, Contexts, Execution
    from ...contexts.context import CellParts
    from ...model.calls import Network, StrPath
    from ...model.mount import Mount
    from ...model.parts import ExecParts
    from ...model.spec import SandboxSpec
    from ...model.state import State

_WAIT_S = 25.0  # each request; then the next one waits on
_SAVE_S = 600.0  # without a byte: a sandbox may be large
_SPARE_S = 30.0  # beyond what a request was asked to wait


@helpful
class AsyncRemoteSandbox:
    """An isolated environment on a server. As a context manager: leaving it terminates it.

    It outlives the process that made it: the server's timeouts, and `terminate`, end it.

    Attributes:
        owns_transport: True if `terminate` closes the connections too.
    """

    def __init__(self, transport: AsyncTransport, view: SandboxView, spec: SandboxSpec) -> None:
        self._transport, self._view, self.spec = transport, view, spec
        self.owns_transport = False
        self._at = f"/v1/sandboxes/{segment(view.id)}"
        self.files = AsyncRemoteFiles(transport, self._at)
        self._exposures: list[RemoteExposure] = []
        self._contexts: Contexts | None = None  # of the one that does not await
        self._fork_report: ForkReport | None = None
        self._carried: list[str] = []  # ids of default contexts that go on in this fork

    # -- running commands -------------------------------------------------------------------

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
        """Run one process to its end; see `Sandbox.exec`. Cancelled, the whole tree is killed first.

        Raises:
            ServerUnreachable: The connection broke; the process may go on.
        """
        request = make_request(argv, *more, **options_in(locals()))
        check_callbacks(on_stdout, on_stderr)
        form, large_input = split_input(request)
        if CANCELLABLE or on_stdout or on_stderr or large_input:
            process = await made(lambda: self._start(form, large_input), AsyncRemoteProcess.end)
            return await process.run_through(on_stdout, on_stderr)
        form |= {"wait": True, "wait_s": _WAIT_S}
        answer = await self._transport.json(
            "POST", f"{self._at}/execs", body=form, key=new_key(), timeout_s=_WAIT_S + _SPARE_S
        )
        view = ExecView.from_json(answer)
        return await wait_for(self._transport, self._at, view)

    async def shell(self, script: str, **options: Unpack[ExecParts]) -> ExecResult:
        """Run a POSIX shell script; options as for `exec`."""
        return await self.exec(shell_argv(script), **options)

    async def start(
        self,
        argv: Sequence[StrPath],
        *more: Never,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        stream_stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        session_leader: bool = True,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> AsyncRemoteProcess:
        """Start a process in the background; see `Sandbox.start`. It outlives this client."""
        request = make_request(argv, *more, **options_in(locals()))
        check_callbacks(on_stdout, on_stderr)
        form, large_input = split_input(request)
        process = await self._start(form, large_input)
        process.call_back(on_stdout, on_stderr)
        return process

    async def _start(self, form: dict[str, Any], large_input: bytes) -> AsyncRemoteProcess:
        # Under a key of its own: a lost answer is asked for again, and the command never runs twice.
        answer = await self._transport.json("POST", f"{self._at}/execs", body=form, key=new_key())
        view = ExecView.from_json(answer)
        return AsyncRemoteProcess(self._transport, self._at, view, large_input)

    async def context(
        self,
        language: str = "python",
        *,
        kernel: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> AsyncContext:
        """Begin an interpreter that keeps its variables; see `Sandbox.context`. It outlives this client."""
        return await open_context(self, language, kernel=kernel, cwd=cwd, env=env, id=id)

    async def run_code(
        self, code: str, *, language: str = "python", **options: Unpack[CellParts]
    ) -> Execution:
        """Run a cell in the default context of this object; see `Sandbox.run_code`."""
        from ...contexts.context import check_options

        check_options(options)
        context = await default_context(self, language)
        return await context.run(code, **options)

    async def contexts(self) -> list[str]:
        """List the ids of the contexts that run, whoever began them, oldest first."""
        page = await self._transport.json("GET", f"{self._at}/contexts")
        return [each["id"] for each in page["items"]]

    async def execs(self) -> list[ExecView]:
        """List the execs, running and ended, oldest first."""
        found, cursor = [], None
        while True:
            params = {"cursor": cursor}
            page = await self._transport.json("GET", f"{self._at}/execs", params=params)
            found += [ExecView.from_json(each) for each in page["items"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return found

    async def process(self, exec_id: str) -> AsyncRemoteProcess:
        """A process that was started before, perhaps by another client.

        Raises:
            ExecNotFound: There is none.
        """
        answer = await self._transport.json("GET", f"{self._at}/execs/{segment(exec_id)}")
        return AsyncRemoteProcess(self._transport, self._at, ExecView.from_json(answer))

    # -- describing and changing --------------------------------------------------------------

    @property
    def id(self) -> str:
        """Time-ordered, and valid as a file name."""
        return self._view.id

    @property
    def view(self) -> SandboxView:
        """All that the server says of it, now. It is asked while the caller waits."""
        if self._view.state != "terminated":  # which stays so, whoever still knows of it
            self._view = SandboxView.from_json(self._transport.blocking.json("GET", self._at))
        return self._view

    @property
    def session(self) -> Session:
        """Id, backend, state and mounts now."""
        view = self.view
        metadata = {**view.labels, "profile": view.profile, "tier": view.tier}
        return Session(view.id, view.backend, view.state, view.mounts, metadata)

    @property
    def state(self) -> State:
        """`provisioned`, `running`, `suspended` or `terminated`."""
        return self.view.state

    async def mount(self, mount: Mount | str) -> ResolvedMount:
        """Add a mount to the live sandbox; a host path is the server's."""
        body = parse_mount(mount).to_json()
        answer = await self._transport.json("POST", f"{self._at}/mounts", body=body)
        return ResolvedMount.from_json(answer)

    async def apply_network_policy(self, network: Network) -> None:
        """Change the network policy at once."""
        body = parse_network(network).to_json()
        await self._transport.json("PUT", f"{self._at}/network", body=body, repeat=True)

    async def network_log(self) -> list[NetworkEvent]:
        """List the network events so far, oldest first; bounded."""
        answer = await self._transport.json("GET", f"{self._at}/network/log")
        return [NetworkEvent.from_json(each) for each in answer["items"]]

    async def learned_policy(self) -> NetworkPolicy:
        """Build the smallest policy that allows the destinations reached so far."""
        answer = await self._transport.json("GET", f"{self._at}/network/learned")
        return NetworkPolicy.from_json(answer)

    async def connect(self, port: int) -> socket.socket:
        """A connection to a server inside, through the daemon; see `Sandbox.connect`."""
        checks.integer(port, "port", 1, 65535)
        return await blocking(connect, self._transport.blocking, self._at, port)

    async def expose(
        self, port: int, *, host: str = "127.0.0.1", host_port: int = 0, unix: str | None = None
    ) -> RemoteExposure:
        """An address of this machine that leads to a server inside; see `Sandbox.expose`."""
        checks.integer(port, "port", 1, 65535)
        if (await self._transport.json("GET", self._at))["state"] == "terminated":
            raise LifecycleError("expose: the sandbox is terminated", hint="create a new one")
        made = RemoteExposure(self._transport.blocking, self._at, port, host, host_port, unix)
        self._exposures.append(made)
        return made

    async def suspend(self) -> None:
        """Freeze every process; idempotent."""
        await self._transport.json("POST", f"{self._at}/suspend", repeat=True)

    async def resume(self) -> None:
        """Let them go on; idempotent."""
        await self._transport.json("POST", f"{self._at}/resume", repeat=True)

    async def extend(self, ttl_s: float) -> SandboxView:
        """Let it end `ttl_s` seconds from now, whenever it was to end before."""
        body = {"ttl_s": ttl_s}
        answer = await self._transport.json("POST", f"{self._at}/extend", body=body, repeat=True)
        self._view = SandboxView.from_json(answer)
        return self._view

    async def update(
        self, *, name: str | None = None, labels: Mapping[str, str | None] | None = None
    ) -> SandboxView:
        """Change its name, if one is given, and some of its labels; a label of None goes."""
        given = {"name": name, "labels": None if labels is None else dict(labels)}
        body = {key: value for key, value in given.items() if value is not None}
        answer = await self._transport.json("PATCH", self._at, body=body, repeat=True)
        self._view = SandboxView.from_json(answer)
        return self._view

    async def snapshot(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save the sandbox's files; restorable after the sandbox is gone."""
        body = {"metadata": dict(metadata or {})}
        answer = await self._transport.json(
            "POST", f"{self._at}/snapshots", body=body, timeout_s=_SAVE_S
        )
        return Snapshot.from_json(answer)

    async def changes(self, since: Snapshot | str | None = None) -> Changes:
        """List the paths that were added, changed or removed, and the text that differs.

        Mounts of the host are left out. A change of a modification time alone is none.

        Args:
            since: Snapshot, or its id, to compare with; None: a new sandbox of the same spec.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As for `Client.restore`.
            InvalidRequest: The snapshot is of another image or backend.
        """
        params = {} if since is None else {"since": str(getattr(since, "id", since))}
        answer = await self._transport.json(
            "GET", f"{self._at}/changes", params=params, timeout_s=_SAVE_S
        )
        return Changes.from_json(answer)

    @property
    def parent(self) -> str | None:
        """Id of the sandbox that this one was forked from; None: it is no fork."""
        lineage = self._view.labels.get(LINEAGE, "").split()
        return lineage[-1] if lineage else None

    async def lineage(self) -> tuple[str, ...]:
        """Return the ids of the sandboxes that this one descends from, the first one first; 16 at most."""
        return tuple(self._view.labels.get(LINEAGE, "").split())

    @property
    def fork_report(self) -> ForkReport | None:
        """Return what this fork took along; None: this object was not returned by `fork`."""
        return self._fork_report

    async def fork(
        self,
        n: int = 1,
        *,
        at: object = None,
        processes: str = "auto",
        network: Network | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> list[Self]:
        """Make `n` new sandboxes with the files that this one has now; see `Sandbox.fork`.

        Contexts and processes that go on have ids of their own in each fork: see its `fork_report`.

        Raises:
            QuotaExceeded: The owner may not have as many; none is left.
            Unsupported: `at` is given: a server keeps no marks. Or `required` processes cannot be copied.
        """
        from ...fork.branches import check_arguments  # few sandboxes need it

        if at is not None:
            raise _no_marks()
        check_arguments(n, processes)
        known = self._contexts.running() if self._contexts is not None else []
        used = [context.id for context, is_default in known if is_default]
        defaults = dict.fromkeys((*used, *self._carried))  # of a fork also those not used yet
        body: dict[str, Any] = {"n": n, "processes": processes}
        if network is not None:
            body["network"] = parse_network(network).to_json()
        if limits is not None:
            body["limits"] = Limits.taken(limits, "limits").to_json()
        for name, given in (("labels", labels), ("secrets", secrets)):
            if given is not None:
                body[name] = dict(checks.string_map(given, name))
        answer = await self._transport.json(
            "POST", f"{self._at}/fork", body=body, key=new_key(), timeout_s=_SAVE_S
        )
        report = ForkReport.from_json(answer["report"])
        made = []
        for each, own in zip(answer["items"], answer["execs"], strict=True):
            view = SandboxView.from_json(each)
            spec = self.spec.altered(id=None, labels=view.labels, network=view.network)
            if limits is not None:
                spec = spec.altered(limits=Limits.taken(limits, "limits"))
            fork = type(self)(self._transport, view, spec)
            has_others = not (report.contexts or report.processes)  # such as what execs left behind
            fork._fork_report = report.altered(
                has_processes=bool(own) or (report.has_processes and has_others),
                contexts=tuple(own[id] for id in report.contexts if id in own),
                processes=tuple(own[id] for id in report.processes if id in own),
                copies=tuple(
                    copy.altered(exec_id=own[copy.exec_id])
                    for copy in report.copies
                    if copy.exec_id in own
                ),
            )
            fork._carried = [own[id] for id in defaults if id in own]
            made.append(fork)
        return made

    async def mark(self, *, processes: str = "auto") -> Never:
        """Refuse: a server keeps no marks; see `Sandbox.mark`.

        Raises:
            Unsupported: Always.
        """
        del processes
        raise _no_marks()

    async def rewind(self, mark: object) -> Never:
        """Refuse: a server keeps no marks; see `Sandbox.rewind`.

        Args:
            mark: Anything; it is not used.

        Raises:
            Unsupported: Always.
        """
        del mark
        raise _no_marks()

    async def merge(
        self,
        into: AsyncRemoteSandbox | StrPath,
        *,
        base: Snapshot | str,
        path: StrPath = ".",
        prefer: str | None = None,
        dry_run: bool = False,
    ) -> Merged:
        """Merge what has changed in a directory since a snapshot; see `Sandbox.merge`.

        Args:
            into: Another sandbox of the same server, or a directory of this machine.
        """
        from ...fork import merging  # few sandboxes need it

        directory = merging.check(path, prefer)
        base_id = str(getattr(base, "id", base))
        if isinstance(into, str) or hasattr(into, "__fspath__"):
            before = partial(pack_snapshot, self._transport.blocking, base_id, directory)
            theirs = partial(pack_tree, self._transport.blocking, f"{self._at}/files", directory)
            merge = partial(merging.into_host, prefer=prefer, dry_run=dry_run)
            sides = partial(merging.whole, before, theirs)
            return await blocking(merge, sides, str(into), self.spec, directory)
        if not hasattr(into, "id"):
            raise InvalidRequest("must be a sandbox or a directory of this host", field="into")
        body = {"into": into.id, "base": base_id, "path": directory, "dry_run": dry_run}
        if prefer is not None:
            body["prefer"] = prefer
        answer = await self._transport.json(
            "POST", f"{self._at}/merge", body=body, timeout_s=_SAVE_S
        )
        return Merged.from_json(answer)

    async def checkpoint(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save files and memory, and end: `Client.restore` lets all that ran go on.

        Raises:
            Unsupported: Its backend saves files only; it goes on.
            LifecycleError: Something inside holds what cannot be saved; it goes on.
        """
        body = {"metadata": dict(metadata or {})}
        answer = await self._transport.json(
            "POST", f"{self._at}/checkpoint", body=body, timeout_s=_SAVE_S
        )
        return Snapshot.from_json(answer)

    async def stats(self) -> SandboxStats:
        """Return the current resource usage, read from the kernel."""
        return SandboxStats.from_json(await self._transport.json("GET", f"{self._at}/stats"))

    async def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do."""
        answer = await self._transport.json("GET", f"{self._at}/capabilities")
        return SandboxCapabilities.from_json(answer)

    async def protections(self) -> tuple[Protection, ...]:
        """Read back from the kernel the protections of the host."""
        answer = await self._transport.json("GET", f"{self._at}/protections")
        return tuple(Protection.from_json(each) for each in answer["items"])

    async def terminate(self) -> None:
        """End it. Legal in every state, idempotent."""
        while self._exposures:
            self._exposures.pop().close()
        if self._view.state != "terminated":
            self._view = SandboxView.from_json(await self._transport.json("DELETE", self._at))
        await self._let_go()

    async def _let_go(self) -> None:
        if self.owns_transport:
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.terminate()

    if not TYPE_CHECKING:  # for checkers a wrong name is an error

        def __setattr__(self, name: str, value: object) -> None:
            if name[0] != "_" and name not in self.__dict__:
                from ...model.calls import check_assignment

                check_assignment(self, name)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at {self._transport.address.shown}>"


def body_of(spec: SandboxSpec, **others: Any) -> dict[str, Any]:
    """Build the body of a create request, secrets included."""
    if spec.python_env:
        raise InvalidRequest("the server cannot show this machine's Python", field="python_env")
    return {**spec.to_json(with_secrets=True), **{k: v for k, v in others.items() if v is not None}}


def new_key() -> str:
    """Make an idempotency key: a request with one is safe to repeat."""
    return f"{os.getpid():x}-{uuid.uuid4().hex}"


def _no_marks() -> Unsupported:
    return Unsupported(
        "a server keeps no marks",
        operation="mark",
        hint="snapshot() saves the files; in this process, Sandbox has marks",
    )
