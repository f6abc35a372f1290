"""The two sides of a merge of a native sandbox, by the layers that it and the snapshot have: see `Layered`."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial

from ...errors import FileError, FileNotFound, StorageFull, file_error
from ...fork.trees import StreamTree, copy, is_directory
from ...model.files import DIRECTORY, SYMLINK
from ...snapshots import layers
from ...snapshots.differences import MOST_BYTES, Removal, StreamLayer, UnpackedLayer, View, compare
from ..local.mounts import images
from ..local.session import is_below
from .snapshots import writable_layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import ExitStack

    from ...snapshots.catalogue import Catalogue
    from ...snapshots.differences import Layer, Part
    from .sandbox import NativeSandbox


def sides(
    sandbox: NativeSandbox, since: str, directory: str, stack: ExitStack
) -> tuple[Part, Part] | None:
    """See `Layered.sides`."""
    place = sandbox.files._absolute(directory)
    catalogue = sandbox.backend.catalogue()
    _snapshot, spec, lower = catalogue.describe(since)
    if spec.image != sandbox.spec.image or _has_mounts(sandbox, place):
        return None
    try:
        changes = _changes_of(sandbox, place, stack)
    except (FileNotFound, StorageFull):
        raise
    except FileError:
        return None  # a symlink on the way, or a name that no layer may have
    if changes is None:
        return None
    image = _hold_image(sandbox, stack)
    opened = _Opened(catalogue, stack)
    below = sandbox.base.ids if sandbox.base is not None else ()
    before = View([opened.get(each) for each in reversed((since, *lower))], image)
    after = View([*(opened.get(each) for each in reversed(below)), changes], image)
    top = place.strip("/")
    if not _is_reached(before, top):
        return None
    return compare(before, after, top)


def _has_mounts(sandbox: NativeSandbox, place: str) -> bool:
    return any(
        is_below(each.target, place) or is_below(place, each.target) for each in sandbox.mounts
    )


def _is_reached(view: View, top: str) -> bool:
    """Return whether no symlink is on the way to a directory, nor in its place.

    Raises:
        NotADirectory: Something else is in its place.
    """
    at = ""
    for name in top.split("/") if top else ():
        at = f"{at}/{name}" if at else name
        entry = view.get(at)
        if entry is not None and entry[0] == SYMLINK:
            return False
    entry = view.get(top) if top else None
    if entry is not None and not is_directory(entry):
        raise file_error(errno.ENOTDIR, f"/{top}")
    return True


def _changes_of(sandbox: NativeSandbox, place: str, stack: ExitStack) -> Layer | None:
    """Return what the sandbox has of its own at `place`; None where a symlink is on the way."""
    try:
        for at in _way_to(place):
            kind = sandbox.files.stat(at).kind
            if kind == SYMLINK and at != place:
                return None
        if kind != DIRECTORY:
            raise file_error(errno.ENOTDIR, place)
    except FileNotFound:
        return Removal(place.strip("/"))
    names = -1 if sandbox.base is None else sandbox.base.open_names()
    tree = StreamTree(is_layer=names >= 0)
    stack.callback(tree.close)
    try:
        tree.add(lambda file: copy(writable_layer(sandbox, names, place), place, file))
    finally:
        if names >= 0:
            os.close(names)
    return StreamLayer(tree, place.strip("/"))


def _way_to(place: str) -> list[str]:
    parts = place.strip("/").split("/")
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]


def _hold_image(sandbox: NativeSandbox, stack: ExitStack) -> int:
    """Return a descriptor of the image's files; -1 without an image."""
    if sandbox.spec.image is None:
        return -1
    _spec, held = images.hold(sandbox.spec)
    stack.callback(held.close)
    fd = os.open(held.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


class _Opened:
    """Snapshots by id, each opened once: both sides may lie over it."""

    def __init__(self, catalogue: Catalogue, stack: ExitStack) -> None:
        self._catalogue, self._stack = catalogue, stack
        self._known: dict[str, Layer] = {}
        self._left_bytes = MOST_BYTES

    def get(self, snapshot_id: str) -> Layer:
        """Return the layer.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As `Catalogue.content`.
        """
        if snapshot_id not in self._known:
            self._known[snapshot_id] = self._unpacked(snapshot_id) or self._read(snapshot_id)
        return self._known[snapshot_id]

    def _unpacked(self, snapshot_id: str) -> Layer | None:
        place = self._catalogue.place(snapshot_id)
        lock = layers.hold(place)
        if lock < 0:
            return None
        self._stack.callback(os.close, lock)
        try:
            layer = UnpackedLayer(place, self._left_bytes)
        except FileNotFoundError:
            return None
        self._stack.callback(layer.close)
        self._left_bytes -= layer.size
        return layer

    def _read(self, snapshot_id: str) -> Layer:
        content = self._catalogue.content(snapshot_id)
        tree = StreamTree(is_layer=self._catalogue.is_layer(snapshot_id))
        self._stack.callback(tree.close)
        with open(content, "rb") as stream:
            tree.add(partial(shutil.copyfileobj, stream))
        return StreamLayer(tree)
