"""Where an adapter's sandboxes come from: this process, a server, or a function of the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import InvalidRequest
from ..sandbox import AsyncSandbox, Sandbox
from ..sandbox.aio import owned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


@dataclass(frozen=True)
class Origin:
    """What makes the sandboxes of one adapter.

    Attributes:
        options: Keyword arguments of `Sandbox.create`: network, mounts, limits, backend, ...
        server: The address of a Ringfence server; None makes them here.
        make: Instead of both: returns a sandbox, such as one leased from a `SessionManager`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    make: Callable[[], Sandbox] | None = None

    def __post_init__(self) -> None:
        if self.make is not None and (self.options or self.server is not None):
            raise InvalidRequest("give a function or what to make, not both", field="make")

    def sandbox(self) -> Sandbox:
        """A new sandbox, which is the caller's to end."""
        return self.make() if self.make is not None else Sandbox.create(**self._arguments())

    async def async_sandbox(self) -> AsyncSandbox:
        """The same for an event loop; cancelled meanwhile, it leaves nothing."""
        return AsyncSandbox(await owned(self.sandbox))

    def _arguments(self) -> dict[str, Any]:
        given = {} if self.server is None else {"server": self.server}
        return {**self.options, **given}
