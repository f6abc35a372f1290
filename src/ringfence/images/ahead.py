"""A layer's plain stream, hashed on the way: each on a thread of its own, some pieces ahead of its reader.

`zlib`, `hashlib` and the kernel let go of the interpreter while they work, so that two processors
decompress, hash and write at the same time.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO

_PIECE = 256 << 10
_PIECES_AHEAD = 32


class TooLargeError(Exception):
    """The stream has more bytes than are allowed."""


class Ahead:
    """See `entries.Source`.

    Args:
        stream: Read on another thread.
        most_bytes: More are refused, wherever they come.
    """

    def __init__(self, stream: IO[bytes], most_bytes: int) -> None:
        self._stream, self._left = stream, most_bytes
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_PIECES_AHEAD)
        self._to_hash: queue.Queue[bytes] = queue.Queue(_PIECES_AHEAD)
        self._digest = hashlib.sha256()
        self._is_over = False
        self._hasher = _started(self._hash)
        _started(self._run)

    def read(self) -> bytes:
        """Some bytes; none at the end. Raises what reading them raised."""
        if self._is_over:
            return b""
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        self._is_over = not piece
        return piece

    def digest(self) -> str:
        """Of the whole stream. Precondition: it was read to its end."""
        self._hasher.join()
        return f"sha256:{self._digest.hexdigest()}"

    def _run(self) -> None:
        try:
            while piece := self._stream.read(_PIECE):
                self._left -= len(piece)
                if self._left < 0:
                    raise TooLargeError
                self._to_hash.put(piece)
                self._pieces.put(piece)
            self._pieces.put(b"")
        except BaseException as exc:  # noqa: BLE001  the reader raises it
            self._pieces.put(exc)
        finally:
            self._to_hash.put(b"")

    def _hash(self) -> None:
        while piece := self._to_hash.get():
            self._digest.update(piece)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
