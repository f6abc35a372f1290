"""What a machine's user mounts of the host: shown in the hull, where it holds, and mounted in the machine."""

from __future__ import annotations

import os

from ...guest.machine import SHARES
from ...model.session import ResolvedMount
from ..local import sources
from ..local.denied import deny_paths
from ..local.host import host
from ..local.protect import Protected, prepare_mount_point, protect_mount
from ..local.session import is_below, steps_of_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...launcher.placeholders import Placeholder
    from ...launcher.plan import Tree
    from ...model.mount import Mount
    from ...model.spec import SandboxSpec

    Steps = list[tuple[Any, ...]]

SHARE, MOUNTS = SHARES  # the hull has them by the names that the guest has


class MachineMounts:
    """Mounts under way.

    Args:
        first_host_id: 0 when rootless.
        there: What a machine that runs has already.

    Attributes:
        mounted: The host's files, in order; where the hull has each is named by its number.
        fds: What pins them, until the hull is there.
        inner: What the machine does with them once it has its root.
        after: What is done in the hull, by which they hold.
        mounts: All that the sandbox has then.
    """

    def __init__(
        self, spec: SandboxSpec, first_host_id: int, there: Sequence[ResolvedMount] = ()
    ) -> None:
        self.spec, self.first_host_id = spec, first_host_id
        self.mounts = list(there)
        self.mounted: list[Tree] = []
        self.fds: list[int] = []
        self.inner: Steps = []
        self.after: Steps = []
        self.protected: list[Protected] = []
        hosts = [each.target for each in there if each.host_path]
        # Of two at one target, the newer one is seen.
        self._places = {target: f"{MOUNTS}/{i}" for i, target in enumerate(hosts)}
        self._count = len(hosts)

    def add(self, mount: Mount) -> None:
        """Decide one more.

        Raises:
            InvalidRequest: Its source is not there, or a path in it cannot be protected.
        """
        if mount.is_host_path:
            self._add_of_host(mount)
        else:
            self.inner += steps_of_own(self.spec, mount)
            self.mounts.append(ResolvedMount(mount.target, mount.access))

    def _add_of_host(self, mount: Mount) -> None:
        trusted = host().trusted_root
        tree, fd = sources.pin(mount, self.first_host_id if trusted else None)
        self.fds.append(fd)
        tree["fd"] = len(self.fds) - 1 if trusted else -1
        point = prepare_mount_point(mount.target, tree["source"], self.mounts)
        if point is not None:
            # Where it is to be, another one is there already: made in that one, as the hull has it.
            self._hold(*point)
        place = self._places[mount.target] = f"{MOUNTS}/{self._count}"
        self._count += 1
        self.after.append(("bind", place, len(self.mounted)))
        self.inner.append(("bind", mount.target, len(self.mounted)))
        self.mounted.append(tree)
        self.mounts.append(ResolvedMount(mount.target, mount.access, tree["source"]))
        if mount.is_writable:
            self._hold(protect_mount(mount, self.spec, tree), mount.target)

    def _hold(self, protected: Protected, target: str) -> None:
        """Decided for where the machine has a mount; done where the hull has it."""
        self.protected.append(protected)
        place = self._places[target]
        self.after += [
            (verb, place + path.removeprefix(target), *rest)
            for verb, path, *rest in protected.steps
        ]

    def deny(self, shown: Sequence[tuple[str, int]]) -> Steps:
        """Hide the host's in the hull, so from the guest's kernel too; what is denied that this is to hide.

        Args:
            shown: Where the machine has what the host shows, and the number of it.

        Raises:
            InvalidRequest: A mount is at or in a denied path, or a symlink on the way to it.
        """
        steps, made = deny_paths(self.spec.deny, self.mounts)
        for protected in made:
            path = protected.steps[0][1]
            around = [each.target for each in self.mounts if is_below(path, each.target)]
            self._hold(protected, around[-1])
        held = [step for each in made for step in each.steps]
        inner = [step for step in steps if step not in held]
        for _verb, path, _make in inner:
            for target, number in shown:
                place = f"{SHARE}/{number}"
                if is_below(target, path):
                    self.after.append(("hide", place, False))
                elif is_below(path, target):
                    inside = path.removeprefix(target.rstrip("/"))
                    self.after.append(("hide", place + inside, False))
        return inner

    @property
    def placeholders(self) -> list[Placeholder]:
        """What was made on the host, and is to be removed when the sandbox has ended."""
        return [made for part in self.protected for made in part.placeholders]

    def close(self) -> None:
        """Close what pinned the files."""
        while self.fds:
            os.close(self.fds.pop())
