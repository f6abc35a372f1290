"""Common base of all backends on this host: the egress process and the snapshot catalogue."""

from __future__ import annotations

from ..optional import Selective

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...egress.host.client import Egress
    from ...model.session import Snapshot
    from ...snapshots.catalogue import Catalogue


class LocalBackend(Selective):
    """The part of `Backend` that is the same for all of them.

    Args:
        egress: Who moves the data of connections; None is the process that this one shares.
        state_dir: Where snapshots are kept; None is this user's data directory.
    """

    name: str

    def __init__(self, egress: Callable[[], Egress] | None, state_dir: str | None = None) -> None:
        self._egress, self._state_dir = egress, state_dir

    def egress(self) -> Egress:
        """Return the egress process, which moves the data of connections; started on first use."""
        if self._egress is not None:
            return self._egress()
        from ...egress.host.client import shared

        return shared()

    def snapshots(self) -> list[Snapshot]:
        return self.catalogue().list()

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.catalogue().delete(snapshot_id)

    def catalogue(self) -> Catalogue:
        """Where snapshots are kept; made with the first one."""
        from ...snapshots.catalogue import Catalogue, default_directory

        return Catalogue(self._state_dir or default_directory(), self.name)
