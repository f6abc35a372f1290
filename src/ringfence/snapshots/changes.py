"""Comparison of two snapshot streams: which paths differ, and a unified diff of text files."""

from __future__ import annotations

import difflib
import io
import os
import tempfile
import time

from ..fork.trees import entry_below, index, open_below
from ..launcher.helpers.layers import GONE
from ..launcher.helpers.tars import Reader
from ..model.changes import ADDED, CHANGED, REMOVED, Changes, PathChange
from ..model.files import DIRECTORY, FILE
from ..model.session import Snapshot
from .catalogue import Catalogue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    from ..fork.trees import Entry, Index
    from ..model.spec import SandboxSpec

    Sides = dict[str, tuple[Entry | None, Entry | None]]

MOST_ITEMS = 10_000
MOST_DIFF_CHARACTERS = 1 << 20
_MOST_TEXT_BYTES = 256 << 10
_MOST_TEXTS_BYTES = 16 << 20  # of both sides
_MOST_LINES = 1000  # difflib's worst case is cubic, and a guest chooses the lines
_DIFF_S = 2.0
_NOTHING: Entry = ("", 0, 0, b"")


class Moment(Catalogue):
    """A catalogue of one snapshot, in a file without a name: it is gone with this process."""

    def save(
        self,
        stream: int,
        snapshot_id: str,
        spec: SandboxSpec,
        most_bytes: int,
        *,
        memory: str = "",
        lower: tuple[str, ...] = (),
        is_durable: bool = False,
        **facts: Any,
    ) -> Snapshot:
        del spec, memory, lower, is_durable
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self.file: BinaryIO = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115
            size, _digest = self._copy(self.file, stream, most_bytes)
        except OSError as exc:
            raise self._not_saved(exc) from exc
        return Snapshot(id=snapshot_id, backend=self.backend, size_bytes=size, **facts)

    def delete(self, snapshot_id: str) -> None:
        del snapshot_id  # without a name it deletes itself


def compare(
    before: list[int],
    after: list[int],
    *,
    is_layer: bool,
    root: int,
    is_mounted: Callable[[str], bool],
) -> Changes:
    """Compare two trees, each of streams that lie over one another; they are read twice each.

    Args:
        before, after: Descriptors of tar streams, as snapshots store them, the lowest first.
        is_layer: `.wh.NAME` also in the lowest removes NAME from what is in `root`.
        root: Descriptor of the directory over which both were laid; -1: there is none.
        is_mounted: True for paths that are no part of either.

    Raises:
        ResourceExhausted: One has more than 250,000 entries.
    """
    olds, news = ([*_indexes(each, is_layer=is_layer)] for each in (before, after))
    old, new = merged(olds), merged(news)
    items: list[PathChange] = []
    sides: Sides = {}
    is_complete = True
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path), new.get(path)
        if was == now or is_mounted(path):
            continue
        was, now = (_present(each, root, path) for each in (was, now))
        if was == now:
            continue
        if len(items) == MOST_ITEMS:
            is_complete = False
            break
        shown = now or was
        assert shown is not None
        change = ADDED if was is None else REMOVED if now is None else CHANGED
        items.append(PathChange(path, change, shown[0], shown[1]))
        sides[path] = was, now
    text, is_whole = _diff(
        sides, [*zip(before, olds, strict=True), *zip(after, news, strict=True)], root
    )
    return Changes(tuple(items), is_complete and is_whole, text)


def _indexes(streams: list[int], *, is_layer: bool) -> Iterator[Index]:
    for number, each in enumerate(streams):
        yield index(each, is_layer=is_layer or number > 0)


def merged(indexes: list[Index]) -> Index:
    """Return the entries of trees that lie over one another, the lowest first."""
    found = dict(indexes[0])
    for each in indexes[1:]:
        # What was a directory takes along what was in it.
        gone = {path for path, entry in each.items() if entry[0] != DIRECTORY and path in found}
        if gone:
            found = {path: found[path] for path in found if gone.isdisjoint(_above(path))}
        found.update(each)
    return found


