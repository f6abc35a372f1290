"""Rows of the database, a class for each table, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

PLANNED, WARM, LIVE, ENDING, ENDED = "planned", "warm", "live", "ending", "ended"


@dataclass(frozen=True)
class SandboxRecord:
    """A sandbox: see the table `sandboxes` for what the columns mean."""

    id: str
    owner: str
    backend: str
    phase: str
    spec: str
    created_at: float
    boot: str
    expires_ns: int | None = None
    ended_at: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class SessionRecord:
    """A session: see the table `sessions`."""

    id: str
    sandbox: str
    owner: str
    backend: str
    state: str
    metadata: str
    timeouts: str
    created_at: float
    boot: str
    active_ns: int
    active_at: float
    key: str = ""
    request: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Anchor:
    """A process whose end ends every sandbox of a backend.

    Attributes:
        directory: The identity of the state directory whose daemon started it.
    """

    backend: str
    pid: int
    started: int
    boot: str
    directory: str = ""


@dataclass(frozen=True)
class KeyRecord:
    """API key: see the table `keys`."""

    id: str
    digest: bytes
    owner: str
    scope: str
    created_at: float
    sandbox: str | None = None
    name: str = ""
    expires_at: float | None = None
    used_at: float | None = None
    maker: str = ""
    max_sandboxes: int | None = None
    max_requests: int | None = None
    old_digest: bytes | None = None
    old_until: float | None = None


@dataclass(frozen=True)
class SnapshotRecord:
    """Owner and origin of a snapshot: see the table `snapshots`."""

    id: str
    owner: str
    sandbox: str
    backend: str
    spec: str
    created_at: float
