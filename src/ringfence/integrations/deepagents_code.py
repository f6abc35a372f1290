"""The provider that deepagents' command line finds by its entry point: `--sandbox ringfence`.

Source: deepagents_code.integrations.sandbox_provider; it asks for these methods, by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .langchain import RingfenceBackend
from .origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable


class RingfenceProvider:
    """Makes sandboxes and finds them again by id, as long as this process lives."""

    def get_or_create(
        self, *, sandbox_id: str | None = None, server: str | None = None, **options: Any
    ) -> RingfenceBackend:
        """The sandbox of that id, or a new one.

        Raises:
            SandboxNotFound: An id was given, and no such sandbox lives.
        """
        origin = Origin(options, server)
        made = origin.lasting() if sandbox_id is None else origin.find(sandbox_id)
        return RingfenceBackend(made, server=server)

    def delete(self, *, sandbox_id: str, server: str | None = None, **_options: Any) -> None:
        """End it."""
        Origin(server=server).find(sandbox_id).terminate()

    async def aget_or_create(
        self, *, sandbox_id: str | None = None, **options: Any
    ) -> RingfenceBackend:
        """As `get_or_create`, without blocking the event loop."""
        return await _elsewhere(lambda: self.get_or_create(sandbox_id=sandbox_id, **options))

    async def adelete(self, *, sandbox_id: str, **options: Any) -> None:
        """As `delete`."""
        await _elsewhere(lambda: self.delete(sandbox_id=sandbox_id, **options))


async def _elsewhere(function: Callable[[], Any]) -> Any:
    import asyncio

    return await asyncio.to_thread(function)
