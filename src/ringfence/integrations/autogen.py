"""AutoGen: a code executor for `CodeExecutorAgent` and `PythonCodeExecutionTool`.

Source: autogen_core.code_executor (0.7).
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autogen_core import Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel

from ..errors import FileError
from . import outcome
from .origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from autogen_core import CancellationToken

    from ..model.execs.exec import ExecResult
    from ..sandbox import AsyncSandbox, Sandbox

OUTPUT_BYTES = 1 << 20
_LANGUAGES = {
    "python": ("python3", "py"),
    "py": ("python3", "py"),
    "bash": ("bash", "sh"),
    "shell": ("sh", "sh"),
    "sh": ("sh", "sh"),
}
_NAMED = "# filename:"


@dataclass
class RingfenceCodeResult(CodeResult):
    """How the last block ended.

    Attributes:
        code_file: Where the first block is in the sandbox; None where none was written.
    """

    code_file: str | None = None


class RingfenceExecutorConfig(BaseModel):
    """Saved form of a component."""

    timeout_s: float = 60.0
    server: str | None = None
    options: dict[str, Any] = {}


class RingfenceCodeExecutor(CodeExecutor, Component[RingfenceExecutorConfig]):
    """Blocks of Python and shell, one after the other in one sandbox, whose files stay.

    As in AutoGen's own executors each block is a file of the working directory. Its first line may
    name it: `# filename: NAME`.

    Args:
        timeout_s: Of each block; then everything that it started is killed.
        server, make, options: See `Origin`.
    """

    component_config_schema = RingfenceExecutorConfig
    component_provider_override = "ringfence.integrations.autogen.RingfenceCodeExecutor"

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        server: str | None = None,
        make: Callable[[], Sandbox] | None = None,
        **options: Any,
    ) -> None:
        self._origin, self._timeout_s = Origin(options, server, make), timeout_s
        self._sandbox: AsyncSandbox | None = None

    async def start(self) -> None:
        """Make the sandbox, if there is none."""
        if self._sandbox is None:
            self._sandbox = await self._origin.async_sandbox()

    async def stop(self) -> None:
        """End it."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.terminate()

    async def restart(self) -> None:
        """A fresh one."""
        await self.stop()
        await self.start()

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        """Run the blocks until one fails."""
        await self.start()
        output, code = "", 0
        first_file: str | None = None
        for block in code_blocks:
            if block.language.lower() not in _LANGUAGES:
                known = ", ".join(_LANGUAGES)
                raise ValueError(f"no language {block.language!r}; one of {known}")
            task = asyncio.ensure_future(self._run(block))
            cancellation_token.link_future(task)
            file, result = await task
            first_file = first_file or file
            if result is None:
                return RingfenceCodeResult(1, "Filename is not in the workspace", first_file)
            late = "Timeout: " if result.timed_out else ""  # the word of AutoGen's own executors
            output += f"{result.stdout_text}{result.stderr_text}{late}{outcome.notes(result)}"
            code = outcome.exit_code(result)
            if code != 0:
                break
        return RingfenceCodeResult(code, output, first_file)

    async def _run(self, block: CodeBlock) -> tuple[str | None, ExecResult | None]:
        """The file that was written, and how it ended; no result where it may not be written there."""
        assert self._sandbox is not None
        program, suffix = _LANGUAGES[block.language.lower()]
        name = _file_name(block.code, suffix)
        if name is None:
            return None, None
        try:
            await self._sandbox.files.write(name, block.code, parents=True)
        except FileError:
            if _is_named(block.code):
                raise
            name = f"/tmp/{name}"  # the working directory is read-only
            await self._sandbox.files.write(name, block.code)
        return name, await self._sandbox.exec(
            [program, name], timeout_s=self._timeout_s, max_output_bytes=OUTPUT_BYTES
        )

    def _to_config(self) -> RingfenceExecutorConfig:
        options = dict(self._origin.options)
        return RingfenceExecutorConfig(
            timeout_s=self._timeout_s, server=self._origin.server, options=options
        )

    @classmethod
    def _from_config(cls, config: RingfenceExecutorConfig) -> RingfenceCodeExecutor:
        return cls(timeout_s=config.timeout_s, server=config.server, **config.options)


def _is_named(code: str) -> bool:
    return code.startswith(_NAMED)


def _file_name(code: str, suffix: str) -> str | None:
    """Choose a file name: the first line's, else one by content; None if outside the working directory."""
    if not _is_named(code):
        return f"tmp_code_{hashlib.sha256(code.encode()).hexdigest()[:32]}.{suffix}"
    name = posixpath.normpath(code.partition("\n")[0].removeprefix(_NAMED).strip() or "..")
    return None if name == "." or name.startswith(("/", "../", "-")) or name == ".." else name
