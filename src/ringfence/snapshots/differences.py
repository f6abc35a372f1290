"""Two trees of layers, of which only the paths that differ are looked at.

A layer is a snapshot, or what a sandbox has changed over those that it was restored from. Layers that both
trees have in common are not compared, and of the others the entries are, which unpacking has written down.
"""

from __future__ import annotations

import os

from ..fork.trees import (
    MOST_ENTRIES,
    MOST_NAMES,
    Budget,
    entry_below,
    is_directory,
    open_below,
    pieces_of,
    too_many,
)
from ..launcher.helpers.layers import GONE
from . import layers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Protocol

    from ..fork.trees import Entry, Index, StreamTree

    class Layer(Protocol):
        """The entries of a snapshot or a sandbox, and its removals from the layers below.

        Attributes:
            directories: Those in which it has something, relative to the root.
        """

        directories: Collection[str]

        def names(self, directory: str) -> Mapping[str, object]:
            """Return the names in a directory; equal values stand for equal entries."""
            ...

        def get(self, directory: str, name: str) -> Entry | None:
            """Return an entry; that of what is removed has the kind `GONE`."""
            ...

        def pieces(self, path: str) -> Iterator[bytes]:
            """Yield the content of a file that it has."""
            ...


MOST_BYTES = 2 * (MOST_ENTRIES * 64 + MOST_NAMES)
"""Of the written entries of all layers of a merge, which are read at once."""


class UnpackedLayer:
    """A snapshot that is unpacked, and held; its files are read where they are.

    Args:
        most_bytes: That its entries may take.

    Attributes:
        size: Bytes that they take.

    Raises:
        ResourceExhausted: It has too many entries.
        FileNotFoundError: Its entries are not written down.
    """

    def __init__(self, place: str, most_bytes: int) -> None:
        entries = layers.entries_of(place, most_bytes)
        if entries is None:
            raise too_many()
        self.packed, self.size = entries, sum(map(len, entries.values()))
        self.directories: Collection[str] = entries.keys()
        self._names: dict[str, dict[str, bytes]] = {}
        self._fd = os.open(layers.tree_of(place), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self, directory: str) -> dict[str, bytes]:
        if directory not in self._names:
            packed = self.packed.get(directory)
            self._names[directory] = {} if packed is None else layers.unpack_directory(packed)
        return self._names[directory]

    def get(self, directory: str, name: str) -> Entry | None:
        packed = self.names(directory).get(name)
        return None if packed is None else layers.unpack_entry(packed)

    def pieces(self, path: str) -> Iterator[bytes]:
        return pieces_of(self._fd, path)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class StreamLayer:
    """A layer from a stream.

    Args:
        tree: Of what is at `top`; relative to it.
        top: Path of a directory, relative to the root; empty for the root.
    """

    def __init__(self, tree: StreamTree, top: str = "") -> None:
        self._tree, self._top = tree, f"/{top}" if top else ""
        self._entries: dict[str, dict[str, Entry]] = {}
        for path, entry in tree.entries.items():
            directory, _, name = (self._top + path).rstrip("/").rpartition("/")
            if name:
                self._entries.setdefault(directory[1:], {})[name] = entry
        self.directories: Collection[str] = self._entries.keys()

    def names(self, directory: str) -> dict[str, Entry]:
        return self._entries.get(directory, {})

    def get(self, directory: str, name: str) -> Entry | None:
        return self.names(directory).get(name)

    def pieces(self, path: str) -> Iterator[bytes]:
        return self._tree.pieces(path[len(self._top) :])


class Removal:
    """A layer that removes one path."""

    def __init__(self, path: str) -> None:
        directory, _, self._name = path.rpartition("/")
        self.directories: Collection[str] = (directory,)

    def names(self, directory: str) -> dict[str, Entry]:
        return {self._name: (GONE, 0, 0, b"")} if directory in self.directories else {}

    def get(self, directory: str, name: str) -> Entry | None:
        return self.names(directory).get(name)

    def pieces(self, path: str) -> Iterator[bytes]:
        raise NotImplementedError(path)  # it has no file


