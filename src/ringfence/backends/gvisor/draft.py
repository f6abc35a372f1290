"""A plan under way: what its parts add to, and what only the host process keeps."""

from __future__ import annotations

from ..local.jailed.jail_mounts import JailMounts
from ..local.mounts import template
from . import places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...model.spec import SandboxSpec
    from ..local.mounts.disks import Disk
    from ..local.mounts.images import Held
    from ..local.mounts.trusted import Trusted

    Steps = list[tuple[Any, ...]]


class Draft(JailMounts):
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
        super().__init__(spec, first_host_id, places.MOUNTS, places.POINTS)
        self.id, self.uid, self.image = sandbox_id, uid, image
        self.guest, self.trees = (
            (template.image_guest_root(uid), []) if image else template.guest_root(uid)
        )
        self.mounted = self.trees  # one list: they are opened with all the others
        self.jail: Steps = []
        self.shown: list[dict[str, Any]] = []  # mounts of the guest's, as OCI has them
        self.note: str | None = None  # of the journal
        self.trusted: Trusted | None = None
        self.shares_pages = ""  # why, where it does
        self.disk: Disk | None = None  # of what is written, where that is not in memory
