"""AutoGen: a code executor for `CodeExecutorAgent` and `PythonCodeExecutionTool`.

Source: autogen_core.code_executor (0.7).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from autogen_core import Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel

from . import outcome
from .origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from autogen_core import CancellationToken

    from ..model.exec import ExecResult
    from ..sandbox import AsyncSandbox, Sandbox

OUTPUT_BYTES = 1 << 20
_PROGRAMS = {
    "python": ("python3", "-c"),
    "py": ("python3", "-c"),
    "bash": ("bash", "-c"),
    "shell": ("sh", "-c"),
    "sh": ("sh", "-c"),
}


class RingfenceExecutorConfig(BaseModel):
    """What a component is saved as."""

    timeout_s: float = 60.0
    server: str | None = None
    options: dict[str, Any] = {}


class RingfenceCodeExecutor(CodeExecutor, Component[RingfenceExecutorConfig]):
    """Blocks of Python and shell, one after the other in one sandbox, whose files stay.

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
        for block in code_blocks:
            program = _PROGRAMS.get(block.language.lower())
            if program is None:
                raise ValueError(f"no language {block.language!r}; one of {', '.join(_PROGRAMS)}")
            task = asyncio.ensure_future(self._run([*program, block.code]))
            cancellation_token.link_future(task)
            result = await task
            note = outcome.notes(result)
            output += result.stdout_text + result.stderr_text + note
            code = outcome.exit_code(result)
            if code != 0:
                break
        return CodeResult(exit_code=code, output=output)

    async def _run(self, argv: list[str]) -> ExecResult:
        assert self._sandbox is not None
        return await self._sandbox.exec(
            argv, timeout_s=self._timeout_s, max_output_bytes=OUTPUT_BYTES
        )

    def _to_config(self) -> RingfenceExecutorConfig:
        options = dict(self._origin.options)
        return RingfenceExecutorConfig(
            timeout_s=self._timeout_s, server=self._origin.server, options=options
        )

    @classmethod
    def _from_config(cls, config: RingfenceExecutorConfig) -> RingfenceCodeExecutor:
        return cls(timeout_s=config.timeout_s, server=config.server, **config.options)
