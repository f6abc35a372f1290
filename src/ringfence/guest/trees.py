"""Operations on whole trees inside a guest, run by a process of the guest's user."""

from __future__ import annotations

import shutil

from ..launcher.helpers import attributes, finding, trees, watching

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pack(stream: int, path: str, options: str = "") -> None:
    """Write the tree at `path` to `stream`, as tar."""
    trees.pack(stream, path, one_file_system=False, **trees.packing(options))


def unpack(stream: int, path: str) -> None:
    """Unpack a tar stream below `path`, created if need be."""
    trees.unpack(stream, path, one_file_system=False)


def remove(path: str) -> None:
    """Remove a directory and all below it."""
    trees.remove(path, one_file_system=False)


def move(source: str, target: str) -> None:
    """Move across file systems: copied, then removed."""
    shutil.move(source, target)


OPERATIONS: dict[str, Any] = {
    "out": pack,
    "in": unpack,
    "remove": remove,
    "move": move,
    "find": finding.find,
    "search": finding.search,
    "replace": finding.replace,
    "watch": watching.watch,
    "attributes": attributes.attributes,
}
