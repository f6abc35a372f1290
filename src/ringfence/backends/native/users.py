"""Execs as another user of the sandbox than its own."""

from __future__ import annotations

from ...errors import Unsupported
from ..local.answers import bound_sends
from ..local.host import identity
from .inner import start_agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher import wire
    from .live import LiveSandbox


def control_of(sandbox: LiveSandbox, uid: int) -> wire.Socket:
    """The control socket of an agent of another user than the sandbox's, started on first use.

    Raises:
        Unsupported: There is only one user inside, or none with that id.
    """
    if not sandbox.first_host_id:
        raise Unsupported(
            f"a sandbox made by an ordinary user has one user inside, uid {sandbox.uid}",
            backend="native",
            operation="exec as another user",
            field="user",
            hint="create the sandbox with this user, or with the profile own_root (`ringfence doctor`"
            " tells whether it works here), or run Ringfence as root",
        )
    if uid >= identity.LOW_IDS and uid != identity.NOBODY:
        raise Unsupported(
            f"uid {uid} is not mapped in this sandbox",
            backend="native",
            operation="exec as another user",
            field="user",
            hint=f"uids below {identity.LOW_IDS} and {identity.NOBODY} are; or create it with this user",
        )
    if uid not in sandbox.agents:
        agent = start_agent(sandbox, uid)
        bound_sends(agent)
        sandbox.agents[uid] = agent
        sandbox.backend.handover.add_agent(sandbox, uid)
    return sandbox.agents[uid]
