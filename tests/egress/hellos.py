"""ClientHellos: built field by field, made by a TLS library, and read by one."""

from __future__ import annotations

import ssl
from pathlib import Path

Extension = tuple[int, bytes]
ECH, SNI, ALPN = 0xFE0D, 0, 16


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def sni(*names: bytes, kind: int = 0) -> Extension:
    entries = b"".join(bytes([kind]) + vector(2, name) for name in names)
    return SNI, vector(2, entries)


def alpn(*protocols: bytes) -> Extension:
    return ALPN, vector(2, b"".join(vector(1, protocol) for protocol in protocols))


def message(
    *extensions: Extension,
    version: bytes = b"\x03\x03",
    session: bytes = b"s" * 32,
    suites: bytes = b"\x13\x01\x13\x02",
    compression: bytes = b"\x00",
    behind: bytes = b"",
    kind: int = 1,
    no_extensions: bool = False,
) -> bytes:
    """A handshake message, without the record around it."""
    joined = b"".join(number.to_bytes(2, "big") + vector(2, data) for number, data in extensions)
    body = version + b"r" * 32 + vector(1, session) + vector(2, suites) + vector(1, compression)
    body += behind if no_extensions else vector(2, joined) + behind
    return bytes([kind]) + vector(3, body)


def records(data: bytes, size: int = 1 << 14, *, version: bytes = b"\x03\x01") -> bytes:
    """`data` in records of at most `size` bytes."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"\x16" + version + vector(2, piece) for piece in pieces)


def of_this_library(name: str | None, protocols: list[str] | None = None) -> bytes:
    """What Python's ssl sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # no roots: reading them takes 20 ms
    context.check_hostname = name is not None
    if protocols:
        context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


class OpenSsl:
    """OpenSSL as a server: which name it reads.

    Args:
        certificate: A PEM file with a certificate and its key; any.
    """

    def __init__(self, certificate: Path) -> None:
        self._certificate = certificate
        self._context = self.context()
        self._context.sni_callback = self._note
        self._names: list[str | None] = []

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate)
        return context

    def _note(self, _connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
        self._names.append(name)

    def reads(self, data: bytes) -> tuple[bool, str | None]:
        """Whether it read a ClientHello to its end, and the name in it."""
        self._names.clear()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self._context.wrap_bio(incoming, outgoing, server_side=True)
        incoming.write(data)
        try:
            server.do_handshake()
        except (ssl.SSLError, ValueError):
            pass
        return bool(self._names), self._names[0] if self._names else None