def _above(path: str) -> Iterator[str]:
    while (path := path.rpartition("/")[0]) not in ("", "/"):
        yield path


def _present(entry: Entry | None, root: int, path: str) -> Entry | None:
    if entry is None:
        return entry_below(root, path) if root >= 0 else None
    return None if entry[0] == GONE else entry


def _diff(sides: Sides, streams: list[tuple[int, Index]], root: int) -> tuple[str, bool]:
    """The unified diff of the text files among `sides`, and whether it is whole."""
    wanted = {
        each[3]: path
        for path, both in sides.items()
        for each in both
        if each and each[0] == FILE and each[1] <= _MOST_TEXT_BYTES
    }
    texts = _texts(wanted, streams, root)
    pieces: list[str] = []
    size, until = 0, time.monotonic() + _DIFF_S
    for path, (was, now) in sides.items():
        if FILE not in {each[0] for each in (was, now) if each}:
            continue
        both = [b"" if each is None else texts.get(each[3]) for each in (was, now)]
        piece = _of_file(path, both, was, now, quick=time.monotonic() > until)
        size += len(piece)
        if size > MOST_DIFF_CHARACTERS:
            return "".join(pieces), False
        pieces.append(piece)
    return "".join(pieces), True


def _texts(
    wanted: dict[bytes, str], streams: list[tuple[int, Index]], root: int
) -> dict[bytes, bytes]:
    """Contents by digest, which other names of a file share; 16 MiB at most."""
    found: dict[bytes, bytes] = {}
    left = _MOST_TEXTS_BYTES
    for fd, known in streams:
        os.lseek(fd, 0, os.SEEK_SET)
        with Reader(fd) as tar:
            for member in tar:
                digest = known.get(member.name.removeprefix("."), _NOTHING)[3]
                is_new = digest in wanted and digest not in found
                if is_new and member.isreg() and member.size <= left:
                    found[digest] = b"".join(tar.content())
                    left -= member.size
    for digest, path in wanted.items() if root >= 0 else ():
        entry = None if digest in found else entry_below(root, path)
        if entry is not None and entry[3] == digest and entry[1] <= left:
            fd = open_below(root, path)
            try:
                with open(f"/proc/self/fd/{fd}", "rb") as file:
                    found[digest] = file.read(entry[1])
            finally:
                os.close(fd)
            left -= entry[1]
    return found


def _of_file(
    path: str, texts: list[bytes | None], was: Entry | None, now: Entry | None, *, quick: bool
) -> str:
    shown = path if path.isprintable() else ascii(path)[1:-1]
    old_name = f"a{shown}" if was else "/dev/null"
    new_name = f"b{shown}" if now else "/dev/null"
    lines = [_lines(text) for text in texts]
    if lines[0] is None or lines[1] is None:
        return f"Binary files {old_name} and {new_name} differ\n"
    if lines[0] == lines[1]:
        return ""  # of another mode, or kind
    hunks = [f"--- {old_name}\n", f"+++ {new_name}\n"]
    if quick or max(map(len, (lines[0], lines[1]))) > _MOST_LINES:
        hunks += _replacement(lines[0], lines[1])
    else:
        hunks += list(difflib.unified_diff(lines[0], lines[1]))[2:]
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in hunks
    )


def _lines(text: bytes | None) -> list[str] | None:
    """The lines of a text; None for what is not UTF-8 text."""
    if text is None or b"\0" in text:
        return None
    try:
        # Not str.splitlines, which ends lines at form feeds and U+2028 too: `patch` does not.
        return io.StringIO(text.decode(), newline="\n").readlines()
    except UnicodeDecodeError:
        return None


def _replacement(old: list[str], new: list[str]) -> list[str]:
    """A hunk that replaces the lines between a common beginning and end."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    gone, come = old[start : len(old) - end], new[start : len(new) - end]
    ranges = [f"{start + bool(each)},{len(each)}" for each in (gone, come)]
    head = f"@@ -{ranges[0]} +{ranges[1]} @@\n"
    return [head, *(f"-{line}" for line in gone), *(f"+{line}" for line in come)]
