"""Inode table of a FUSE server: the numbers known to a guest's kernel, and their names.

A number stands for a name in a directory, not for a file that is held open: so the table can be
written down with a machine, and read again by who serves the one that is continued from it.
"""

from __future__ import annotations

import errno
import posix as os

from ...linux import files, fuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WITHIN = files.RESOLVE_BENEATH | files.RESOLVE_NO_SYMLINKS | files.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_PATH | os.O_DIRECTORY


def text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


class Node:
    """A name that the guest's kernel references.

    Attributes:
        stamp: Identity of the file at lookup; () where unused.
    """

    __slots__ = ("lookups", "name", "parent", "stamp")

    def __init__(
        self, parent: int, name: str, lookups: int = 0, stamp: tuple[int, ...] = ()
    ) -> None:
        self.parent, self.name, self.lookups, self.stamp = parent, name, lookups, stamp


class Nodes:
    """The names below one directory. `root` is its descriptor."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._nodes: dict[int, Node] = {fuse.ROOT: Node(0, "")}
        self._numbers: dict[tuple[int, str], int] = {}
        self._last = fuse.ROOT

    def path(self, number: int) -> str:
        """From the root; "." is the root itself.

        Raises:
            OSError: ESTALE if it has no name any more, or never had one.
        """
        parts: list[str] = []
        while number != fuse.ROOT:
            node = self._nodes.get(number)
            if node is None or not node.parent:
                raise OSError(errno.ESTALE, "has no name any more")
            parts.append(node.name)
            number = node.parent
        return "/".join(reversed(parts)) or "."

    def directory(self, number: int) -> int:
        """A descriptor of a directory; no link is followed on the way to it."""
        return files.openat2(self.root, self.path(number), _DIRECTORY, resolve=_WITHIN)

    def place(self, number: int) -> tuple[int, str]:
        """A descriptor of the directory that a file is in, and its name there."""
        parent, _, name = self.path(number).rpartition("/")
        return files.openat2(self.root, parent or ".", _DIRECTORY, resolve=_WITHIN), name

    def look(self, parent: int, name: str, stamp: tuple[int, ...] = ()) -> int:
        """The number of a name, which the guest's kernel now knows once more.

        A name that has come to stand for something else gets another number.
        """
        number = self._numbers.get((parent, name))
        if number is not None and self._nodes[number].stamp != stamp:
            self.gone(parent, name)
            number = None
        if number is None:
            self._last += 1
            number = self._numbers[parent, name] = self._last
            self._nodes[number] = Node(parent, name, 0, stamp)
        self._nodes[number].lookups += 1
        return number

    def stamp(self, number: int) -> tuple[int, ...]:
        """Return the identity of the file at the lookup of that number."""
        node = self._nodes.get(number)
        return node.stamp if node is not None else ()

    def forget(self, number: int, lookups: int) -> None:
        """The guest's kernel knows it so often less."""
        node = self._nodes.get(number)
        if node is None or number == fuse.ROOT:
            return
        node.lookups -= lookups
        if node.lookups <= 0:
            del self._nodes[number]
            if self._numbers.get((node.parent, node.name)) == number:
                del self._numbers[node.parent, node.name]

    def gone(self, parent: int, name: str) -> None:
        """A name was removed. Whoever still has the number has no file for it, unless it is open."""
        number = self._numbers.pop((parent, name), 0)
        if number:
            self._nodes[number].parent = 0

    def moved(self, old: tuple[int, str], new: tuple[int, str]) -> None:
        """A name was given up for another, whose file is gone."""
        number = self._numbers.pop(old, 0)
        self.gone(*new)
        if number:
            self._nodes[number].parent, self._nodes[number].name = new
            self._numbers[new] = number

    def written(self) -> dict[str, Any]:
        known = [
            (number, node.parent, node.name, node.lookups) for number, node in self._nodes.items()
        ]
        return {"last": self._last, "nodes": known}

    def read(self, said: dict[str, Any]) -> None:
        """Load the output of `written` in place of the current table."""
        self._last = said["last"]
        self._nodes = {
            number: Node(parent, name, lookups) for number, parent, name, lookups in said["nodes"]
        }
        self._numbers = {
            (node.parent, node.name): number for number, node in self._nodes.items() if node.parent
        }
