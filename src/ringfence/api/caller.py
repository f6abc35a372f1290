"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass


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