class View:
    """The files that layers show: of each path the uppermost entry.

    Args:
        pile: The lowest first.
        image: Descriptor of the directory that they lie over; -1: of none.
    """

    def __init__(self, pile: list[Layer], image: int) -> None:
        self.pile, self._image = pile, image

    def get(self, path: str) -> Entry | None:
        """Return the entry of what is at `path`, relative to the root."""
        directory, _, name = path.rpartition("/")
        way = [(at.rpartition("/")[0], at.rpartition("/")[2]) for at in _above(path)]
        for each in reversed(self.pile):
            entry = each.get(directory, name)
            if entry is not None:
                return None if entry[0] == GONE else entry
            for place in way:
                above = each.get(*place)
                if above is not None and not is_directory(above):
                    return None  # it hides all that is lower
        return None if self._image < 0 else entry_below(self._image, path)

    def of_image(self, path: str) -> Iterator[str]:
        """Yield what the image has below `path`, also where layers hide it."""
        if self._image < 0 or not is_directory(entry_below(self._image, path)):
            return
        fd = open_below(self._image, path)
        try:
            for directory, _fd, entries in layers.walk(f"/proc/self/fd/{fd}/."):
                for name in entries:
                    yield f"{path}/{directory}/{name}" if directory else f"{path}/{name}"
        finally:
            os.close(fd)

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        directory, _, name = path.rpartition("/")
        for each in reversed(self.pile):
            if each.get(directory, name) is not None:
                return each.pieces(f"/{path}")
        return pieces_of(self._image, path)


class Part:
    """The part of a view that differs from another one; see `trees.Compared`.

    Args:
        top: Path of the directory that is compared, relative to the root; empty for the root.
        paths: Those that may differ, relative to the root.
    """

    def __init__(self, view: View, top: str, paths: set[str]) -> None:
        self._view, self._top = view, f"{top}/" if top else ""
        self.is_absent = bool(top) and not is_directory(view.get(top))
        self.entries: Index = {}
        for path in paths:
            entry = view.get(path)
            if entry is not None:
                self.entries[f"/{path[len(self._top) :]}"] = entry

    def get(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def pieces(self, path: str) -> Iterator[bytes]:
        return self._view.pieces(self._top + path[1:])


def compare(before: View, after: View, top: str) -> tuple[Part, Part]:
    """Compare a directory in two views.

    Raises:
        ResourceExhausted: Too much differs.
    """
    budget, found = Budget(), set[str]()

    def add(path: str) -> None:
        if path not in found:
            budget.take(1, len(path))
            found.add(path)

    piles = before.pile, after.pile
    common = 0
    while common < min(map(len, piles)) and piles[0][common] is piles[1][common]:
        common += 1
    own = piles[0][common:], piles[1][common:]
    for path in _named(*own, top):
        add(path)
    replaced = {path for path in found if _is_replaced(path, own, before, after)}
    above = (top, *_above(top)) if top else ()
    if any(_is_replaced(path, own, before, after) for path in above):
        replaced.add(top)  # its removal is an entry of a directory above it
    for path in replaced:
        for below in before.of_image(path):
            add(below)
    for path in _below(replaced, {*piles[0], *piles[1]}):
        add(path)
    for path in [*found]:
        found.update(each for each in _above(path) if len(each) > len(top))
    return Part(before, top, found), Part(after, top, found)


def _named(before: list[Layer], after: list[Layer], top: str) -> Iterator[str]:
    """Yield what the layers of either side have, but for what the lowest ones have both."""
    start = f"{top}/" if top else ""
    lowest = before[0] if before else None, after[0] if after else None
    for directory in {place for each in (*before, *after) for place in each.directories}:
        if directory != top and not directory.startswith(start):
            continue
        place = f"{directory}/" if directory else ""
        for name in _differing(lowest, directory):
            yield place + name
        for each in (*before[1:], *after[1:]):
            for name in each.names(directory):
                yield place + name


def _differing(both: tuple[Layer | None, Layer | None], directory: str) -> Iterable[str]:
    first, second = both
    if (
        isinstance(first, UnpackedLayer)
        and isinstance(second, UnpackedLayer)
        and first.packed.get(directory) == second.packed.get(directory)
    ):
        return ()
    old, new = (each.names(directory) if each is not None else {} for each in both)
    return [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]


def _is_replaced(
    path: str, own: tuple[list[Layer], list[Layer]], before: View, after: View
) -> bool:
    """Return whether a side has removed what was at `path`, and one has a directory there."""
    directory, _, name = path.rpartition("/")
    entries = [each.get(directory, name) for pile in own for each in pile]
    if all(entry is None or is_directory(entry) for entry in entries):
        return False
    return is_directory(before.get(path)) or is_directory(after.get(path))


def _below(replaced: set[str], pile: set[Layer]) -> Iterator[str]:
    """Yield what layers have below these paths, shown or hidden."""
    if not replaced:
        return
    for each in pile:
        for directory in each.directories:
            if directory in replaced or not replaced.isdisjoint(_above(directory)):
                for name in each.names(directory):
                    yield f"{directory}/{name}"


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


__all__ = ["Part", "Removal", "StreamLayer", "UnpackedLayer", "View", "compare"]
