"""The plan of a three-way merge of trees. Pure, but for the contents that it asks the sides for."""

from __future__ import annotations

from ..errors import ResourceExhausted
from ..model.changes import ADDED, CHANGED, REMOVED, PathChange
from ..model.files import FILE, OTHER, SYMLINK
from ..model.fork import MergeConflict, Merged
from .text import MOST_TEXT_BYTES, TextMerger
from .trees import MOST_BYTES, is_directory, read, too_large

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .trees import Changing, Compared, Entry, Side

_SHOWN_BYTES = 64 << 10
_MOST_SHOWN_BYTES = 8 << 20  # of all conflicts; further ones have no texts
_MOST_CONFLICTS = 10_000
_GONE_THERE = "it was removed in the target and changed in the branch"
_GONE_HERE = "it was changed in the target and removed in the branch"


class Write:
    """A file, directory or symlink that the target is to have.

    Attributes:
        entry: Kind, size, mode and digest or link target.
        before: What the target has there now.
        source: Side and path of the content of a file.
        content: Content of a merged file, in place of `source`.
    """

    def __init__(
        self,
        entry: Entry,
        before: Entry | None,
        source: tuple[Side, str] | None = None,
        content: bytes = b"",
    ) -> None:
        self.entry, self.before, self.source, self.content = entry, before, source, content

    def pieces(self) -> Iterator[bytes]:
        if self.source is None:
            return iter((self.content,))
        return self.source[0].pieces(self.source[1])


