"""Origin of an adapter's sandboxes: this process, a server, or a function of the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import InvalidRequest, SandboxNotFound
from ..sandbox import AsyncSandbox, Sandbox
from ..sandbox.waiting import owned
from . import own_sandboxes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..client import AsyncRemoteSandbox, RemoteSandbox


@dataclass(frozen=True)
class Origin:
    """Origin of the sandboxes of an adapter.

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
            raise InvalidRequest(
                "make excludes server and options: give one or the others", field="make"
            )

    def sandbox(self) -> Sandbox:
        """A new sandbox, which is the caller's to end."""
        if self.make is not None:
            return self.make()
        return Sandbox.create(**self.options, server=self.server)

    async def async_sandbox(self) -> AsyncSandbox:
        """The same for an event loop; cancelled meanwhile, it leaves nothing."""
        if self.server is not None:
            return await AsyncSandbox.create(**self.options, server=self.server)
        return AsyncSandbox(await owned(self.sandbox, Sandbox.terminate))

    # -- sandboxes that outlive the object that made them -----------------------------------------

    def lasting(self) -> Sandbox:
        """A new sandbox that `find` finds until somebody ends it, or this process ends."""
        return self.sandbox() if self.server is not None else own_sandboxes.keep(self.sandbox())

    async def async_lasting(self) -> AsyncSandbox:
        """The same for an event loop."""
        if self.server is not None:
            return await self.async_sandbox()
        return AsyncSandbox(await owned(self.lasting, Sandbox.terminate))

    def find(self, sandbox_id: str) -> Sandbox:
        """The live sandbox of this id.

        Raises:
            SandboxNotFound: There is none.
        """
        if self.server is None:
            return own_sandboxes.find(sandbox_id)
        from ..client import Client

        client = Client(self.server)
        try:
            found = client.get(sandbox_id)
            _check_lives(found)
        except BaseException:
            client.close()
            raise
        found.owns_transport = True
        return found  # type: ignore[return-value]  # the same methods: tests/client compares them

    async def async_find(self, sandbox_id: str) -> AsyncSandbox:
        """The same for an event loop."""
        if self.server is None:
            return AsyncSandbox(own_sandboxes.find(sandbox_id))
        from ..client import AsyncClient

        client = AsyncClient(self.server)
        try:
            found = await client.get(sandbox_id)
            _check_lives(found)
        except BaseException:
            await client.close()
            raise
        found.owns_transport = True
        return found  # type: ignore[return-value]


def _check_lives(found: RemoteSandbox | AsyncRemoteSandbox) -> None:
    if found._view.state == "terminated":
        raise SandboxNotFound(f"sandbox {found.id} has ended", hint="create a new one")
