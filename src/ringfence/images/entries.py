"""The entries of a tar stream, read strictly: one that is not what it says is refused.

Layers have many small files, so what is done for each entry counts: the headers that layers really
have are read here, without the general reader's search for every dialect there ever was.

Source: pax(1) in POSIX.1-2008, "ustar Interchange Format"; tar(5) of libarchive for GNU's long names.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_BLOCK = 512
_END = bytes(_BLOCK)
_SPACE = 0x20
_MOST_EXTRA = 1 << 20  # bytes of an extended header or a long name
_REGULAR, _LINK, _SYMLINK, _CHARACTER, _BLOCK_DEVICE, _DIRECTORY, _FIFO, _CONTIGUOUS = b"01234567"
_EXTENDED, _GLOBAL, _LONG_NAME, _LONG_LINK = b"xgLK"
_KINDS = {
    0: stat.S_IFREG,
    _REGULAR: stat.S_IFREG,
    _CONTIGUOUS: stat.S_IFREG,
    _SYMLINK: stat.S_IFLNK,
    _CHARACTER: stat.S_IFCHR,
    _BLOCK_DEVICE: stat.S_IFBLK,
    _DIRECTORY: stat.S_IFDIR,
    _FIFO: stat.S_IFIFO,
    _LINK: 0,
}

_WITH_TARGET = (0, stat.S_IFLNK)


class DamagedError(Exception):
    """It is no tar stream, or not one of layers; the text says why."""


@dataclass(slots=True)
class Entry:
    """A member of the archive.

    Attributes:
        kind: As in `stat.S_IFMT`; 0 for a hard link to `target`, an earlier member.
        size: Bytes that follow; 0 unless it is a file.
    """

    name: str
    kind: int
    mode: int
    size: int
    modified_ns: int
    target: str


class Source(Protocol):
    """Where the bytes come from."""

    def read(self) -> bytes:
        """Some bytes, of any number; none at the end."""
        ...


class Entries:
    """Reads one stream: `next`, and for a file `copy` before the next one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._piece, self._at = memoryview(b""), 0
        self._left = 0  # of the current entry's content and what fills its last block
        self._size = 0  # of the current entry's content
        self._for_all: dict[str, str] = {}

    def next(self) -> Entry | None:
        """The next entry; None at the end.

        Raises:
            DamagedError: The stream is not what it should be.
        """
        extra: dict[str, str] = {}
        while True:
            self._skip()
            header = self._exactly(_BLOCK)
            if header == _END:
                return None
            _check(header)
            kind = header[156]
            if kind == _EXTENDED:
                extra = {**extra, **_records(self._extra(header))}
            elif kind == _GLOBAL:
                self._for_all.update(_records(self._extra(header)))
            elif kind == _LONG_NAME:
                extra = {"path": _text(self._extra(header)), **extra}
            elif kind == _LONG_LINK:
                extra = {"linkpath": _text(self._extra(header)), **extra}
            else:
                return self._entry(header, {**self._for_all, **extra} if self._for_all else extra)

    def copy(self, fd: int) -> None:
        """Write the content of the entry that `next` gave to a file."""
        left, self._left = self._size, self._left - self._size
        while left:
            if self._at == len(self._piece):
                self._fill()
            taken = os.write(fd, self._piece[self._at : self._at + left])
            self._at += taken
            left -= taken

    def rest(self) -> None:
        """Read what follows the end of the archive: it belongs to the digest."""
        while self._source.read():
            pass

    def _entry(self, header: bytes, extra: Mapping[str, str]) -> Entry:
        kind = _KINDS.get(header[156])
        if kind is None or (extra and any(name.startswith("GNU.sparse") for name in extra)):
            raise DamagedError(
                f"it has an entry of type {chr(header[156])!r}, which is not allowed in a layer"
            )
        name = extra.get("path") or _name(header)
        if kind == stat.S_IFREG and name.endswith("/"):
            kind = stat.S_IFDIR  # as tar had it before there were directories
        size = 0
        if kind == stat.S_IFREG:
            size = int(extra["size"]) if "size" in extra else _number(header[124:136])
            if size < 0:
                raise DamagedError("it has a file of negative size")
        self._size, self._left = size, size + -size % _BLOCK
        target = ""
        if kind in _WITH_TARGET:
            target = extra.get("linkpath") or _text(header[157:257])
        modified_ns = _number(header[136:148]) * 10**9
        if "mtime" in extra:
            modified_ns = _nanoseconds(extra["mtime"])
        return Entry(name, kind, _number(header[100:108]) & 0o7777, size, modified_ns, target)

    def _extra(self, header: bytes) -> bytes:
        size = _number(header[124:136])
        if not 0 <= size <= _MOST_EXTRA:
            raise DamagedError(f"it has a header of {size} bytes")
        self._left = -size % _BLOCK
        return self._exactly(size)

    def _skip(self) -> None:
        left, self._left = self._left, 0
        while left:
            if self._at == len(self._piece):
                self._fill()
            taken = min(left, len(self._piece) - self._at)
            self._at += taken
            left -= taken

    def _exactly(self, size: int) -> bytes:
        end = self._at + size
        if end <= len(self._piece):
            found = bytes(self._piece[self._at : end])
            self._at = end
            return found
        found = bytes(self._piece[self._at :])
        while len(found) < size:
            self._fill()
            self._at = min(size - len(found), len(self._piece))
            found += self._piece[: self._at]
        return found

    def _fill(self) -> None:
        piece = self._source.read()
        if not piece:
            raise DamagedError("it ends too early")
        self._piece, self._at = memoryview(piece), 0


def _check(header: bytes) -> None:
    try:
        told = _number(header[148:156])
    except DamagedError:
        told = -1
    # The sum as if its own field were eight spaces.
    if told != sum(header) - sum(header[148:156]) + 256:
        raise DamagedError("not a tar archive, or a damaged header")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        return f"{_text(header[345:500])}/{name}"
    return name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    if field[-1] <= _SPACE:  # as nearly all are
        try:
            return int(field[:-1], 8)
        except ValueError:
            pass
    if field[0] & 0x80:  # GNU: binary, of which the first bit says only that it is
        value = int.from_bytes(field)
        return (
            value - (1 << 8 * len(field)) if field[0] & 0x40 else value ^ (1 << 8 * len(field) - 1)
        )
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError as exc:
        raise DamagedError(f"{field!r} is not a number") from exc


def _records(data: bytes) -> dict[str, str]:
    """Of an extended header: `LENGTH NAME=VALUE` lines."""
    found, at = {}, 0
    while at < len(data) and data[at]:
        digits = data[at : data.find(b" ", at, at + 20)]
        if not digits.isdigit() or data[at + int(digits) - 1 : at + int(digits)] != b"\n":
            raise DamagedError("it has an extended header that is damaged")
        record = data[at + len(digits) + 1 : at + int(digits) - 1]
        name, is_one, value = record.partition(b"=")
        if not is_one:
            raise DamagedError("it has an extended header that is damaged")
        # With a NUL in it no file can have it, and whoever makes the file says so.
        found[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at += int(digits)
    return found


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    return int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0") or 0)
