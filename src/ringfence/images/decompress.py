"""Layers as plain tar streams, whatever they are compressed with."""

from __future__ import annotations

import gzip
import os
from typing import IO, Any

from ..errors import InvalidRequest

NONE, GZIP, ZSTD = "", "gzip", "zstd"
_MAGIC = ((GZIP, b"\x1f\x8b"), (ZSTD, b"\x28\xb5\x2f\xfd"))
_ZSTD_WINDOW = 128 << 20  # what `zstd -T0 -19 --long=27` needs; more is refused


def compression_of(path: str) -> str:
    """What a layer is compressed with, from its first bytes: media types are not always true.

    Raises:
        InvalidRequest: zstd, and the extra that reads it is not installed.
    """
    with open(path, "rb") as file:
        start = file.read(4)
    found = next((name for name, magic in _MAGIC if start.startswith(magic)), NONE)
    if found == ZSTD:
        _zstandard()
    return found


def opened(fd: int, compression: str) -> IO[bytes]:
    """The tar stream of an open layer; owns the descriptor."""
    raw = os.fdopen(fd, "rb", buffering=1 << 20)
    if compression == GZIP:
        stream: Any = gzip.GzipFile(fileobj=raw)
        return stream  # type: ignore[no-any-return]
    if compression == ZSTD:
        reader: Any = _zstandard().ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return reader.stream_reader(raw, read_across_frames=True)  # type: ignore[no-any-return]
    return raw


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
