"""Tar streams, written and read at little cost for each file: `tarfile` takes 0.1 to 0.2 ms of processor.

What is common is written and read here; a header that is not (a long name, a negative time) is made by
`tarfile`. Read are ustar, pax and GNU's long names; files with holes are refused, as a few bytes say how
many zeros they have.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header".
"""

from __future__ import annotations

import io
import os
import tarfile
from functools import lru_cache
from tarfile import ReadError, TarInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_BLOCK = tarfile.BLOCKSIZE
_BUFFER = 1 << 20
_PIECE = 1 << 16
_ZEROS = bytes(_PIECE)
_END = bytes(2 * _BLOCK)
LARGEST_HEADER = 1 << 16  # two paths as long as Linux allows, in any encoding
_MOST_KNOWN = 64
_ENDS = bytes(5)
_POINT = ord(".")
_MOST_IN_A_ROW = 16  # extended headers before one member; two are the rule
_MOST_ID, _MOST_SIZE, _MOST_TIME = 8**7, 8**11, 1 << 62
_GNU_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_TEXTS = {"path": "name", "linkpath": "linkname"}
_NUMBERS = {"size": int, "uid": int, "gid": int, "mtime": float}


class Writer:
    """Writes members to a descriptor. As a context manager: left without an error, the stream is ended.

    Args:
        is_ours: `Reader` reads it: fractions of a second need no extended header, which doubles the headers.

    Attributes:
        offset: Bytes written so far.
    """

    def __init__(self, fd: int, *, is_ours: bool = False) -> None:
        self._fd, self._waiting, self._size, self._is_ours = fd, [b""], 0, is_ours
        self.offset = 0

    def add(self, member: TarInfo, fd: int = -1) -> None:
        """Write a member; its content is read from `fd`: always `size` bytes, cut or filled with zeros."""
        head = _header(member, is_ours=self._is_ours)
        left = member.size if fd >= 0 else 0
        padding = -left % _BLOCK
        if 0 < left <= _PIECE:
            data = os.read(fd, left)
            if len(data) == left:  # as of nearly every file: all of it is one piece
                self._put(head + data + _ZEROS[:padding])
                return
            head, left = head + data, left - len(data)
        self._put(head)
        while left > 0:
            data = os.read(fd, min(left, _BUFFER)) or _ZEROS[: min(left, _PIECE)]
            left -= len(data)
            self._put(data)
        if padding:
            self._put(_ZEROS[:padding])

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self.offset += len(data)
        if self._size >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        view = memoryview(b"".join(self._waiting))
        self._waiting, self._size = [], 0
        while view:  # a kernel may take only some of a piece at a time
            view = view[os.write(self._fd, view) :]

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        if kind is None:
            self._put(_END)
            self._flush()


def new_digest() -> Any:
    """Return the hash object by which contents of files are compared."""
    import hashlib  # the zygote, whose helpers need none, does without

    return hashlib.blake2b(digest_size=16)


def _header(member: TarInfo, *, is_ours: bool = False) -> bytes:
    name = member.name + "/" if member.type == tarfile.DIRTYPE else member.name
    link, mtime = member.linkname, member.mtime
    whole = int(mtime)
    if (
        not (name.isascii() and link.isascii())
        or len(name) > 100
        or len(link) > 100
        or not 0 <= mtime < _MOST_SIZE
        or not (member.uid < _MOST_ID and member.gid < _MOST_ID and member.size < _MOST_SIZE)
        or member.devmajor
        or member.devminor
    ):
        return member.tobuf(tarfile.PAX_FORMAT, tarfile.ENCODING, "surrogateescape")
    # Other readers than ours know fractions by an extended header only.
    fraction = min(round((mtime - whole) * 1e9), 999_999_999) if is_ours else 0
    head = _ustar(
        name.encode(),
        b"%07o\0%07o\0%07o\0%011o\0%011o\0"
        % (member.mode & 0o7777, member.uid, member.gid, member.size, whole),
        member.type,
        link.encode(),
        _FRACTION % fraction if fraction else b"",
    )
    if is_ours or mtime == whole:
        return head
    text = b" mtime=%s\n" % repr(mtime).encode()
    record = b"%d%s" % (len(text) + 2, text)  # two digits: a time has some twenty
    return _extended(len(record)) + record.ljust(_BLOCK, b"\0") + head


