"""What a client's first bytes are the beginning of: decided without I/O, before any is forwarded.

A server behind an allowed name may answer for other names, too: those that share its address. Only
HTTP and TLS have the client say a name, so those are looked into, and whatever a lenient server
might still take for one of them counts as it. The rest is passed on as it is.
"""

from __future__ import annotations

TLS, HTTP, RAW = "tls", "http", "raw"
MOST_BYTES = 4096  # of a first line that may turn out to be HTTP

_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
# RFC 9110, 5.6.2
_TOKEN = _LETTERS | frozenset(b"!#$%&'*+-.^_`|~0123456789")
_LONGEST_METHOD = 24
_BLANK = b" \t"
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"PRI"))
_METHODS |= {b"CONNECT", b"TRACE"}


def protocol(data: bytes) -> str | None:
    """`TLS`, `HTTP` or `RAW`; None: more bytes are needed to tell.

    Precondition: `data` is not empty.
    """
    if data[0] == 0x16:
        return None if len(data) < 2 else TLS if data[1] == 3 else RAW
    if data[0] >= 0x80:
        return _old_tls(data)
    if data[0] in b"\r\n \t":
        return HTTP  # servers skip blank lines before a request
    if data[0] in _LETTERS:
        return _text(data)
    return RAW


def _old_tls(data: bytes) -> str | None:
    """A ClientHello in the form of SSL 2: RFC 5246, E.2. It has no room for a name."""
    if len(data) < 4:
        return None if data[2:] in (b"", b"\1") else RAW
    return TLS if data[2] == 1 and data[3] in (0, 2, 3) else RAW


def _text(data: bytes) -> str | None:
    """`TOKEN SP ...`: HTTP if it is a method, or if the line ends as a request line does."""
    size = 0
    while size < len(data) and data[size] in _TOKEN:
        size += 1
    if size > _LONGEST_METHOD:
        return RAW
    if size == len(data):
        return None
    if data[size] not in _BLANK:
        # `GET\r\n` is nothing to any server, and neither is `SSH-2.0-x\r\n`.
        return RAW
    if data[:size].upper() in _METHODS:
        return HTTP
    line, newline, _ = data[:MOST_BYTES].partition(b"\n")
    if not newline and len(data) < MOST_BYTES:
        return None
    return HTTP if not newline or b"HTTP/" in line.upper() else RAW
