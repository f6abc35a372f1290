"""Connect's JSON codec: frames of streams, and errors by their codes."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ..api.bodies import SHORT, loads
from ..errors import BadJson, RingfenceError

STREAM, UNARY = "application/connect+json", "application/json"
STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
_CODES = {
    "unauthenticated": "unauthenticated",
    "forbidden": "permission_denied",
    "permission_denied": "permission_denied",
    "file_not_found": "not_found",
    "exec_not_found": "not_found",
    "file_exists": "already_exists",
    "sandbox_not_found": "unavailable",
    "sandbox_lost": "unavailable",
    "server_unreachable": "unavailable",
    "lifecycle": "failed_precondition",
    "exec_failed": "invalid_argument",
    "timeout": "deadline_exceeded",
    "unsupported": "unimplemented",
    "io": "internal",
    "task_failed": "internal",
    "resource_exhausted": "resource_exhausted",
    "quota_exceeded": "resource_exhausted",
    "storage_full": "resource_exhausted",
    "too_large": "resource_exhausted",
    "too_many_requests": "resource_exhausted",
}
_COMPRESSED, _LAST = 1, 2
_HEAD = 5
MOST_FRAME_BYTES = 4 << 20
_PIECE = 1 << 18


class RpcError(Exception):
    """An error with the code that a client of Connect expects."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def form(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


def rpc_error(exc: Exception) -> RpcError:
    if isinstance(exc, RpcError):
        return exc
    if isinstance(exc, RingfenceError):
        return RpcError(_CODES.get(exc.code, "invalid_argument"), exc.message)
    return RpcError("internal", "the server failed; its log says why")


def frame(form: dict[str, Any]) -> bytes:
    return _framed(0, form)


def last_frame(error: RpcError | None = None) -> bytes:
    """The end of a stream. Without it, clients take the stream for broken."""
    return _framed(_LAST, {} if error is None else {"error": error.form})


def _framed(flags: int, form: dict[str, Any]) -> bytes:
    text = json.dumps(form, separators=(",", ":")).encode()
    return bytes([flags]) + len(text).to_bytes(4, "big") + text


class Frames:
    """Messages of a client's stream, from pieces of any size. Holds one frame at most.

    Args:
        is_gzip: Whether frames that say that they are compressed are so by gzip.
    """

    def __init__(self, *, is_gzip: bool = False) -> None:
        self._buffer, self._is_gzip = bytearray(), is_gzip

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Yield the messages that are whole by now, and whether each is compressed: see `inflated`.

        Raises:
            RpcError: A frame is too long, or is compressed in another way.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD:
            flags, size = self._buffer[0], int.from_bytes(self._buffer[1:_HEAD], "big")
            if size > MOST_FRAME_BYTES:
                raise RpcError("resource_exhausted", f"a message of {size} bytes is too long")
            if len(self._buffer) < _HEAD + size:
                break
            text = bytes(self._buffer[_HEAD : _HEAD + size])
            del self._buffer[: _HEAD + size]
            if flags & _COMPRESSED and not self._is_gzip:
                raise RpcError("unimplemented", "messages may be compressed by gzip only")
            if not flags & _LAST:
                yield text, bool(flags & _COMPRESSED)

    def finish(self) -> None:
        """Refuse a stream that ended within a frame.

        Raises:
            RpcError: It did.
        """
        if self._buffer:
            raise RpcError("invalid_argument", "the stream ended within a message")


class Inflate:
    """gzip, undone piece by piece: a megabyte of it may be a gigabyte.

    Args:
        most: Bytes that may come out, all together; None: whoever takes them has a bound.
    """

    def __init__(self, most: int | None = None) -> None:
        self._zlib, self._left = zlib.decompressobj(31), most

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what comes out, a bounded piece at a time.

        Raises:
            RpcError: It is not gzip, or too much.
        """
        while data:
            try:
                plain = self._zlib.decompress(data, _PIECE)
            except zlib.error as exc:
                raise RpcError("invalid_argument", f"the body is not gzip: {exc}") from exc
            if self._left is not None:
                self._left -= len(plain)
                if self._left < 0:
                    raise RpcError("resource_exhausted", "the body is too long uncompressed")
            if plain:
                yield plain
            data = self._zlib.unconsumed_tail
            if self._zlib.eof:
                return

    @property
    def is_whole(self) -> bool:
        """True once the end of the compressed stream has come."""
        return self._zlib.eof


def inflated(text: bytes) -> bytes:
    """Return the message of a compressed frame: call it in a thread, it may be 4 MiB.

    Raises:
        RpcError: It is not gzip, or longer.
    """
    return b"".join(Inflate(MOST_FRAME_BYTES).pieces(text))


def json_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object; nothing at all is an empty one. A long one is read in a thread: `Call.read`.

    Raises:
        RpcError: It is none.
        TooLarge: A long one has more values than any request needs.
    """
    try:
        form = (loads if len(text) > SHORT else json.loads)(text) if text.strip() else {}
    except (BadJson, ValueError, RecursionError) as exc:
        raise RpcError("invalid_argument", f"the body is not JSON: {exc}") from exc
    if not isinstance(form, dict):
        raise RpcError("invalid_argument", "the body is not a JSON object")
    return form


def field(form: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field in either spelling, `camelCase` or `snake_case`; null is the same as missing.

    Raises:
        RpcError: It is of another type.
    """
    snake = "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
    found = form.get(name, form.get(snake))
    if found is None:
        return default
    if kind is int and isinstance(found, str) and found.removeprefix("-").isdecimal():
        found = int(found[:20])  # proto3 writes 64 bits as text
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise RpcError("invalid_argument", f"{name} is not of type {kind.__name__}")
    if isinstance(found, int) and abs(found) >= 1 << 63:
        raise RpcError("invalid_argument", f"{name} is not a number of 64 bits")
    return found


def from_base64(text: str) -> bytes:
    """Bytes as proto3 writes them in JSON.

    Raises:
        RpcError: They are not so.
    """
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as exc:
        raise RpcError("invalid_argument", f"not base64: {exc}") from exc


def to_base64(data: bytes) -> str:
    """Bytes as proto3 writes them in JSON."""
    return base64.b64encode(data).decode()


def timestamp(seconds: float) -> str:
    at = datetime.fromtimestamp(max(0.0, seconds), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
