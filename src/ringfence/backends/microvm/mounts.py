"""User mounts of a machine: made in its jail, which enforces them, and then in the machine."""

from __future__ import annotations

from ...guest.machine import SHARES
from ...model.session import ResolvedMount
from ..local.jailed.jail_mounts import JailMounts
from ..local.session import is_below, steps_of_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...model.mount import Mount
    from ...model.spec import SandboxSpec

    Steps = list[tuple[Any, ...]]

SHARE, MOUNTS = SHARES  # the jail has them by the names that the guest has


class MachineMounts(JailMounts):
    """See `JailMounts`.

    Attributes:
        inner: What the machine does with them once it has its root.
    """

    def __init__(
        self, spec: SandboxSpec, first_host_id: int, there: Sequence[ResolvedMount] = ()
    ) -> None:
        super().__init__(spec, first_host_id, MOUNTS, there=there)
        self.inner: Steps = []

    def add(self, mount: Mount) -> None:
        """Decide one more.

        Raises:
            InvalidRequest: Its source is not there, or a path in it cannot be protected.
        """
        if mount.is_host_path:
            self.add_of_host(mount)
            self.inner.append(("bind", mount.target, len(self.mounted) - 1))
        else:
            self.inner += steps_of_own(self.spec, mount)
            self.mounts.append(ResolvedMount(mount.target, mount.access))

    def deny(self, shown: Sequence[tuple[str, int]]) -> Steps:
        """Hide the host's in the jail, so from the guest's kernel too; what is denied that this is to hide.

        Args:
            shown: Where the machine has what the host shows, and the number of it.

        Raises:
            InvalidRequest: A mount is at or in a denied path, or a symlink on the way to it.
        """
        inner = self.deny_of_host()
        for _verb, path, _make in inner:
            for target, number in shown:
                place = f"{SHARE}/{number}"
                if is_below(target, path):
                    self.after.append(("hide", place, False))
                elif is_below(path, target):
                    inside = path.removeprefix(target.rstrip("/"))
                    self.after.append(("hide", place + inside, False))
        return inner
