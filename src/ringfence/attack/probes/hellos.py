"""Ways past a policy by TLS: a connection for one name in which another one is asked for, or nobody can tell.

Behind many addresses there are servers of many names, and which of them answers is said in the ClientHello.
The service that is allowed knows no TLS: it takes the hello for a line of nonsense, and the request
that one of its extensions holds for a request. So `/seen` tells whether a hello came through.
"""

from __future__ import annotations

import os
import struct

from .egress import _say_by_name, _seen
from .kit import ESCAPED, LIMITED, NETWORK, Outcome, inconclusive, probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OWN, _OTHER = b"localhost", b"elsewhere.example"
_SERVER_NAME, _ENCRYPTED_HELLO, _UNKNOWN = (
    0,
    0xFE0D,
    0x1A1A,
)  # the last one is for nothing: RFC 8701


def _sized(data: bytes, size: int = 2) -> bytes:
    return len(data).to_bytes(size, "big") + data


def _extension(number: int, data: bytes) -> bytes:
    return struct.pack("!H", number) + _sized(data)


def _names(*names: bytes) -> bytes:
    return _extension(_SERVER_NAME, _sized(b"".join(b"\0" + _sized(name) for name in names)))


def _hello(extensions: bytes, marker: str) -> bytes:
    """A ClientHello, in TLS 1.2's form: RFC 8446, 4.1.2."""
    request = f" x\r\n\r\nGET /{marker} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    whole = b""
    for more in range(16):
        held_back = request.encode() + b"x" * more
        body = b"\x03\x03" + b"r" * 32 + b"\0" + _sized(b"\x13\x01") + b"\x01\0"
        body += _sized(extensions + _extension(_UNKNOWN, held_back))
        whole = b"\x16\x03\x01" + _sized(b"\x01" + _sized(body, 3))
        if whole.index(b"\n") > whole.index(b" x\r"):
            break  # no length looks like the end of a line
    return whole


def _reaches(context: dict[str, Any], name: str, extensions: bytes) -> Outcome:
    marker = f"hello-{name}-{os.getpid()}"
    _say_by_name(context["service"], _hello(extensions, marker))
    return _seen(context, f"/{marker}")


_HELLOS = {
    "other-name": ("for another name", _names(_OTHER)),
    "no-name": ("for no name", b""),
    "two-names": ("for two names", _names(_OWN, _OTHER)),
    "two-lists": ("for a name and then for another", _names(_OWN) + _names(_OTHER)),
    "hidden-name": (
        "for a name that nobody can read (ECH)",
        _names(_OWN) + _extension(_ENCRYPTED_HELLO, b"\0" * 64),
    ),
    "name-with-zero": ("for a name that a zero cuts off", _names(_OWN + b"\0." + _OTHER)),
}


def _tried(name: str, extensions: bytes) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        usual = _reaches(context, f"usual-{name}", _names(_OWN))
        if usual.status != ESCAPED:
            return inconclusive(
                f"not even the name that is allowed is let through: {usual.evidence}"
            )
        return _reaches(context, name, extensions)

    return run


for _name, (_what, _extensions) in _HELLOS.items():
    probe(
        f"network.tls-{_name}",
        "high",
        NETWORK,
        where=LIMITED,
        about=f"No TLS {_what} may be spoken in a connection that is allowed for one name.",
    )(_tried(_name, _extensions))