class Plan:
    """Plan of what a merge does to the target.

    Attributes:
        writes: By path; a directory comes before what is in it.
        removals: Path to what the target has there now, which still has to be there.

    Args:
        base: The tree that both sides come from.
        ours: The target.
        theirs: The branch.
        prefer: `ours` or `theirs`: the side that wins where there is a conflict; None: that is told. Text
            that merges without one is merged.
    """

    def __init__(
        self, base: Compared, ours: Changing, theirs: Compared, prefer: str | None = None
    ) -> None:
        self._base, self._ours, self._theirs, self._prefer = base, ours, theirs, prefer
        self.writes: dict[str, Write] = {}
        self.removals: dict[str, Entry] = {}
        self.conflicts: dict[str, MergeConflict] = {}
        self._sides: tuple[Side, Side, Side] = (base, ours, theirs)
        self._merger, self._shown_bytes = TextMerger(), 0
        self._make()

    def outcome(self, *, is_applied: bool) -> Merged:
        """Describe the plan, applied or not."""
        changes = [
            PathChange(
                path[1:], ADDED if each.before is None else CHANGED, each.entry[0], each.entry[1]
            )
            for path, each in self.writes.items()
        ]
        changes += [
            PathChange(path[1:], REMOVED, entry[0], entry[1])
            for path, entry in self.removals.items()
            if path not in self.writes
        ]
        return Merged(
            is_applied,
            tuple(sorted(changes, key=lambda each: each.path)),
            tuple(self.conflicts[path] for path in sorted(self.conflicts)),
        )

    # -- deciding ---------------------------------------------------------------------------

    def _make(self) -> None:
        old, new = self._base.entries, self._theirs.entries
        differing = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
        differing.discard("/")
        self._ours.look_at(differing)
        moved = self._renames(old, new, differing)
        sources = set(moved.values())
        # Removals first: what replaces a directory has to know that its content goes.
        for path in sorted(differing, reverse=True):
            if path not in new:
                self._remove(path, sources)
        for path in sorted(differing):
            if path in new:
                self._write(path, moved)
        for path in [*self.removals]:
            if path not in self.writes and is_directory(self.removals[path]):
                self._keep_if_used(path)
        self.writes = dict(sorted(self.writes.items()))
        # Each name of a file with several has the content of its own here.
        if sum(each.entry[1] for each in self.writes.values()) > MOST_BYTES:
            raise too_large()

    def _renames(
        self, old: dict[str, Entry], new: dict[str, Entry], differing: set[str]
    ) -> dict[str, str]:
        """New paths of files that the branch moved without a change, to their old paths."""
        gone: dict[bytes, list[str]] = {}
        come: dict[bytes, list[str]] = {}
        for path in differing:
            side, entry = (gone, old[path]) if path not in new else (come, new[path])
            if (path not in new or path not in old) and entry[0] == FILE and entry[1]:
                side.setdefault(entry[3], []).append(path)
        return {
            come[digest][0]: paths[0]
            for digest, paths in gone.items()
            if len(paths) == 1 and len(come.get(digest, ())) == 1
        }

    def _remove(self, path: str, sources: set[str]) -> None:
        was, now = self._base.entries[path], self._ours.get(path)
        if now is None:
            return
        unchanged = now == was or (is_directory(was) and is_directory(now))
        if not unchanged and path in sources and now[0] == FILE:
            unchanged = True  # its change goes along to the new path
        if unchanged or self._prefer == "theirs":
            self.removals[path] = now
        else:
            self._conflict(path, _GONE_HERE)

    def _keep_if_used(self, path: str) -> None:
        """Keep a directory in which the target has something else."""
        if any(f"{path}/{name}" not in self.removals for name in self._ours.names(path)):
            del self.removals[path]

    def _write(self, path: str, moved: dict[str, str]) -> None:
        was, new = self._base.entries.get(path), self._theirs.entries[path]
        now = self._ours.get(path)
        if now == new:
            return
        if new[0] == OTHER:
            self._conflict(path, "it is not a file, directory or link")
            return
        source = moved.get(path)
        if source is not None and self._ours.get(source) is None and now is not None:
            was = self._base.entries[source]  # an earlier merge has moved it
        elif source is not None and now is None and self._take_change_along(path, source, new):
            return
        if now == was:
            self._take(path, new, now)
        elif self._is_content(was, now, new):
            assert was is not None
            assert now is not None
            self._merge(path, was, now, new)
        elif self._prefer == "theirs":
            self._take(path, new, now)
        elif is_directory(now) and is_directory(new):
            return  # both made it, or changed its mode: the target's is kept
        elif now is None:
            self._conflict(path, _GONE_THERE)
        else:
            how = "added" if was is None else "changed"
            self._conflict(path, f"both sides {how} it, each in another way")

    @staticmethod
    def _is_content(*sides: Entry | None) -> bool:
        return all(each is not None and each[0] == FILE for each in sides)

    def _take_change_along(self, path: str, source: str, new: Entry) -> bool:
        """Move the target's changed file where the branch moved the unchanged one."""
        was, now = self._base.entries[source], self._ours.get(source)
        if now is None or now[0] != FILE or now[3] == was[3]:
            return False
        mode = _mode(was, now, new)
        entry = (FILE, now[1], now[2] if mode is None else mode, now[3])
        if self._has_place(path):
            self.writes[path] = Write(entry, None, (self._ours, source))
        return True

    def _take(self, path: str, new: Entry, now: Entry | None) -> None:
        if is_directory(now) and not is_directory(new):
            left = {n for n in self._ours.names(path) if f"{path}/{n}" not in self.removals}
            if left:
                self._conflict(path, "the directory has other files in the target")
                return
            assert now is not None
            self.removals[path] = now
        elif now is not None and is_directory(new) and not is_directory(now):
            self.removals[path] = now
        if self._has_place(path):
            self.writes[path] = Write(new, now, (self._theirs, path))

    def _has_place(self, path: str) -> bool:
        """See to the directories above `path`; where one cannot be had, that is a conflict."""
        missing: dict[str, Write] = {}
        above = path.rpartition("/")[0]
        while above and above not in self.writes:
            there = self._ours.get(above)
            if is_directory(there):
                break
            if there is not None:
                self._conflict(path, f"{above[1:]} is not a directory in the target")
                return False
            entry = self._theirs.entries.get(above)
            if entry is None or not is_directory(
                entry
            ):  # a guest may have sent a stream that is no tree
                self._conflict(path, f"{above[1:]} is not a directory in the branch")
                return False
            missing[above] = Write(entry, None)
            above = above.rpartition("/")[0]
        self.writes.update(missing)
        return True

    def _merge(self, path: str, was: Entry, now: Entry, new: Entry) -> None:
        mode = _mode(was, now, new)
        if mode is None and self._prefer:
            mode = new[2] if self._prefer == "theirs" else now[2]
        if mode is None:
            self._conflict(path, "both sides changed its mode, each in another way")
        elif now[3] == new[3] or new[3] == was[3]:
            if mode != now[2]:
                entry = (FILE, now[1], mode, now[3])
                self.writes[path] = Write(entry, now, (self._ours, path))
        elif now[3] == was[3]:
            entry = (FILE, new[1], mode, new[3])
            self.writes[path] = Write(entry, now, (self._theirs, path))
        else:
            texts = [read(side, path, MOST_TEXT_BYTES) for side in self._sides]
            merged = self._merger.merge(texts[0], texts[1], texts[2])
            if merged is None and self._prefer == "theirs":
                self._take(path, (FILE, new[1], mode, new[3]), now)
            elif merged is None:
                self._conflict(path, self._merger.reason)
            elif merged != texts[1] or mode != now[2]:
                entry = (FILE, len(merged), mode, b"")
                self.writes[path] = Write(entry, now, content=merged)

    def _conflict(self, path: str, reason: str) -> None:
        if self._prefer == "ours":
            return
        if len(self.conflicts) >= _MOST_CONFLICTS:
            raise ResourceExhausted(
                f"there are more than {_MOST_CONFLICTS} conflicts",
                hint='prefer="ours" or "theirs" chooses a side',
                retryable=False,
            )
        texts: list[str | None] = [None] * len(self._sides)
        if self._shown_bytes < _MOST_SHOWN_BYTES:
            texts = [_shown(side, path) for side in self._sides]
            self._shown_bytes += sum(len(each or "") for each in texts)
        self.conflicts[path] = MergeConflict(path[1:], reason, *texts)


def _mode(was: Entry, now: Entry, new: Entry) -> int | None:
    """Merge three modes; None where both sides changed it."""
    if new[2] in (was[2], now[2]):
        return now[2]
    return new[2] if now[2] == was[2] else None


def _shown(side: Side, path: str) -> str | None:
    entry = side.get(path)
    if entry is not None and entry[0] == SYMLINK:
        return None
    data = read(side, path, _SHOWN_BYTES)
    try:
        return None if data is None or b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
