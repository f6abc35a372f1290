"""Roots of restored sandboxes: unpacked snapshots, over an image's files or none, below the writable layer."""

from __future__ import annotations

import os

from ....errors import SnapshotNotFound
from ....snapshots import layers
from ..host import identity
from . import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....launcher.plan import Tree
    from ....snapshots.catalogue import Catalogue
    from .images import Held, Names


class Layered:
    """Unpacked snapshots in use: their files stay until `close`, by whoever has a copy of the locks.

    Args:
        ids: Of the snapshots, the uppermost first.
        catalogue: Where they are; one that is deleted meanwhile stays there by another name.
        lock: See `layers.hold`; of the uppermost, which names those below.
        image: What they lie over; closed with them.
    """

    def __init__(
        self, ids: tuple[str, ...], catalogue: Catalogue, lock: int, image: Held | None
    ) -> None:
        self.ids, self.catalogue, self.image = ids, catalogue, image
        self._lock, self._idmap = lock, ""

    @property
    def lower(self) -> tuple[str, ...]:
        """Return the snapshots that a new one lies over; none where the pile is high, and it is a whole one."""
        return self.ids if len(self.ids) < layers.MOST else ()

    @property
    def _places(self) -> list[str]:
        return [self.catalogue.place(each) for each in self.ids]

    @property
    def trees(self) -> list[Tree]:
        """Return the trees to be mounted, the uppermost first."""
        own = [_tree(layers.tree_of(place), self._idmap) for place in self._places]
        return own + (self.image.trees if self.image else [])

    @property
    def locks(self) -> list[int]:
        """Return descriptors of what keeps the files."""
        return [self._lock, *(self.image.locks if self.image else [])]

    def appear_to(self, first_host_id: int, uid: int, *, is_trusted_root: bool) -> None:
        """Map the owners; without root there is one, and it is the sandbox's user already."""
        if self.image is not None:
            self.image.appear_to(first_host_id, uid, is_trusted_root=is_trusted_root)
        if is_trusted_root:
            self._idmap = identity.slot_map(first_host_id, uid)

    def directories(self) -> list[str]:
        """List the root directories that Landlock lets it write."""
        return self.image.directories() if self.image else []

    def furniture(self, uid: int, *, python_env: bool) -> bytes:
        """Return the packed trees and steps that furnish the root."""
        if self.image is not None:
            return template.packed_for_image(uid)
        return template.packed_for_layers(uid, python_env=python_env)

    def names(self) -> Names:
        """Return names and change times of all files: see `launcher.helpers.layers`."""
        below = self.image.names() if self.image else {}
        return layers.names_of(self._places[::-1], below)

    def open_names(self) -> int:
        if len(self.ids) == 1 and self.image is None:
            return layers.open_names(self._places[0])
        return layers.as_file(self.names())

    def held_again(self) -> Layered:
        """Return the same, with a lock of its own.

        Raises:
            SnapshotNotFound: It has been deleted meanwhile.
        """
        lock = layers.hold(self._places[0])
        if lock < 0:
            raise SnapshotNotFound(f"{self.ids[0]} is not unpacked any more")
        return Layered(self.ids, self.catalogue, lock, None)

    def close(self) -> None:
        if self._lock >= 0:
            fd, self._lock = self._lock, -1
            os.close(fd)
            if self.image is not None:
                self.image.close()
            self.catalogue.let_go(self.ids)


def hold(
    catalogue: Catalogue, chain: tuple[str, ...], image: Held | None
) -> tuple[Layered | None, tuple[str, ...]]:
    """Hold as many of a chain's snapshots, from the lowest, as are unpacked or can be.

    Args:
        chain: Ids, the uppermost first.
        image: What they lie over; owned by the result, if there is one.

    Returns:
        What is to be mounted, and the ids of those above, which are to be unpacked inside.
    """
    for at, snapshot_id in enumerate(chain):
        below = chain[at:]
        if all(_is_unpacked(catalogue, each) for each in below[::-1]):
            lock = layers.hold(catalogue.place(snapshot_id))
            if lock >= 0:
                return Layered(below, catalogue, lock, image), chain[:at]
    return None, chain


def unpack_large(catalogue: Catalogue, snapshot_id: str) -> None:
    """Unpack a new snapshot if restoring it is quicker then; where that fails it stays a stream."""
    _is_unpacked(catalogue, snapshot_id)


def _is_large(catalogue: Catalogue, snapshot_id: str) -> bool:
    try:
        info = os.stat(os.path.join(catalogue.place(snapshot_id), "content.tar"))
    except OSError:
        return False
    return info.st_size >= layers.LEAST_BYTES


def _is_unpacked(catalogue: Catalogue, snapshot_id: str) -> bool:
    place = catalogue.place(snapshot_id)
    if _is_there(place):
        return True
    if not _is_large(catalogue, snapshot_id) or layers.has_failed(place):
        return False
    with layers.alone(place):
        if _is_there(place):
            return True
        content = catalogue.content(snapshot_id)
        try:
            return layers.unpack(place, content, is_layer=catalogue.is_layer(snapshot_id))
        finally:
            os.close(content)


def _is_there(place: str) -> bool:
    fd = layers.hold(place)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def _tree(path: str, idmap: str) -> Tree:
    info = os.stat(path)
    return {
        "source": os.path.realpath(path),
        "device": info.st_dev,
        "inode": info.st_ino,
        "attributes": template.READ_ONLY,
        "idmap": idmap,
        "idmap_gid": idmap,
        "fd": -1,
    }
