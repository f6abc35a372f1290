"""Which sandbox serves a call: the connection's own, or one that the call names.

Over stdio there is one client, and one sandbox. Over HTTP a client with a session has a sandbox that
ends with it. Protocol 2026-07-28 knows no sessions: a first call there gets a sandbox and its name,
which nobody can guess, and later calls bring the name along.
"""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...errors import RingfenceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from mcp.server.mcpserver import Context

    from ...sandbox import AsyncSandbox
    from ...sandbox.aio_process import AsyncProcess
    from ..origin import Origin

MOST = 64
IDLE_S = 30 * 60.0
_KEY = "ringfence"


@dataclass(eq=False)
class Held:
    """A client's sandbox and its background processes; `name` is empty where calls need none."""

    name: str = ""
    sandbox: AsyncSandbox | None = None
    processes: dict[str, AsyncProcess] = field(default_factory=dict)
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    used: float = field(default_factory=time.monotonic)
    calls: int = 0

    async def live(self, origin: Origin) -> AsyncSandbox:
        """The sandbox; made by the first call, and anew after it was lost."""
        async with self.lock:
            if self.sandbox is None or self.sandbox.state == "terminated":
                self.processes.clear()
                self.sandbox = await origin.async_sandbox()
            return self.sandbox

    async def end(self) -> None:
        """End it with everything in it; the next call gets a fresh one."""
        async with self.lock:
            sandbox, self.sandbox = self.sandbox, None
            self.processes.clear()
        if sandbox is not None:
            await sandbox.terminate()


class Sandboxes:
    """All sandboxes of one server.

    Args:
        shared: One for every call: the server has one client.
        most: Sandboxes without a session that may live at once.
        idle_s: How long one of those may go unused.
    """

    def __init__(
        self, origin: Origin, *, shared: bool, most: int = MOST, idle_s: float = IDLE_S
    ) -> None:
        self.origin = origin
        self._only = Held() if shared else None
        self._most, self._idle_s = most, idle_s
        self._named: dict[str, Held] = {}

    @property
    def are_one(self) -> bool:
        """True if all calls use the same sandbox, and none names it."""
        return self._only is not None

    @asynccontextmanager
    async def serving(self, ctx: Context[Any, Any], name: str) -> AsyncIterator[Held]:
        """The sandbox of this call, live; what goes wrong with it is told to the model.

        Raises:
            ToolError: With the reason and the hint.
        """
        try:
            held = await self._held(ctx, name)
            held.calls += 1
            try:
                await held.live(self.origin)
                yield held
            except BaseException:
                if held.name and not name:
                    # A failing first call answers no name: nobody could ever use it.
                    with anyio.CancelScope(shield=True):
                        await self.reset(held)
                raise
            finally:
                held.calls -= 1
                held.used = time.monotonic()
        except RingfenceError as exc:
            raise ToolError(str(exc)) from exc

    async def _held(self, ctx: Context[Any, Any], name: str) -> Held:
        if self._only is not None:
            return self._only
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return await self._by_name(name)
        # The SDK keeps state and clean-up per connection, and shows them to its own code only.
        if name:
            raise ToolError("this session has one sandbox: leave `sandbox` empty")
        connection = ctx.session._connection
        if _KEY not in connection.state:
            connection.state[_KEY] = Held()
            connection.exit_stack.push_async_callback(connection.state[_KEY].end)
        held: Held = connection.state[_KEY]
        return held

    async def _by_name(self, name: str) -> Held:
        await self._end_idle()
        if name:
            if name not in self._named:
                raise ToolError(
                    f"no sandbox {name!r}: it has ended; leave `sandbox` empty for a new one"
                )
            return self._named[name]
        if len(self._named) >= self._most:
            raise ToolError(f"{self._most} sandboxes live already; use `reset` where one is done")
        held = Held(secrets.token_urlsafe(18))
        self._named[held.name] = held
        return held

    async def _end_idle(self) -> None:
        now = time.monotonic()
        for name, held in list(self._named.items()):
            if not held.calls and now - held.used > self._idle_s:
                del self._named[name]
                await held.end()

    async def reset(self, held: Held) -> None:
        """End a sandbox on its client's word."""
        self._named.pop(held.name, None)
        await held.end()

    async def close(self) -> None:
        """End all that no connection ends."""
        for held in [*self._named.values(), *([self._only] if self._only else [])]:
            await held.end()
        self._named.clear()