@lru_cache(64)
def _extended(size: int) -> bytes:
    numbers = b"0000000\0" * 3 + b"%011o\0" % size + b"0" * 11 + b"\0"
    return _ustar(b"././@PaxHeader", numbers, tarfile.XHDTYPE, b"")


_AFTER_LINK = b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(155)
_SUM = sum(_AFTER_LINK) + 8 * ord(" ")
_FRACTION = b".%09d"  # of a second, in the last 12 bytes of a header, which ustar leaves unused


def _ustar(name: bytes, numbers: bytes, kind: bytes, link: bytes, rest: bytes = b"") -> bytes:
    total = _SUM + sum(name) + sum(numbers) + kind[0] + sum(link) + sum(rest)
    return b"%s%s%06o\0 %s%s%s%s" % (
        name.ljust(100, b"\0"),
        numbers,
        total,
        kind,
        link.ljust(100, b"\0"),
        _AFTER_LINK,
        rest.ljust(12, b"\0"),
    )


class Reader:
    """Members of a tar stream, in turn. The content of each is read before the next, or passed over.

    Args:
        fd: Read to the end of the stream.
        closefd: Whether it is closed then.

    Raises:
        ReadError: It is not a whole, uncompressed tar stream.
    """

    def __init__(self, fd: int, *, closefd: bool = False) -> None:
        self._file = io.BufferedReader(io.FileIO(fd, closefd=closefd), _BUFFER)
        self._left = self._padding = 0
        self._global: dict[str, Any] = {}
        self._known: dict[bytes, int] = {}  # extended headers, and the sizes that they tell

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[TarInfo]:
        is_first = True
        while (member := self._next(is_first=is_first)) is not None:
            is_first = False
            yield member

    @property
    def offset(self) -> int:
        """Return the place in the file of the next byte: of the member's content, before it is read."""
        return self._file.tell()

    def drain(self) -> None:
        """Read what follows the end: padding, for whose writer a closed pipe would be an error."""
        while self._file.read(_BUFFER):
            continue

    def copy(self, fd: int, digest: Any = None) -> int:
        """Write the member's content to a new file; where there is nothing but zeros a hole is left.

        Args:
            digest: Updated with the content; see `new_digest`.
        """
        size, has_hole = self._left, False
        for data in self.content():
            if digest is not None:
                digest.update(data)
            has_hole = data == _ZEROS[: len(data)]
            if has_hole:
                os.lseek(fd, len(data), os.SEEK_CUR)
                continue
            written = os.write(fd, data)
            while written < len(data):
                written += os.write(fd, data[written:])
        if has_hole:
            os.ftruncate(fd, size)
        return size

    def content(self) -> Iterator[bytes]:
        while self._left > 0:
            data = self._read(min(self._left, _PIECE))
            self._left -= len(data)
            yield data

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ReadError("it breaks off")
        return data

    def _next(self, *, is_first: bool) -> TarInfo | None:
        extended = self._global
        for _ in range(_MOST_IN_A_ROW):
            self._pass_over()
            block = self._file.read(_BLOCK)
            if len(block) < _BLOCK:
                if block or is_first:
                    raise ReadError("it breaks off within a header" if block else "it is empty")
                return None
            size = self._known.get(block)
            if size is not None:
                extended = {**extended, **self._records(size)}
                continue
            if block == _ZEROS[:_BLOCK]:
                return None
            member = _parsed(block)
            if member.type in _PAX:
                records = self._records(member.size)
                extended = {**extended, **records}
                if member.type == tarfile.XGLTYPE:
                    self._global = {**self._global, **records}
                elif len(self._known) < _MOST_KNOWN:
                    self._known[block] = member.size
            elif member.type in _GNU_LONG:
                name = _text(self._payload(member.size))
                extended = {**extended, _GNU_LONG[member.type]: name}
            else:
                return self._whole(member, extended)
        raise ReadError("headers that describe headers without end")

    def _records(self, size: int) -> dict[str, Any]:
        return _records(self._payload(size))

    def _payload(self, size: int) -> bytes:
        """Read the content of an extended header."""
        if not 0 <= size <= LARGEST_HEADER:
            raise ReadError(f"a header of {size} bytes")
        self._padding = -size % _BLOCK
        return self._read(size)

    def _whole(self, member: TarInfo, extended: dict[str, Any]) -> TarInfo:
        for key, value in extended.items():
            setattr(member, _TEXTS.get(key, key), value)
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise ReadError("a file with holes is not taken as such")
        if member.size < 0 or not -_MOST_TIME < member.mtime < _MOST_TIME:
            raise ReadError(f"{member.name!r}: a size or time that no file can have")
        if not (0 <= member.uid < 1 << 32 and 0 <= member.gid < 1 << 32):
            raise ReadError(f"{member.name!r}: an owner that no file can have")
        if "\0" in member.linkname:
            raise ReadError(f"{member.name!r}: a NUL in its link target")
        if member.isdir():
            member.name = member.name.rstrip("/")
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        self._left = member.size if has_content else 0
        self._padding = -self._left % _BLOCK
        return member

    def _pass_over(self) -> None:
        left, self._left = self._left, 0
        while left > 0:
            left -= len(self._read(min(left, _BUFFER)))
        if self._padding:
            self._read(self._padding)
            self._padding = 0


