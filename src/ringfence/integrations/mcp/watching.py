"""Waiting for a process on a client's behalf: with progress, and without waiting for ever."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from ...errors import ResourceExhausted, RingfenceError
from .. import outcome
from .results import ProcessAnswer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from mcp.server.mcpserver import Context

    from ...sandbox.aio_process import AsyncProcess, AsyncStream
    from .sandboxes import Held

_EVERY_S = 2.0
_NEWS_BYTES = 128 << 10
MOST_PROCESSES = 32


@asynccontextmanager
async def progress(ctx: Context[Any, Any], what: str, last: list[str]) -> AsyncIterator[None]:
    """Tell the client every two seconds that `what` still runs, and the last line that it wrote.

    An error inside comes out as it is: a task group would wrap it.
    """
    began = time.monotonic()
    failure: Exception | None = None

    async def tell() -> None:
        while True:
            await anyio.sleep(_EVERY_S)
            elapsed = time.monotonic() - began
            line = last[0] if last else ""
            await ctx.report_progress(elapsed, None, f"{what}: {line}" if line else what)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        try:
            yield
        except Exception as exc:  # noqa: BLE001  raised below
            failure = exc
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def jailer_of(last: list[str]) -> Any:
    """A callback that keeps the last line of the output in `last`."""

    def keep(data: bytes) -> None:
        lines = data.decode("utf-8", "replace").strip().rsplit("\n", 1)
        if lines[-1]:
            last[:] = [lines[-1][:200]]

    return keep


def remember(held: Held, process: AsyncProcess) -> str:
    """Give a process a name that a model can copy.

    Raises:
        ResourceExhausted: Too many run already.
    """
    ended = [name for name, each in held.processes.items() if not each.running]
    if len(held.processes) - len(ended) >= MOST_PROCESSES:
        raise ResourceExhausted(f"{MOST_PROCESSES} processes run already", hint="stop one first")
    name = f"p{1 + max((int(name[1:]) for name in held.processes), default=0)}"
    held.processes[name] = process
    return name


async def look(held: Held, name: str, wait_s: float) -> ProcessAnswer:
    """Wait until a process writes or ends; return its output since the last look.

    Raises:
        RingfenceError: No process has that name.
    """
    process = held.processes.get(name)
    if process is None:
        names = ", ".join(held.processes) or "none"
        raise RingfenceError(f"no process {name!r}", hint=f"there are {names}")
    out = await _news(process.stdout, wait_s if process.running else 0.0)
    err = await _news(process.stderr, 0.0)
    if process.running:
        return ProcessAnswer(sandbox=held.name, process=name, running=True, stdout=out, stderr=err)
    result = await process.wait()
    return ProcessAnswer(
        sandbox=held.name,
        process=name,
        running=False,
        stdout=out + await _news(process.stdout, 0.0),  # output between the look and the end
        stderr=err + await _news(process.stderr, 0.0),
        exit_code=outcome.exit_code(result),
    )


async def _news(stream: AsyncStream, wait_s: float) -> str:
    """All that there is, once there is something; a server's comes in pieces."""
    found = bytearray()
    try:
        while len(found) < _NEWS_BYTES and (piece := await stream.read(0 if found else wait_s)):
            found += piece
    except TimeoutError:
        pass
    return found.decode("utf-8", "replace")
