"""A plan under way: what its parts add to, and what only the host process keeps."""

from __future__ import annotations

import os

from ..local import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from ..local.images import Held
    from ..local.protect import Protected
    from ..local.trusted import Trusted

    Steps = list[tuple[Any, ...]]


class Draft:
    """See above.

    Args:
        first_host_id: 0 when rootless.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        first_host_id: int,
        image: Held | None = None,
    ) -> None:
        self.spec, self.id, self.uid, self.first_host_id = spec, sandbox_id, uid, first_host_id
        self.image = image
        self.guest, self.trees = (
            (template.image_guest_root(uid), []) if image else template.guest_root(uid)
        )
        self.hull: Steps = []
        self.after: Steps = []
        self.shown: list[dict[str, Any]] = []  # mounts of the guest's, as OCI has them
        self.fds: list[int] = []
        self.mounts: list[ResolvedMount] = []
        self.protected: list[Protected] = []
        self.note: str | None = None  # of the journal
        self.trusted: Trusted | None = None
        self.shares_pages = ""  # why, where it does

    def close(self) -> None:
        """Close what pinned the mount sources."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