def _parsed(block: bytes) -> TarInfo:
    member = TarInfo(_text(block[:100]))
    # Without zeros there is a quarter to add up.
    rest = (block[:148] + block[156:]).translate(None, b"\0")
    try:
        if _number(block[148:156]) != sum(rest) + 8 * ord(" "):
            raise ReadError("a header with a wrong checksum")
        # Five numbers in octal, as most write them.
        if block[107:124:8] + block[135:148:12] == _ENDS and block[100:148].isascii():
            member.mode, member.uid = int(block[100:107], 8), int(block[108:115], 8)
            member.gid, member.size = int(block[116:123], 8), int(block[124:135], 8)
            member.mtime = int(block[136:147], 8)
        else:
            member.mode, member.uid = _number(block[100:108]), _number(block[108:116])
            member.gid, member.size = _number(block[116:124]), _number(block[124:136])
            member.mtime = _number(block[136:148])
    except ValueError as exc:
        raise ReadError(f"a malformed header: {exc}") from exc
    member.type = block[156:157]
    if block[157]:
        member.linkname = _text(block[157:257])
    if member.type == tarfile.AREGTYPE and member.name.endswith("/"):
        member.type = tarfile.DIRTYPE  # of a tar before 1988
    if block[257:263] == b"ustar\0":  # GNU has other things there
        if block[345]:
            member.name = f"{_text(block[345:500])}/{member.name}"
        if block[500] == _POINT and block[501:510].isdigit():
            member.mtime += int(block[501:510]) / 1e9
    return member


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's base 256
        high = -1 if field[0] == 0xFF else field[0] & 0x7F
        return (high << 8 * (len(field) - 1)) + int.from_bytes(field[1:], "big")
    return int(field.rstrip(b"\0 ") or b"0", 8)


def _records(payload: bytes) -> dict[str, Any]:
    """The records of a pax header that mean something here."""
    found: dict[str, Any] = {}
    while payload and payload[0]:
        digits, space, _rest = payload.partition(b" ")
        try:
            length = int(digits) if space and digits.isdigit() and len(digits) < 8 else 0
        except ValueError:
            length = 0
        record = payload[len(digits) + 1 : length]
        key, equals, value = record.partition(b"=")
        if length > len(payload) or not (equals and value.endswith(b"\n")):
            raise ReadError("a malformed extended header")
        payload, value = payload[length:], value[:-1]
        if key.startswith(b"GNU.sparse."):
            raise ReadError("a file with holes is not taken as such")
        name = key.decode("utf-8", "surrogateescape")
        if name in _TEXTS:
            found[name] = value.decode("utf-8", "surrogateescape")
        elif name in _NUMBERS:
            try:
                found[name] = _NUMBERS[name](value)
            except (ValueError, OverflowError) as exc:
                raise ReadError(f"{name} is no number") from exc
    return found
