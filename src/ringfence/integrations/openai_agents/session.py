"""A sandbox as a session of the framework: commands, files, ports, and the workspace as a tar.

Source: agents.sandbox.session.base_sandbox_session (0.24).
"""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER
from agents.sandbox.types import ExecResult, ExposedPortEndpoint

from ...errors import FileNotFound, NotADirectory, RingfenceError
from ...model.execs.exec import KILLED_BY_TERMINATE
from .. import outcome
from . import workspace
from .processes import Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agents.sandbox.session.pty_types import PtyExecUpdate
    from agents.sandbox.session.runtime_helpers import RuntimeHelperScript
    from agents.sandbox.types import User

    from ...sandbox import AsyncSandbox

OUTPUT_BYTES = 16 << 20


class RingfenceSandboxSessionState(SandboxSessionState):
    """State that a session is resumed from. The sandbox may be gone by then; its snapshot is not.

    Attributes:
        create: Keyword arguments of `Sandbox.create`.
    """

    type: Literal["ringfence"] = "ringfence"
    sandbox_id: str
    server: str | None = None
    create: dict[str, Any] = {}  # noqa: RUF012  pydantic copies defaults


class RingfenceSandboxSession(BaseSandboxSession):
    """A live sandbox; the manifest's root in it is a directory of its own."""

    state: RingfenceSandboxSessionState

    def __init__(self, state: RingfenceSandboxSessionState, sandbox: AsyncSandbox) -> None:
        self.state = state
        self.sandbox = sandbox
        self._processes = Processes()
        self._endpoints: dict[int, ExposedPortEndpoint] = {}

    # -- commands -------------------------------------------------------------------------------

    async def _exec_internal(
        self, *command: str | Path, timeout: float | None = None
    ) -> ExecResult:
        argv, options = await self._prepared(command)
        try:
            result = await self.sandbox.exec(
                argv,
                timeout_s=timeout if timeout is None or timeout > 0 else 0.001,
                max_output_bytes=OUTPUT_BYTES,
                **options,
            )
        except RingfenceError as exc:
            raise ExecTransportError(command=command, cause=exc, message=str(exc)) from exc
        if result.timed_out:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        if result.killed_by == KILLED_BY_TERMINATE:
            raise ExecTransportError(command=command, message="the sandbox was terminated")
        note = (
            f"\n[{result.stdout_dropped_bytes} bytes dropped]".encode() if result.truncated else b""
        )
        code = outcome.exit_code(result)
        return ExecResult(stdout=result.stdout + note, stderr=result.stderr, exit_code=code)

    async def _prepared(self, command: Sequence[str | Path]) -> tuple[list[str], dict[str, Any]]:
        """The framework says who by a prefix, and where by the manifest."""
        argv, user = [str(part) for part in command], None
        if len(argv) > 4 and argv[:2] == ["sudo", "-u"] and argv[3] == "--":
            user, argv = argv[2], argv[4:]
        env = await self.state.manifest.environment.resolve()
        return argv, {"user": user, "env": env, "cwd": self.state.manifest.root}

    def supports_pty(self) -> bool:
        """Terminals, and processes whose output is read while they run."""
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a process and return what it says at first."""
        argv, options = await self._prepared(
            self._prepare_exec_command(*command, shell=shell, user=user)
        )
        try:
            process = await self.sandbox.start(
                argv, timeout_s=timeout, pty=(24, 80) if tty else None, **options
            )
        except RingfenceError as exc:
            raise ExecTransportError(command=command, cause=exc, message=str(exc)) from exc
        return await self._processes.begin(process, tty, yield_time_s, max_output_tokens)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Type, and return what it says then."""
        entry = self._resolve_pty_session_entry(
            pty_processes=self._processes.entries, session_id=session_id
        )
        return await self._processes.write(
            session_id, entry, chars, yield_time_s, max_output_tokens
        )

    async def pty_terminate_all(self) -> None:
        """Kill every process that was started so."""
        await self._processes.end_all()

    # -- files ----------------------------------------------------------------------------------

    def _runtime_helpers(self) -> Any:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object:
        return self.state.sandbox_id

    async def _ensure_runtime_helper_installed(self, helper: RuntimeHelperScript) -> PurePath:
        """As the framework does it, whose script has its path below /tmp in its text.

        Without a mount namespace the sandbox's /tmp lies elsewhere: only whole arguments are mapped.
        """
        path = helper.install_path.as_posix()
        try:
            if not await self.sandbox.files.exists(path):
                content = helper.content.encode()
                await self.sandbox.files.write(path, content, mode=0o555, parents=True)
        except RingfenceError as exc:
            raise ExecTransportError(command=(path,), cause=exc, message=str(exc)) from exc
        return helper.install_path

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """A file of the workspace."""
        return io.BytesIO(await self._read(path, user, None))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._read(path, None, max_bytes)

    async def _read(self, path: Path, user: str | User | None, most: int | None) -> bytes:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        where = await self._validate_path_access(path)
        try:
            data: bytes = await self.sandbox.files.read(where.as_posix(), max_bytes=most)
        except (FileNotFound, NotADirectory) as exc:
            raise WorkspaceReadNotFoundError(path=path, cause=exc) from exc
        except RingfenceError as exc:
            raise WorkspaceArchiveReadError(path=path, cause=exc) from exc
        return data

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file of the workspace, with its directories."""
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        payload = _bytes_of(path, data)
        where = await self._validate_path_access(path, for_write=True)
        try:
            await self.sandbox.files.write(where.as_posix(), payload, parents=True)
        except RingfenceError as exc:
            raise WorkspaceArchiveWriteError(path=where, cause=exc) from exc

    # -- life -----------------------------------------------------------------------------------

    async def _prepare_backend_workspace(self) -> None:
        root = self.state.manifest.root
        try:
            await self.sandbox.files.make_dir(root)
        except RingfenceError as exc:
            raise WorkspaceStartError(path=self._workspace_root_path(), cause=exc) from exc

    async def running(self) -> bool:
        """Return whether commands can run."""
        return self.sandbox.state == "running"

    async def _shutdown_backend(self) -> None:
        await self.sandbox.terminate()

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if port not in self._endpoints:
            try:
                exposure = await self.sandbox.expose(port)
            except RingfenceError as exc:
                raise ExposedPortUnavailableError(
                    port=port,
                    exposed_ports=self.state.exposed_ports,
                    reason="backend_unavailable",
                    cause=exc,
                ) from exc
            address: Any = exposure.address  # a pair, as no unix socket was asked for
            self._endpoints[port] = ExposedPortEndpoint(host=address[0], port=address[1])
        return self._endpoints[port]

    async def persist_workspace(self) -> io.IOBase:
        """The workspace as a tar, without what the manifest calls ephemeral or is mounted there."""
        root = self._workspace_root_path()
        skip = self._persist_workspace_skip_relpaths() | self._from_outside()
        if Path() in skip:
            return io.BytesIO(workspace.empty_tar())
        # By way of a file: a result holds only so much output.
        archive = f"/tmp/workspace-{self.state.session_id.hex}.tar"
        argv = ["sh", "-c", workspace.packing(skip), root.as_posix(), archive]
        try:
            result = await self.sandbox.exec(argv)
            if not result.ok:
                context = {"exit_code": result.exit_code, "stderr": result.stderr_text[-2000:]}
                raise WorkspaceArchiveReadError(path=root, context=context)
            data: bytes = await self.sandbox.files.read(archive)
            await self.sandbox.files.remove(archive)
        except RingfenceError as exc:
            raise WorkspaceArchiveReadError(path=root, cause=exc) from exc
        return io.BytesIO(data)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack such a tar; one that leads out of the workspace is refused."""
        root = self._workspace_root_path()
        payload = _bytes_of(root, data)
        workspace.check_tar(root, payload)
        try:
            await self.sandbox.files.make_dir(root.as_posix())
            argv = ["tar", "-C", root.as_posix(), "--no-same-owner", "-xf", "-"]
            result = await self.sandbox.exec(argv, stdin=payload)
        except RingfenceError as exc:
            raise WorkspaceArchiveWriteError(path=root, cause=exc) from exc
        if not result.ok:
            context = {"exit_code": result.exit_code, "stderr": result.stderr_text[-2000:]}
            raise WorkspaceArchiveWriteError(path=root, context=context)

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        """As the framework has it, but a snapshot that is refused leaves the files that are there."""
        root = self._workspace_root_path()
        archive = await self.state.snapshot.restore(dependencies=self.dependencies)
        with closing(archive):
            payload = _bytes_of(root, archive)
        workspace.check_tar(root, payload)
        await self._clear_workspace_root_on_resume()
        await self.hydrate_workspace(io.BytesIO(payload))

    def _workspace_resume_mount_skip_relpaths(self) -> set[Path]:
        return super()._workspace_resume_mount_skip_relpaths() | self._from_outside()

    def _from_outside(self) -> set[Path]:
        state = self.state
        mounts = workspace.mounts_of(state.create, state.server, state.manifest)
        return workspace.from_outside(mounts, state.manifest.root)


def _bytes_of(path: Path, data: io.IOBase) -> bytes:
    payload: object = data.read()
    if isinstance(payload, str):
        return payload.encode()
    if not isinstance(payload, bytes | bytearray):
        raise WorkspaceWriteTypeError(path=path, actual_type=type(payload).__name__)
    return bytes(payload)
