"""Inspect: `sandbox="ringfence"` in a task gives every sample a sandbox.

    Task(..., sandbox="ringfence")
    Task(..., sandbox=("ringfence", "sandbox.toml"))
    Task(..., sandbox=SandboxEnvironmentSpec("ringfence", RingfenceConfig(network="none")))

Source: inspect_ai.util._sandbox.environment (0.3.285).
"""

from __future__ import annotations

import json
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel

from ..errors import InvalidRequest, Unsupported
from ..model.execs.exec import KILLED_BY_TERMINATE
from ..sandbox import AsyncSandbox
from . import outcome
from .origin import Origin
from .oserrors import GONE, as_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..model.execs.exec import ExecResult as Result


class RingfenceConfig(BaseModel, extra="allow", frozen=True):
    """Keyword arguments of `Sandbox.create`, and the server where not here; a file has the same."""

    server: str | None = None

    def __init__(self, *, server: str | None = None, **options: Any) -> None:
        super().__init__(server=server, **options)

    @classmethod
    def read(cls, path: str) -> RingfenceConfig:
        """From a file named `*.toml` or `*.json`."""
        text = Path(path).read_text(encoding="utf-8")
        return cls(**(tomllib.loads(text) if path.endswith(".toml") else json.loads(text)))

    def origin(self) -> Origin:
        """The origin of the sandboxes."""
        return Origin(self.model_extra or {}, self.server)


@sandboxenv(name="ringfence")
class RingfenceEnvironment(SandboxEnvironment):
    """Sandbox of a sample."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """A sandbox of its own for each sample."""
        del task_name, metadata
        if isinstance(config, str):
            config = RingfenceConfig.read(config)
        if config is not None and not isinstance(config, RingfenceConfig):
            raise TypeError(f"sandbox configuration must be a RingfenceConfig, not {type(config)}")
        made = await (config or RingfenceConfig()).origin().async_sandbox()
        return {"default": cls(made)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End them, whether or not the sample was interrupted."""
        del task_name, config, interrupted
        for environment in environments.values():
            await environment.as_type(cls).sandbox.terminate()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Nothing is left over: sandboxes end with the process that made them, even when it is killed."""

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """From a log file."""
        return RingfenceConfig(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; PATH lookup is the sandbox's, and nothing is put before `cmd`."""
        del timeout_retry, concurrency  # a timeout here is the command's own; nothing to throttle
        with _available(user):
            result = await self.sandbox.exec(
                cmd,
                stdin=input,
                cwd=cwd,
                env=env,
                user=user,
                timeout_s=timeout,
                max_output_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        return _checked(cmd, result)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with its directories."""
        with _available(), as_os_errors(file):
            await self.sandbox.files.write(file, contents, parents=True)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file, newlines as they are."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _available(), as_os_errors(file):
            data: bytes = await self.sandbox.files.read(file, max_bytes=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def default_polling_interval(self) -> float:
        """An exec costs milliseconds here."""
        return 0.2


def _checked(cmd: list[str], result: Result) -> ExecResult[str]:
    """The result in Inspect's words.

    Raises:
        TimeoutError, PermissionError, OutputLimitExceededError, SandboxUnavailableError: As they say.
    """
    out, err = result.stdout_text, result.stderr_text
    if result.killed_by == KILLED_BY_TERMINATE:
        raise SandboxUnavailableError("the sandbox was terminated while the command ran")
    if result.timed_out:
        raise TimeoutError(f"{cmd[0]} timed out after {result.duration_s:.1f} s")
    if result.truncated:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, out + err)
    code = outcome.exit_code(result)
    if code == outcome.NOT_EXECUTABLE and err.startswith(f"ringfence: {cmd[0]}: "):
        raise PermissionError(err.removeprefix("ringfence: ").strip())
    return ExecResult(code == 0, code, out, err)


@contextmanager
def _available(user: str | None = None) -> Iterator[None]:
    try:
        yield
    except GONE as exc:
        raise SandboxUnavailableError(str(exc)) from exc
    except (InvalidRequest, Unsupported) as exc:
        if user is None or exc.field != "user":
            raise
        raise SandboxUserUnsupportedError(str(exc)) from exc
