"""A prebuilt sandbox in the zygote, of a backend's own for the next create or of a pool."""

from __future__ import annotations

import errno

from ....errors import SandboxLost
from ....launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ....launcher.plan import Plan, Shape
    from ...local.mounts.disks import Disk
    from ..request import Kind
    from ..zygote import Zygote


class Prebuilt:
    """A sandbox that has not been asked for yet.

    Attributes:
        kind: The parts of a spec that are fixed before a claim.
        control: Our end of its control socket.
        directories, values: Its cgroups, and their settings.
        meanwhile: What its caller wants done while it locks itself down.
        disk: Its writable layer, where that is not in memory.
    """

    meanwhile: Callable[[], None] | None = None
    disk: Disk | None = None

    def __init__(
        self, sandbox_id: str, kind: Kind, first_host_id: int, zygote: Zygote, control: wire.Socket
    ) -> None:
        self.id, self.kind, self.first_host_id = sandbox_id, kind, first_host_id
        self.zygote, self.control = zygote, control
        self.directories: list[str] = []
        self.values: list[tuple[str, str]] = []

    def bind(self, plan: Plan, shape: Shape, pinned: list[int]) -> wire.Socket:
        """Make it the sandbox of this plan; return the control socket on which it answers.

        Raises:
            SandboxLost: It has ended, or cannot become that.
        """
        raise NotImplementedError

    def discard(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Forget it without ending it: it is a sandbox now, which owns its control."""


def start(zygote: Zygote, verb: str, plan: Plan, shape: Shape, pinned: list[int]) -> wire.Socket:
    """Ask the zygote for a sandbox of this plan; return the control socket on which it answers.

    Raises:
        SandboxLost: The zygote is gone.
    """
    ours, theirs = wire.socketpair()
    try:
        send_plan(ours, plan)
        zygote.tell_from(theirs, verb, shape, pinned)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


def send_plan(control: wire.Socket, plan: Plan) -> None:
    """Put it where the sandbox at the other end will find it.

    Raises:
        SandboxLost: The sandbox has ended.
    """
    try:
        wire.send(control, plan)
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
        raise SandboxLost("the sandbox has ended", hint="create a new one") from exc
