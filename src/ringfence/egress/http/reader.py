"""Reads heads off a stream, and then what comes after them."""

from __future__ import annotations

from ..refused import Refused
from .head import END

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..io.streams import Stream

PIECE = 1 << 18


class Reader:
    """A stream that is read head by head.

    Args:
        first: What was read from it already.
    """

    def __init__(self, stream: Stream, first: bytes = b"") -> None:
        self.stream = stream
        self._buffer = bytearray(first)

    async def head(
        self, most: int, *, status: int, check: Callable[[bytearray], None] | None = None
    ) -> bytes:
        """The next head, up to its blank line; b"" when the stream ends before one begins.

        Args:
            check: Is shown what there is of a head that has not ended, and may raise.

        Raises:
            Refused: It is longer than `most` bytes (`status`), or the stream ends inside it.
        """
        seen = 0
        while (end := self._buffer.find(END, max(0, seen - len(END)), most)) < 0:
            seen = len(self._buffer)
            if seen >= most:
                raise Refused(f"a head of more than {most} bytes", status=status)
            if check is not None and seen:
                check(self._buffer)
            data = await self.stream.read(PIECE)
            if not data:
                if self._buffer:
                    raise Refused("the connection ended inside a head", status=400)
                return b""
            self._buffer += data
        return self._take(end + len(END))

    async def read(self, most: int = PIECE) -> bytes:
        if self._buffer:
            return self._take(most)
        return await self.stream.read(most)

    @property
    def left(self) -> bytes:
        """Bytes read from the stream and not yet returned."""
        return bytes(self._buffer)

    def _take(self, most: int) -> bytes:
        taken = bytes(self._buffer[:most])
        del self._buffer[:most]
        return taken
