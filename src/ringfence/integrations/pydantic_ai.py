"""Pydantic AI: a workspace whose commands and files are a sandbox's.

    from pydantic_ai import Agent
    from ringfence.integrations.pydantic_ai import RingfenceWorkspace

    workspace = RingfenceWorkspace(network="none")
    result = await agent.run("...", workspace=workspace)
    await workspace.terminate()

Source: pydantic_ai.workspaces.protocol (2.68).
"""

from __future__ import annotations

import math
import posixpath
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from ..errors import FileError, InvalidRequest
from ..model.execs.exec import KILLED_BY_TERMINATE
from ..model.files import DIRECTORY, FILE, SYMLINK
from . import outcome
from .origin import Origin
from .oserrors import GONE, as_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..model.execs.exec import ExecResult
    from ..model.files import FileInfo
    from ..sandbox import AsyncSandbox, Sandbox

PROVIDER = "ringfence"
OUTPUT_BYTES = 16 << 20


class RingfenceWorkspace:
    """A `WorkspaceBackend` with commands, a native file system and realpath.

    The sandbox is made by the first operation and lives until `terminate()`, or until this process
    ends: a workspace built anew from its `ref` finds it.

    Args:
        ref: Of the sandbox to attach to; None makes one.
        server, make, options: See `Origin`.
        output_bytes: Of each stream; a command that writes more fails, and says so.
    """

    def __init__(
        self,
        ref: WorkspaceRef | None = None,
        *,
        server: str | None = None,
        make: Callable[[], Sandbox] | None = None,
        output_bytes: int = OUTPUT_BYTES,
        **options: Any,
    ) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"a workspace of {ref.provider!r} is not a Ringfence workspace")
        self._ref = ref
        self._origin = Origin(options, server, make)
        self._output_bytes = output_bytes
        self._first_use = anyio.Lock()
        self._sandbox: AsyncSandbox | None = None
        self._working_dir = ""

    @property
    def ref(self) -> WorkspaceRef | None:
        """The sandbox's id, once there is one."""
        return self._ref

    async def working_dir(self) -> str:
        """Where commands start, symlinks resolved."""
        await self._live()
        return self._working_dir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command to its end; on timeout or cancellation its whole tree is killed."""
        argv = _argv(command, shell)
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout must be a positive finite number or None")
        sandbox = await self._live()
        with _unavailable():
            result = await sandbox.exec(
                argv,
                cwd=self._working_dir,
                env=env,
                timeout_s=timeout,
                max_output_bytes=self._output_bytes,
            )
        return self._result(result, timeout)

    def _result(self, result: ExecResult, timeout: float | None) -> CommandResult:
        out, err = result.stdout_text, result.stderr_text
        if result.killed_by == KILLED_BY_TERMINATE:
            raise WorkspaceUnavailableError("the sandbox was terminated while the command ran")
        if result.timed_out:
            text = f"command timed out after {timeout or result.duration_s:g}s"
            raise WorkspaceTimeoutError(text, stdout=out, stderr=err)
        if result.truncated:
            raise WorkspaceOutputLimitError(
                f"the command wrote more than {self._output_bytes} bytes",
                limit=self._output_bytes,
                stdout=out,
                stderr=err,
            )
        return CommandResult(exit_code=outcome.exit_code(result), stdout=out, stderr=err)

    # -- files: absolute paths ----------------------------------------------------------------

    async def read_bytes(self, path: str) -> bytes:
        """The whole file."""
        sandbox = await self._live()
        with _failing(path):
            return await sandbox.files.read(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, with its directories; a symlink is written through."""
        sandbox = await self._live()
        with _failing(path):
            await sandbox.files.write(path, data, parents=True)

    async def stat(self, path: str) -> FileEntry:
        """Stat a path, symlinks followed."""
        sandbox = await self._live()
        with _failing(path):
            info = await sandbox.files.stat(path, follow=True)
        return _entry(path, info)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """The entries of a directory, by name; where their symlinks lead nowhere, the symlinks."""
        sandbox = await self._live()
        with _failing(path):
            entries = await sandbox.files.list(path)
        found = []
        for info in entries:
            target = info
            if info.kind == SYMLINK:
                try:
                    target = await sandbox.files.stat(info.path, follow=True)
                except FileError:
                    pass
            found.append(_entry(posixpath.join(path, info.name), target))
        return found

    async def make_dir(self, path: str) -> None:
        """A directory, with those above it."""
        sandbox = await self._live()
        with _failing(path):
            await sandbox.files.make_dir(path)

    async def remove(self, path: str) -> None:
        """Remove a file, a symlink itself, or a tree; never what holds the working directory."""
        sandbox = await self._live()
        parent, name = posixpath.split(posixpath.normpath(path))
        target = posixpath.join(await self.realpath(parent), name)
        if f"{self._working_dir}/".startswith(f"{target.rstrip('/')}/"):
            raise ValueError("cannot remove the working directory or a parent of it")
        with _failing(path):
            await sandbox.files.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        """Return whether the path exists, symlinks followed."""
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def realpath(self, path: str) -> str:
        """Where symlinks lead; what is missing stays as it is written."""
        result = await self.run(["realpath", "-m", "--", path])
        if result.exit_code != 0:
            raise OSError(result.stderr.strip())
        return result.stdout.removesuffix("\n")

    # -- the sandbox --------------------------------------------------------------------------

    async def terminate(self) -> None:
        """End the sandbox. The framework never does: whoever holds the workspace or its ref does."""
        if self._sandbox is None and self._ref is not None:
            try:
                self._sandbox = await self._origin.async_find(self._ref.id)
            except GONE:
                return
        if self._sandbox is not None:
            await self._sandbox.terminate()

    async def _live(self) -> AsyncSandbox:
        """The sandbox; the first caller makes it, and others wait for the same."""
        async with self._first_use:
            if self._sandbox is None:
                with _unavailable():
                    self._sandbox = await self._begin()
            if self._sandbox.state == "terminated":
                raise WorkspaceUnavailableError(f"sandbox {self._sandbox.id} was terminated")
            return self._sandbox

    async def _begin(self) -> AsyncSandbox:
        if self._ref is not None:
            sandbox = await self._origin.async_find(self._ref.id)
        else:
            sandbox = await self._origin.async_lasting()
        self._ref = WorkspaceRef(provider=PROVIDER, id=sandbox.id)
        self._working_dir = (await sandbox.exec(["pwd", "-P"])).stdout_text.removesuffix("\n")
        return sandbox


def _argv(command: str | Sequence[str], shell: bool) -> Sequence[str]:
    if isinstance(command, str) is not shell:
        raise TypeError("a string needs shell=True, a sequence of arguments shell=False")
    return outcome.shell_argv(command) if isinstance(command, str) else command


def _entry(path: str, info: FileInfo) -> FileEntry:
    size = info.size_bytes if info.kind == FILE else None
    name = posixpath.basename(path.rstrip("/"))
    return FileEntry(name=name, path=path, is_dir=info.kind == DIRECTORY, size=size)


@contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except GONE as exc:
        raise WorkspaceUnavailableError(str(exc)) from exc


@contextmanager
def _failing(path: str) -> Iterator[None]:
    try:
        with _unavailable(), as_os_errors(path):
            yield
    except InvalidRequest as exc:
        raise ValueError(str(exc)) from exc
