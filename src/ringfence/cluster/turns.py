"""Turns of creates: of one name at a gateway, of one bounded client at all gateways together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time

from .nodes import GATEWAY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Any

    from ..api.access.caller import Caller
    from .directory import Directory
    from .nodes import Nodes

_POLL_S = 0.02
_DEAD_S = 5.0
"""Without a beat: a gateway has left its turn behind."""
_DIGITS = 12


class Turns:
    """Creates that take turns; without a name and a bound, none waits. Of one event loop.

    A bounded client is counted on all nodes before each of its creates: two creates at two gateways
    would both find room for the last one. A turn is a numbered key in the store. Who may take the next
    number sees that the last turn is over, and is the first to write it. Numbers only grow: an older
    one is removed by its successor, so who writes an old one late sees the later one, and waits on.
    """

    def __init__(self, directory: Directory, nodes: Nodes) -> None:
        self._directory, self._nodes = directory, nodes
        self._locks: dict[str, tuple[asyncio.Lock, list[int]]] = {}

    @contextlib.asynccontextmanager
    async def of(self, caller: Caller, names: Sequence[str]) -> AsyncIterator[None]:
        """Wait for the turn of a request, and have it for the block."""
        if caller.max_sandboxes is None:
            async with self.here(names[0] if names else ""):
                yield
            return
        async with self.here(f"owner {caller.client}"):
            name = hashlib.sha256(caller.client.encode()).hexdigest()[:32]
            key = await self._take(f"turn/{name}/")
            try:
                yield
            finally:
                await asyncio.shield(self._call(self._directory.put, key, b""))

    async def _take(self, prefix: str) -> str:
        mine = f"{self._nodes.gateway} {secrets.token_hex(8)}".encode()
        seen, since = "", 0.0
        while True:
            keys = await self._call(self._directory.list, prefix)
            last = keys[-1] if keys else ""
            holder = (await self._call(self._directory.get, last) or b"") if last else b""
            beat = await self._beat(holder)
            if f"{last} {beat}" != seen:
                seen, since = f"{last} {beat}", time.monotonic()
            if not holder or time.monotonic() - since > _DEAD_S:
                number = int(last.removeprefix(prefix) or 0) + 1
                key = f"{prefix}{number:0{_DIGITS}d}"
                if await self._is_taken(prefix, key, mine):
                    for old in keys:
                        await self._call(self._directory.remove, old)
                    return key
            await asyncio.sleep(_POLL_S)

    async def _is_taken(self, prefix: str, key: str, mine: bytes) -> bool:
        if await self._call(self._directory.put_first, key, mine) != mine:
            return False
        if (await self._call(self._directory.list, prefix))[-1] == key:
            return True
        await self._call(self._directory.remove, key)  # a turn that was over long ago
        return False

    async def _beat(self, holder: bytes) -> str:
        """Text that changes while the gateway of a turn lives: clocks are not compared."""
        gateway = holder.decode().partition(" ")[0]
        if not gateway or gateway == self._nodes.gateway:
            return str(time.monotonic())
        return (await self._call(self._directory.get, f"{GATEWAY}{gateway}") or b"").decode()

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)

    @contextlib.asynccontextmanager
    async def here(self, name: str) -> AsyncIterator[None]:
        """Wait for the turn of a name at this gateway; without one, it does not wait."""
        if not name:
            yield
            return
        lock, users = self._locks.setdefault(name, (asyncio.Lock(), [0]))
        users[0] += 1
        try:
            async with lock:
                yield
        finally:
            users[0] -= 1
            if not users[0]:
                del self._locks[name]


__all__ = ["Turns"]
