"""Search results and changes in the files of a sandbox.

A helper inside reports them as JSON lines: untrusted input.
"""

from __future__ import annotations

from ..errors import BadJson
from .base import checks, jsonform
from .base.model import Model
from .base.record import dataclass
from .files import FileInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MOST_LINE_BYTES = 64 << 10
"""Of a line that a helper inside writes: a path and a line of text, escaped. Whoever reads a line has
the interpreter for itself meanwhile."""
CHANGES = (
    "watching", "created", "written", "modified", "attributes", "deleted", "moved_from", "moved_to",
    "overflow",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class FoundFiles(Model):
    """Paths that match.

    Attributes:
        truncated: There are more than were asked for.
        too_deep: Directories 500 levels below and deeper were not looked into.
    """

    items: tuple[FileInfo, ...]
    truncated: bool
    too_deep: bool = False

    def __iter__(self) -> Iterator[FileInfo]:
        """Each that was found."""
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, eq=False, repr=False)
class FoundLine(Model):
    """A line that matched a search.

    Attributes:
        line, column: Counted from 1, the column in bytes.
        text: The line, its first 2,000 bytes at most.
    """

    path: str
    line: int
    column: int
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class FoundLines(Model):
    """Lines in which something was found.

    Attributes:
        truncated: There are more than were asked for.
        too_deep: Directories 500 levels below and deeper were not looked into.
    """

    items: tuple[FoundLine, ...]
    truncated: bool
    too_deep: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Replaced(Model):
    """How often something was replaced in one file.

    Attributes:
        error: Why the file is as it was; None where nothing is wrong.
    """

    path: str
    replacements: int
    error: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class AllReplaced(Model):
    """The same for each file that was named."""

    items: tuple[Replaced, ...]
    truncated: bool


@dataclass(frozen=True, eq=False, repr=False)
class FileChange(Model):
    """Something that changed where somebody watches.

    Attributes:
        kind: One of `CHANGES`. `watching` is the first: whatever comes after it is told. After
            `overflow` there was more than could be told: look again.
        cookie: The same number for the two halves of one move.
    """

    kind: str
    path: str
    is_directory: bool = False
    cookie: int | None = None

    def __post_init__(self) -> None:
        checks.choice(self.kind, "kind", CHANGES, ", ".join(CHANGES))


def read_answer(text: bytes) -> dict[str, Any] | None:
    """The JSON form of what was found; None where the helper was ended before it was done,
    or wrote what no helper writes.
    """
    parts = text.splitlines()
    if any(len(part) > MOST_LINE_BYTES for part in parts):
        return None
    try:
        lines = [jsonform.loads(part) for part in parts]
    except BadJson:  # it was killed in the middle of a line
        return None
    if not lines or not all(isinstance(line, dict) for line in lines) or not lines[-1].get("done"):
        return None
    said = {name: bool(lines[-1][name]) for name in ("truncated", "too_deep") if name in lines[-1]}
    return {"items": lines[:-1], **said}
