"""Files of a `multipart/form-data` body, piece by piece: nothing is held or put aside (RFC 7578)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from .codec import RpcError

_MOST_HEAD_BYTES = 16 << 10
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'\bfilename="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content type names.

    Raises:
        RpcError: It names none.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise RpcError("invalid_argument", "the multipart body has no boundary")
    return (match[1] or match[2]).encode("latin-1", "replace")


async def parts(
    body: AsyncIterator[bytes], boundary: bytes
) -> AsyncIterator[tuple[str | None, bytes]]:
    """Yield pieces of files: (name, b"") begins one, (None, data) is of it.

    Raises:
        RpcError: The body is not so, or broke off.
    """
    form = _Form(boundary)
    async for data in body:
        form.buffer += data
        while (found := form.next()) is not None:
            yield found
    if not form.is_whole:
        raise RpcError("invalid_argument", "the multipart body broke off")


class _Form:
    """A body as far as it has come. Holds one piece of it."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self.buffer = bytearray(b"\r\n")
        self._is_in_part = self.is_whole = False

    def next(self) -> tuple[str | None, bytes] | None:
        """The next piece; None where more has to come."""
        if self.is_whole:
            self.buffer.clear()
            return None
        if self._is_in_part:
            at = self.buffer.find(self._mark)
            # Without the mark, its beginning may be there already.
            end = at if at >= 0 else len(self.buffer) - len(self._mark) + 1
            self._is_in_part = at < 0
            if end > 0:
                data = bytes(self.buffer[:end])
                del self.buffer[:end]
                return None, data
        return None if self._is_in_part else self._head()

    def _head(self) -> tuple[str | None, bytes] | None:
        buffer, size = self.buffer, len(self._mark)
        if len(buffer) < size + 2:
            return None
        if not buffer.startswith(self._mark):
            raise RpcError("invalid_argument", "the multipart body is damaged")
        if buffer[size : size + 2] == b"--":
            self.is_whole = True
            return None
        end = buffer.find(b"\r\n\r\n", size)
        if end < 0:
            if len(buffer) > _MOST_HEAD_BYTES:
                raise RpcError("resource_exhausted", "the head of a part is too long")
            return None
        name = _NAME.search(bytes(buffer[size:end]))
        del buffer[: end + 4]
        self._is_in_part = True
        return (_plain(name[1]) if name else ""), b""


def _plain(name: bytes) -> str:
    """A file's name: browsers write `%22` and line ends so, Python's clients a backslash."""
    text = re.sub(rb"\\(.)", rb"\1", name).decode("utf-8", "replace")
    return text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
