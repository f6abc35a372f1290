"""What every route has at hand: the manager, threads to call it from, and who is asking."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from ..errors import LifecycleError, SandboxNotFound, Unauthenticated
from ..sessions.live import Live
from ..sessions.manager import SessionManager
from .lanes import Lanes


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        client: Whose things it makes; and, unless it is an admin, the only ones it finds.
        sandbox: For a sandbox's own token, the one that it opens; else empty.
    """

    client: str
    is_admin: bool = False
    sandbox: str = ""
    key: str = ""

    @property
    def sees(self) -> str | None:
        """The `client_id` that a manager's methods take: None finds everything."""
        return None if self.is_admin else self.client


@dataclass
class Service:
    """The application's state."""

    manager: SessionManager
    lanes: Lanes = field(default_factory=Lanes)

    def live(self, any_id: str, caller: Caller) -> Live:
        """A session that lives, without waiting for anything.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        found = self.manager.book.find(any_id, caller.sees)
        if found is None or caller.sandbox not in ("", found.sandbox_id):
            raise SandboxNotFound(f"no session or sandbox {any_id!r}")
        return found

    async def need(self, any_id: str, caller: Caller) -> Live:
        """`live`; of one that has ended it is said why.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
            LifecycleError: It has ended.
        """
        try:
            return self.live(any_id, caller)
        except SandboxNotFound:
            ended = await self.lanes.call(self.manager.get, any_id, caller.sees)
            if caller.sandbox not in ("", ended.sandbox_id):
                raise
            raise LifecycleError(
                f"sandbox {ended.sandbox_id} is over: {ended.reason or ended.state}",
                hint="create a new one",
            ) from None


async def _service(connection: HTTPConnection) -> Service:
    found: Service = connection.app.state.service
    return found


async def _caller(connection: HTTPConnection) -> Caller:
    found: Caller | None = getattr(connection.state, "caller", None)
    if found is None:
        raise Unauthenticated("nobody was recognised")
    return found


TheService = Annotated[Service, Depends(_service)]
TheCaller = Annotated[Caller, Depends(_caller)]

__all__ = ["Caller", "Request", "Service", "TheCaller", "TheService"]
