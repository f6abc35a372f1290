"""Identity and permissions of the caller of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

TOKEN, METRICS, READ_ONLY, USER, ADMIN = "sandbox", "metrics", "read_only", "user", "admin"
SCOPES = (TOKEN, METRICS, READ_ONLY, USER, ADMIN)
"""Of keys; a `sandbox` one is called a token."""


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    Attributes:
        client: Owner of everything it makes; unless an admin, it finds only this client's things.
        sandbox: The one sandbox that a sandbox token opens; else empty.
        key: The key's id; empty on the unix socket.
        expires_at: Expiry of the key, in seconds since 1970; None: never.
        max_sandboxes: Most sandboxes of its client, including one made with this key; None: no bound.
        max_requests: Most concurrent requests with this key; None: the client's bound.
        gateway_key: At a node of a cluster: the key's id at the gateway, which alone has the keys.
        digest: Digest of the secret that it showed: a rotated key has two for a while.
    """

    client: str
    scope: str = USER
    sandbox: str = ""
    key: str = ""
    expires_at: float | None = None
    max_sandboxes: int | None = None
    max_requests: int | None = None
    gateway_key: str = ""
    digest: bytes = field(default=b"", repr=False)

    @property
    def is_admin(self) -> bool:
        """True if nothing is refused to it."""
        return self.scope == ADMIN

    @property
    def key_id(self) -> str:
        """The id of the key, be it of this server or of its gateway."""
        return self.key or self.gateway_key

    @property
    def sees(self) -> str | None:
        """The `client_id` that a manager's methods take: None finds everything."""
        return None if self.is_admin else self.client
