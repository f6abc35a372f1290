"""The first message of a TLS client, read strictly for the server name. No I/O.

Only what comes before encryption is read: RFC 8446 (TLS 1.3), RFC 5246 (TLS 1.2), RFC 6066 (SNI).
"""

from __future__ import annotations

from ...model.base.model import Model
from ...model.base.record import dataclass
from ..refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MOST_BYTES = 16384  # of the message: with post-quantum key shares, some 2,000 are usual
_MOST_RECORDS = 64
_LONGEST_RECORD = 1 << 14  # RFC 8446, 5.1

# IANA TLS ContentType, HandshakeType and ExtensionType
_CHANGE_CIPHER_SPEC, _HANDSHAKE = 20, 22
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_SERVER_NAME, _ALPN = 0, 16
# Encrypted ClientHello, and its drafts that were in use: the real name is inside.
_ENCRYPTED_HELLOS = frozenset((0xFE0D, 0xFE0A, 0xFE09, 0xFE08, 0xFFCE))
# A ServerHello with this "random" asks for a second ClientHello. Source: RFC 8446, 4.1.3.
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


@dataclass(frozen=True, eq=False, repr=False)
class Hello(Model):
    """A ClientHello.

    Attributes:
        server_name: SNI, in lower case; None when the client sent none.
        alpn: Protocols offered, such as `h2` and `http/1.1`; empty when none were.
        is_encrypted: It has an encrypted hello inside (ECH), or claims to.
        size: Bytes of the records that hold it; what follows belongs to later messages.
    """

    server_name: str | None
    alpn: tuple[str, ...]
    is_encrypted: bool
    size: int


def client_hello(data: bytes | bytearray, *, second: bool = False) -> Hello | None:
    """Read the ClientHello at the start of a stream; None: it is not whole yet.

    Args:
        second: It answers a retry request; a ChangeCipherSpec record may come before it.

    Raises:
        Refused: Whatever this is, it is not a ClientHello in the form that RFC 8446 gives it.
    """
    message = _message(data, _CLIENT_HELLO, skip_change=second)
    if message is None:
        return None
    body, size = message
    return _hello(body, size)


def asks_again(data: bytes | bytearray) -> bool | None:
    """Return whether the server's first message asks for a second ClientHello; None: not whole yet.

    Servers are expected to compare both; where a name decides, this is not left to them. A message
    other than ServerHello (an alert) asks for nothing.
    """
    if data[:1] and data[0] != _HANDSHAKE:
        return False
    if len(data) >= 6 and data[5] != _SERVER_HELLO:
        return False
    # Header of record and of message, version, random: all in the first record of any server.
    return None if len(data) < 43 else data[11:43] == _RETRY


def _bad(reason: str) -> NoReturn:
    raise Refused(f"not a TLS ClientHello: {reason}")


def _message(data: bytes | bytearray, kind: int, *, skip_change: bool) -> tuple[bytes, int] | None:
    """The body of the handshake message at the start of `data`, and where its last record ends."""
    joined = bytearray()
    at = 0
    for _ in range(_MOST_RECORDS):
        head = data[at : at + 5]
        if head[:1] and head[0] == _CHANGE_CIPHER_SPEC and skip_change and at == 0:
            if len(data) < 6:
                return None
            if data[1:6] != b"\x03\x03\x00\x01\x01":
                _bad("an invalid ChangeCipherSpec")
            at, head = 6, data[6:11]
        if head[:1] and head[0] != _HANDSHAKE:
            _bad("another kind of record")
        if head[1:2] and head[1] != 3:
            _bad("another protocol's version")
        if len(head) < 5:
            return None
        length = int.from_bytes(head[3:5], "big")
        if not 0 < length <= _LONGEST_RECORD:
            _bad("a record of invalid length")
        joined += data[at + 5 : at + 5 + length]
        wanted = _wanted(joined, kind)
        if len(data) < at + 5 + length:
            return None
        at += 5 + length
        if wanted is not None and len(joined) >= wanted:
            if len(joined) > wanted:
                _bad("something else in the same record")
            return bytes(joined[4:]), at
    _bad("cut into too many records")


def _wanted(joined: bytearray, kind: int) -> int | None:
    """Bytes of the whole message, header included; refused as early as it can be."""
    if joined and joined[0] != kind:
        _bad("another kind of message")
    if len(joined) < 4:
        return None
    length = int.from_bytes(joined[1:4], "big")
    if length > MOST_BYTES:
        _bad(f"it is longer than {MOST_BYTES} bytes")
    return 4 + length


class _Reader:
    """Takes fields from the front of a message; never past its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) != count:
            _bad("a field that is longer than the message")
        self.at += count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int, least: int, most: int) -> bytes:
        """A field after its own length, which takes `size` bytes."""
        length = self.number(size)
        if not least <= length <= most:
            _bad("a field of invalid length")
        return self.take(length)

    def end(self) -> None:
        if self.at != len(self.data):
            _bad("bytes after the last field")

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


def _hello(body: bytes, size: int) -> Hello:
    reader = _Reader(body)
    version = reader.number(2)
    if not 0x0301 <= version <= 0x0303:  # TLS 1.3 says 1.2 here, too
        _bad("an invalid version")
    reader.take(32)
    reader.vector(1, 0, 32)
    if len(reader.vector(2, 2, 0xFFFE)) % 2:
        _bad("half a cipher suite")
    if 0 not in reader.vector(1, 1, 255):
        _bad("no null compression method")
    extensions = _extensions(reader.vector(2, 0, 0xFFFF)) if reader.more else {}
    reader.end()
    return Hello(
        server_name=_server_name(extensions.get(_SERVER_NAME)),
        alpn=_protocols(extensions.get(_ALPN)),
        is_encrypted=not _ENCRYPTED_HELLOS.isdisjoint(extensions),
        size=size,
    )


def _extensions(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    reader = _Reader(data)
    while reader.more:
        kind = reader.number(2)
        content = reader.vector(2, 0, 0xFFFF)
        if kind in found:
            _bad("the same extension twice")
        found[kind] = content
    return found


def _server_name(extension: bytes | None) -> str | None:
    if extension is None:
        return None
    outer = _Reader(extension)
    entries = _Reader(outer.vector(2, 1, 0xFFFF))
    outer.end()
    kind, name = entries.number(1), entries.vector(2, 1, 0xFFFF)
    # RFC 6066 allows one name of each type, and there is only the one type.
    entries.end()
    if kind != 0 or not name.isascii() or not name.decode("ascii").isprintable():
        _bad("an invalid server name")
    return name.decode("ascii").lower()


def _protocols(extension: bytes | None) -> tuple[str, ...]:
    if extension is None:
        return ()
    outer = _Reader(extension)
    entries = _Reader(outer.vector(2, 2, 0xFFFF))
    outer.end()
    found = []
    while entries.more:
        found.append(entries.vector(1, 1, 255).decode("latin-1"))
    return tuple(found)
