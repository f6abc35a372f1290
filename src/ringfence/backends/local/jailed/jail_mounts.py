"""User mounts for a guest: made in the jail around the guest's kernel, which enforces them."""

from __future__ import annotations

import os

from ....model.session import ResolvedMount
from ..host.facts import host
from ..mounts import sources
from ..mounts.denied import deny_paths
from ..mounts.protect import Protected, prepare_mount_point, protect_mount
from ..session import is_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ....launcher.placeholders import Placeholder
    from ....launcher.plan import Tree
    from ....model.mount import Mount
    from ....model.spec import SandboxSpec

    Steps = list[tuple[Any, ...]]


class JailMounts:
    """Mounts under way.

    Args:
        first_host_id: 0 when rootless.
        directory: Of the jail: each is in there by its number.
        points: Where what they are mounted on is made, if not there: the same directory, by a way that may be
            written.
        there: What a guest that runs has already.

    Attributes:
        mounted: The host's files, in order.
        fds: What pins them, until the jail is there.
        after: What is done in the jail, by which they hold.
        mounts: All that the sandbox has then.
        places: Where the jail has each, by its target.
        count: The number of the next.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        first_host_id: int,
        directory: str,
        points: str = "",
        there: Sequence[ResolvedMount] = (),
    ) -> None:
        self.spec, self.first_host_id = spec, first_host_id
        self.mounts = list(there)
        self.mounted: list[Tree] = []
        self.fds: list[int] = []
        self.after: Steps = []
        self.protected: list[Protected] = []
        self._directory, self._points = directory, points
        hosts = [each.target for each in there if each.host_path]
        # Of two at one target, the newer one is seen.
        self.places = {target: f"{directory}/{i}" for i, target in enumerate(hosts)}
        self.count = len(hosts)

    def add_of_host(self, mount: Mount) -> str:
        """Decide one more; where the jail will have it.

        Raises:
            InvalidRequest: Its source is not there, or a path in it cannot be protected.
        """
        trusted = host().trusted_root
        tree, fd = sources.pin(mount, self.first_host_id if trusted else None)
        self.fds.append(fd)
        tree["fd"] = len(self.fds) - 1 if trusted else -1
        point = prepare_mount_point(mount.target, tree["source"], self.mounts)
        if point is not None:
            # Where it is to be, another one is there already: made in that one, as the jail has it.
            self._hold(*point)
        place = self.places[mount.target] = f"{self._directory}/{self.count}"
        if self._points:
            self.after.append(_point(f"{self._points}/{self.count}", tree["source"]))
        self.count += 1
        self.after.append(("bind", place, len(self.mounted)))
        self.mounted.append(tree)
        self.mounts.append(ResolvedMount(mount.target, mount.access, tree["source"]))
        if mount.is_writable:
            self._hold(protect_mount(mount, self.spec, tree), mount.target)
        return place

    def _hold(self, protected: Protected, target: str) -> None:
        """Decided for where the guest has a mount; done where the jail has it."""
        self.protected.append(protected)
        place = self.places[target]
        self.after += [
            (verb, place + path.removeprefix(target), *rest)
            for verb, path, *rest in protected.steps
        ]

    def deny_of_host(self) -> Steps:
        """Hide what is denied in these mounts, so from the guest's kernel too; what else there is to hide.

        Raises:
            InvalidRequest: A mount is at or in a denied path, or a symlink on the way to it.
        """
        steps, made = deny_paths(self.spec, self.mounts)
        for protected in made:
            path = protected.steps[0][1]
            around = [each.target for each in self.mounts if is_below(path, each.target)]
            self._hold(protected, around[-1])
        held = [step for each in made for step in each.steps]
        return [step for step in steps if step not in held]

    @property
    def placeholders(self) -> list[Placeholder]:
        """Files and directories made on the host, to be removed when the sandbox has ended."""
        return [made for part in self.protected for made in part.placeholders]

    def close(self) -> None:
        """Close what pinned the files."""
        while self.fds:
            os.close(self.fds.pop())


def _point(path: str, source: str) -> tuple[Any, ...]:
    """Choose the step that makes a mount point for a source."""
    return ("dir", path, 0o755, False) if os.path.isdir(source) else ("file", path, b"", 0o644)
