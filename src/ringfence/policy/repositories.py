"""Search for git directories below a mount: their hooks and settings run when a user runs git
there.
"""

from __future__ import annotations

import os

from ..errors import InvalidRequest

_DEPTH = 3  # directories between the mount and a repository
_MOST_LOOKED_AT = 20_000
_MOST_FOUND = 100
# Dependencies and caches, by the thousand: nobody works in a repository there.
_SKIPPED = frozenset(("node_modules", "__pycache__", ".venv", "venv", ".cache", ".tox", "target"))
_MARKS = frozenset(("HEAD", "objects", "refs"))
_HAVE_MORE = ("modules", "worktrees")  # submodules, and linked work trees


class Found:
    """Git directories found, by paths relative to the mount.

    Attributes:
        directories: Those that git keeps a repository in, or a linked work tree's part of one.
        links: Files `.git` that name such a directory, in submodules and linked work trees.
    """

    def __init__(self) -> None:
        self.directories: list[str] = []
        self.links: list[str] = []


def look(source: str) -> Found:
    """Find those below the host directory `source`, a few levels deep; no symlink is followed.

    Raises:
        InvalidRequest: There is too much to look at, or to protect.
    """
    found = Found()
    todo: list[tuple[str, int, bool]] = [("", 0, False)]
    for looked_at, (path, depth, is_inside) in enumerate(todo):
        if looked_at == _MOST_LOOKED_AT or len(found.directories) + len(found.links) > _MOST_FOUND:
            raise InvalidRequest(
                f"{source} has too many directories or repositories to protect the git settings of each",
                field="protect",
                hint="mount a smaller directory, or leave nested repositories writable with unprotect `nested`",
            )
        names, below = _list(os.path.join(source, path))
        is_git = names.issuperset(_MARKS) or (is_inside and names.issuperset(("HEAD", "commondir")))
        if is_git:
            found.directories.append(path)
            below = [name for name in below if name in _HAVE_MORE]
        elif ".git" in names and ".git" not in below and path:
            found.links.append(f"{path}/.git")
        is_inside = is_inside or is_git
        for name in below:
            if is_inside or name == ".git" or (depth < _DEPTH and name not in _SKIPPED):
                todo.append((f"{path}/{name}".lstrip("/"), depth + 1, is_inside))
    return found


def _list(directory: str) -> tuple[set[str], list[str]]:
    """All names in it, and those of directories; nothing where it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            kinds = {each.name: each.is_dir(follow_symlinks=False) for each in entries}
    except OSError:
        return set(), []
    return set(kinds), [name for name, is_dir in kinds.items() if is_dir]
