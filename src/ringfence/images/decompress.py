"""Layers as plain tar streams, whatever they are compressed with."""

from __future__ import annotations

import os
import zlib
from typing import IO, Any

from ..errors import InvalidRequest

NONE, GZIP, ZSTD = "", "gzip", "zstd"
_MAGIC = ((GZIP, b"\x1f\x8b"), (ZSTD, b"\x28\xb5\x2f\xfd"))
_WITH_HEADER = 31  # of zlib's window bits: gzip, checked
_INPUT = 256 << 10
_ZSTD_WINDOW = 128 << 20  # what `zstd -T0 -19 --long=27` needs; more is refused


def compression_of(path: str) -> str:
    """Detect a layer's compression from its first bytes: media types are not always true.

    Raises:
        InvalidRequest: It is zstd, and the extra that reads zstd is not installed.
    """
    with open(path, "rb") as file:
        start = file.read(4)
    found = next((name for name, magic in _MAGIC if start.startswith(magic)), NONE)
    if found == ZSTD:
        _zstandard()
    return found


def opened(fd: int, compression: str) -> IO[bytes]:
    """The tar stream of an open layer; owns the descriptor."""
    raw = os.fdopen(fd, "rb", buffering=0)
    if compression == NONE:
        return raw
    stream: Any = _Gzip(raw) if compression == GZIP else _Zstd(raw)
    return stream  # type: ignore[no-any-return]


class _Zstd:
    """Frames one after the other."""

    def __init__(self, raw: IO[bytes]) -> None:
        library = _zstandard()
        reader = library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._stream: Any = reader.stream_reader(raw, read_across_frames=True)
        self._error: type[Exception] = library.ZstdError

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end.

        Raises:
            ValueError: It is damaged, or needs more memory than it may.
        """
        try:
            found: bytes = self._stream.read(size)
        except self._error as exc:
            raise ValueError(str(exc)) from exc
        return found


class _Gzip:
    """Members one after the other, without the library's own second copy of every byte."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._rest = raw, b""
        self._member: Any = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end.

        Raises:
            EOFError: It ends within a member.
            zlib.error: It is damaged.
        """
        while self._member is not None or self._begin():
            data = self._rest or self._raw.read(_INPUT)
            found: bytes = self._member.decompress(data, size)
            if self._member.eof:
                self._rest, self._member = self._member.unused_data.lstrip(b"\0"), None
            else:
                self._rest = self._member.unconsumed_tail
                if not found and not data:
                    raise EOFError("the compressed stream ends too early")
            if found:
                return found
        return b""

    def _begin(self) -> bool:
        """Begin the next gzip member; False at the end. Zeros between members are allowed."""
        while not self._rest:
            data = self._raw.read(_INPUT)
            if not data:
                return False
            self._rest = data.lstrip(b"\0")
        self._member = zlib.decompressobj(_WITH_HEADER)
        return True


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise InvalidRequest(
            "a layer of this image is compressed with zstd",
            field="image",
            hint='pip install "ringfence[images]"',
        ) from exc
    return zstandard
