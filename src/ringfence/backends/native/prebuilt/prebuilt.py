"""A prebuilt sandbox in the zygote, whoever keeps it: a loop of creates, or a pool."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ....launcher import wire
    from ....launcher.plan import Plan
    from ..request import Kind
    from ..zygote import Zygote


class Prebuilt:
    """A sandbox that has no plan yet, or one by which it is locked down already.

    Attributes:
        kind: The parts of a spec that are fixed before a claim.
        control: Our end of its control socket.
        directories, values: Its cgroups, and their settings.
        plan: The plan by which it is locked down, equal to the last sandbox's; None: it waits for one.
        meanwhile: What its caller wants done while it locks itself down.
        is_pooled: Its owner refills, so that no other one is built in its place.
    """

    plan: Plan | None = None
    meanwhile: Callable[[], None] | None = None
    is_pooled = False

    def __init__(
        self, sandbox_id: str, kind: Kind, first_host_id: int, zygote: Zygote, control: wire.Socket
    ) -> None:
        self.id, self.kind, self.first_host_id = sandbox_id, kind, first_host_id
        self.zygote, self.control = zygote, control
        self.directories: list[str] = []
        self.values: list[tuple[str, str]] = []

    def takes(self, plan: Plan) -> bool:
        """Return whether it can take the plan without the zygote opening mounts or setting limits."""
        same = (plan["cgroup_dirs"], plan["cgroup_values"]) == (self.directories, self.values)
        return same and not (plan["trees"] or plan["placeholders"])

    def discard(self) -> None:
        """End it unused."""
        raise NotImplementedError

    def close(self) -> None:
        """Forget it without ending it: it is a sandbox now, which owns its control."""
