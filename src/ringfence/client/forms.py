"""Types of answers that are JSON objects as the server sends them."""

from __future__ import annotations

from typing import Any, TypedDict


class Key(TypedDict):
    """An API key or token, without the secret. Times are seconds since 1970, UTC."""

    id: str
    owner: str
    scope: str
    sandbox_id: str | None
    name: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    made_with: str | None
    max_sandboxes: int | None
    max_requests: int | None


class MadeKey(Key):
    """A new key; `key` is the secret, and is not shown again."""

    key: str


class Info(TypedDict):
    """The server, and the backends of its host."""

    version: str
    client: str
    scope: str
    is_admin: bool
    max_sandboxes: int
    backends: list[dict[str, Any]]


class Pools(TypedDict):
    """Configuration and state of the pool; `given_up` has profiles that no backend can build ahead."""

    config: dict[str, Any]
    warm: int
    given_up: dict[str, str]
    last_error: str


class OutputEvent(TypedDict, total=False):
    """An event of `process.events()`; which keys are there depends on `type`."""

    type: str
    cursor: str
    stream: str
    offset: int
    data: bytes
    bytes: int
    exec: dict[str, Any]
