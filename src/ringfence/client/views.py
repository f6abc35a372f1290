"""From what a server says of a sandbox to what the library says of one."""

from __future__ import annotations

from ..model.sandbox import SandboxView
from ..model.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._sync.transport import Transport


def read_view(transport: Transport, at: str) -> SandboxView:
    """Ask now. `session` and `state` are properties: nobody can wait for them but by waiting."""
    return SandboxView.from_json(transport.json("GET", at))


def session_of(view: SandboxView) -> Session:
    """A sandbox as `Sandbox.session` shows it."""
    metadata = {**view.labels, "profile": view.profile, "tier": view.tier}
    return Session(view.id, view.backend, view.state, view.mounts, metadata)
