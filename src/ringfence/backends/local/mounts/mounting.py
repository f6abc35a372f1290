"""User mounts in a root that another program made: planned and pinned here, mounted by a helper."""

from __future__ import annotations

import os

from ....errors import InvalidRequest
from ....model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE
from ....model.session import ResolvedMount
from ..answers import Refused
from ..refusals import hint_of_source
from ..session import all_mounts, steps_of_own
from . import sources
from .denied import deny_paths
from .protect import Protected, hold_template, prepare_mount_point, protect_mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ....launcher.placeholders import Placeholder
    from ....launcher.plan import Tree
    from ....model.mount import Mount
    from ....model.spec import SandboxSpec
    from ..jailed.jail_mounts import JailMounts

    Steps = list[tuple[Any, ...]]


class Mounting:
    """The mounts of one sandbox.

    Args:
        steps: What is to be done in its root besides, first of all.
        there: What a sandbox that runs has already.

    Attributes:
        hidden: What is done last of all: denied paths.
        fds: What pins the sources, until they are mounted.
        note: Of the journal; empty where there is nothing to note.
    """

    def __init__(
        self, spec: SandboxSpec, steps: Steps | None = None, there: Sequence[ResolvedMount] = ()
    ) -> None:
        self._spec = spec
        self.trees: list[Tree] = []
        self.steps: Steps = list(steps or ())
        self.hidden: Steps = []
        self.fds: list[int] = []
        self.protected: list[Protected] = []
        self.mounts = list(there)
        self.note = ""

    def prepare(self, owner: int | None) -> None:
        """Fill it in.

        Args:
            owner: The host id of the sandbox's user, as whom a source's owner is to appear; None: as it is.

        Raises:
            InvalidRequest: A source is not there, or a path in it cannot be protected.
        """
        for target in ALWAYS_THERE.values():
            if target != MEMORY_DIR or not self._spec.memory_dir:
                self.mounts.append(ResolvedMount(target, READ_WRITE))
        for mount in all_mounts(self._spec):
            self.add(mount, owner)
        self.hidden, covered = deny_paths(self._spec, self.mounts)
        self.protected += covered

    def add(self, mount: Mount, owner: int | None) -> None:
        """Add a mount; see `prepare`."""
        if mount.is_host_path:
            self._add_host_mount(mount, owner)
        else:
            self.steps += steps_of_own(self._spec, mount)
            self.mounts.append(ResolvedMount(mount.target, mount.access))

    def _add_host_mount(self, mount: Mount, owner: int | None) -> None:
        tree, fd = sources.pin(mount, owner)
        tree["fd"] = len(self.fds)
        self.fds.append(fd)
        point = prepare_mount_point(mount.target, tree["source"], self.mounts)
        if point is not None:
            self._hold(point[0])
        self.steps.append(("bind", mount.target, len(self.trees)))
        self.trees.append(tree)
        self.mounts.append(ResolvedMount(mount.target, mount.access, tree["source"]))
        if mount.is_writable:
            self._hold(protect_mount(mount, self._spec, tree))
        elif held := hold_template(tree["source"]):
            self._hold(held)

    def _hold(self, protected: Protected) -> None:
        self.protected.append(protected)
        self.steps += protected.steps

    @property
    def placeholders(self) -> list[Placeholder]:
        """Files and directories made on the host, to be removed when the sandbox has ended."""
        return [made for each in self.protected for made in each.placeholders]

    def close(self) -> None:
        """Close what pinned the sources; idempotent."""
        while self.fds:
            os.close(self.fds.pop())


class OrNothing:
    """Where what is done in the `with` block fails, nothing of the mount is left on the host.

    Raises:
        InvalidRequest: What a kernel refused.
    """

    def __init__(self, target: str, more: Mounting | JailMounts) -> None:
        self._target, self._more = target, more

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        self._more.close()
        if exc is None:
            return
        for each in self._more.protected:
            each.remove_placeholders()
        if isinstance(exc, Refused):
            source = self._more.mounts[-1].host_path or "" if self._more.mounts else ""
            said, hint = f"{self._target}: {exc.strerror}", hint_of_source(exc, source)
            raise InvalidRequest(said, field="mount", hint=hint) from exc


def shows_the_host(spec: SandboxSpec) -> bool:
    """Return whether a host directory, which may contain a socket, is mounted."""
    return any(mount.is_host_path for mount in all_mounts(spec))
