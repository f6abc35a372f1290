"""SOCKS 5 as a server: no authentication, CONNECT only, a name or an address. Source: RFC 1928."""

from __future__ import annotations

import _socket as socket

from .refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .io.streams import Stream

VERSION = 5
GRANTED, FAILED, NOT_ALLOWED, UNREACHABLE, NOT_ANSWERED, BAD_COMMAND, BAD_ADDRESS = (
    0,
    1,
    2,
    4,
    5,
    7,
    8,
)
_NO_AUTHENTICATION, _NO_METHOD = 0, 0xFF
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4


async def target(stream: Stream) -> tuple[str, int]:
    """Greet the client and read whom it asks for: (name or address as text, port).

    The name is the client's own spelling: nothing is known of it but that it is ASCII text without
    control characters. The client waits for `reply`.

    Raises:
        Refused: After the client was told, where the protocol has words for it.
    """
    version, count = await _exactly(stream, 2)
    if version != VERSION:
        raise Refused("not SOCKS 5")
    methods = await _exactly(stream, count)
    if _NO_AUTHENTICATION not in methods:
        await stream.write(bytes((VERSION, _NO_METHOD)))
        raise Refused("a SOCKS client that insists on authentication")
    await stream.write(bytes((VERSION, _NO_AUTHENTICATION)))
    version, command, reserved, kind = await _exactly(stream, 4)
    if (version, reserved) != (VERSION, 0):
        raise Refused("not a SOCKS 5 request")
    if command != _CONNECT:
        await reply(stream, BAD_COMMAND)
        raise Refused("a SOCKS command other than CONNECT")
    host = await _host(stream, kind)
    port = int.from_bytes(await _exactly(stream, 2), "big")
    return host, port


async def reply(stream: Stream, code: int) -> None:
    """Tell the client how it went; the address that the standard wants here means nothing."""
    await stream.write(bytes((VERSION, code, 0, _V4)) + bytes(6))


async def _host(stream: Stream, kind: int) -> str:
    if kind == _V4:
        return socket.inet_ntop(socket.AF_INET, await _exactly(stream, 4))
    if kind == _V6:
        return socket.inet_ntop(socket.AF_INET6, await _exactly(stream, 16))
    if kind != _NAME:
        await reply(stream, BAD_ADDRESS)
        raise Refused("a SOCKS address of an unknown kind")
    (length,) = await _exactly(stream, 1)
    name = await _exactly(stream, length)
    # A NUL ends the name for one reader and not for the next.
    if not name or not name.isascii() or not name.decode("ascii").isprintable():
        await reply(stream, NOT_ALLOWED)
        raise Refused("an invalid name in a SOCKS request")
    return name.decode("ascii")


async def _exactly(stream: Stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.read(count - len(data))
        if not more:
            raise Refused("the client went away within its SOCKS request")
        data += more
    return data
