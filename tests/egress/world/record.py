"""What the servers of the world saw, in order: the evidence of what left a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

Event = dict[str, Any]


class Record:
    """Events with running numbers; who waits for one is woken by it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def add(self, kind: str, **facts: Any) -> Event:
        event = {"number": len(self.events), "kind": kind, **facts}
        self.events.append(event)
        self._more.set()
        self._more = asyncio.Event()
        return event

    def since(self, number: int) -> list[Event]:
        return self.events[number:]

    async def wait(self, number: int, facts: Event, patience_s: float) -> list[Event]:
        """Events from `number` on that hold all of `facts`, as soon as there is one."""
        try:
            async with asyncio.timeout(patience_s):
                while not (found := [e for e in self.since(number) if facts.items() <= e.items()]):
                    await self._more.wait()
        except TimeoutError:
            return []
        return found
