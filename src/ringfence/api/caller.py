"""Who asks, and how far their key goes."""

from __future__ import annotations

from dataclasses import dataclass

TOKEN, METRICS, READ_ONLY, USER, ADMIN = "sandbox", "metrics", "read_only", "user", "admin"
SCOPES = (TOKEN, METRICS, READ_ONLY, USER, ADMIN)
"""Of keys; a `sandbox` one is called a token."""


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        client: Whose things it makes; and, unless it is an admin, the only ones it finds.
        sandbox: For a sandbox's own token, the one that it opens; else empty.
        key: The key's id; empty on the unix socket.
        expires_at: When the key does, in seconds since 1970; None: never.
        max_sandboxes: Its client has so many when it makes one more with this key; None: no bound.
        max_requests: With this key at once; None: as many as a client may.
    """

    client: str
    scope: str = USER
    sandbox: str = ""
    key: str = ""
    expires_at: float | None = None
    max_sandboxes: int | None = None
    max_requests: int | None = None

    @property
    def is_admin(self) -> bool:
        """Whether nothing is refused to it."""
        return self.scope == ADMIN

    @property
    def sees(self) -> str | None:
        """The `client_id` that a manager's methods take: None finds everything."""
        return None if self.is_admin else self.client
