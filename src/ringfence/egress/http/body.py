"""Bodies of HTTP/1.1: how far one goes, and the chunked coding. No I/O."""

from __future__ import annotations

from ..refused import Refused
from .fields import CHUNKED, UNTIL_CLOSE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .fields import Length

_HEX = b"0123456789ABCDEFabcdef"
_MOST_DIGITS = 15
_LONGEST_LINE = _MOST_DIGITS + 2  # and CRLF
_LONGEST_EXTENSION = 1024
_LONGEST_TRAILERS = 16384
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """`data` as one chunk; not for empty data, which would be the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class Body:
    """Cuts one body out of a stream.

    Args:
        length: Bytes, or `CHUNKED`, or `UNTIL_CLOSE`.
        lenient: Accept chunk extensions and trailers, and drop them: of servers, which are not
            the ones that smuggle requests.

    Attributes:
        done: The whole body was seen.
        rest: What came after it.
    """

    def __init__(self, length: Length, *, lenient: bool = False) -> None:
        self.done = length == 0
        self.rest = b""
        self._left = length
        self._chunks = _Chunks(lenient) if length == CHUNKED else None

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that is body, without the marks of chunks.

        Raises:
            Refused: The chunks are not in the plainest form.
        """
        if self.done:
            self.rest += data
            return b""
        if self._chunks is not None:
            payload = self._chunks.feed(data)
            if self._chunks.done:
                self.done, self.rest = True, bytes(self._chunks.buffer)
            return payload
        if self._left == UNTIL_CLOSE:
            return data
        payload, self.rest = data[: self._left], data[self._left :]
        self._left -= len(payload)
        self.done = self._left == 0
        return payload

    def close(self) -> None:
        """The stream has ended.

        Raises:
            Refused: In the middle of the body.
        """
        if self._left == UNTIL_CLOSE:
            self.done = True
        if not self.done:
            raise Refused("the connection ended inside a body", status=400)


class _Chunks:
    """The chunked coding: `size CRLF data CRLF`, a last chunk of size 0, a blank line.

    Source: RFC 9112, section 7.1.
    """

    def __init__(self, lenient: bool) -> None:
        self.buffer = bytearray()
        self.done = False
        self._lenient = lenient
        self._left = 0  # of the present chunk's data
        self._state: Callable[[bytearray], bool] = self._size

    def feed(self, data: bytes) -> bytes:
        self.buffer += data
        payload = bytearray()
        while not self.done and self._state(payload):
            pass
        return bytes(payload)

    # Each state takes what it can from the buffer; False: it needs more.

    def _size(self, _payload: bytearray) -> bool:
        longest = _LONGEST_EXTENSION if self._lenient else _LONGEST_LINE
        line = self._line(longest)
        if line is None:
            return False
        digits = line.partition(b";")[0].rstrip(b" \t") if self._lenient else line
        if not 0 < len(digits) <= _MOST_DIGITS or digits.translate(None, _HEX):
            raise Refused("a chunk size that is not a plain hexadecimal number", status=400)
        self._left = int(digits, 16)
        self._state = self._data if self._left else self._trailers
        return True

    def _data(self, payload: bytearray) -> bool:
        taken = self.buffer[: self._left]
        del self.buffer[: self._left]
        payload += taken
        self._left -= len(taken)
        if self._left == 0:
            self._state = self._after_data
        return self._left == 0

    def _after_data(self, _payload: bytearray) -> bool:
        if self._line(2) is None:
            return False
        self._state = self._size
        return True

    def _trailers(self, _payload: bytearray) -> bool:
        line = self._line(_LONGEST_TRAILERS if self._lenient else 2)
        if line is None:
            return False
        self.done = not line
        return True

    def _line(self, longest: int) -> bytes | None:
        """The next line, without its CRLF; None: not there yet.

        Raises:
            Refused: `longest` bytes hold no line end, or a bare CR or LF comes before it.
        """
        end = self.buffer.find(b"\r\n", 0, longest)
        before = self.buffer[: longest if end < 0 else end]
        if end < 0:
            before = before.removesuffix(b"\r")  # its LF may be still on the way
        if b"\n" in before or b"\r" in before or (end < 0 and len(before) >= longest - 1):
            raise Refused("a chunk without its final line break", status=400)
        if end < 0:
            return None
        del self.buffer[: end + 2]
        return bytes(before)
